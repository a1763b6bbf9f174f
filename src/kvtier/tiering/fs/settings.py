"""The tier's own settings. Nothing is opened here; whether the directory can be used is seen when the tier is built."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.settings import absolute_path, flag, setting, size_bytes
from kvtier.tiering.kit.disk import DIRECT_IO, DURABILITY, NUM_THREADS, Durability
from kvtier.tiering.kit.lifetime import TTL

DEFAULT_FILE_MODE = 0o600

MAX_TASK_BYTES = 4 * 2**20
"""Bytes of rows that a thread moves at a stretch. Less computes fewer checksums ahead of the writes; more keeps a load
waiting behind a store, two milliseconds as it is, and the last thread of a job busy alone."""

MAX_TASK_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


def parse_file_mode(name: str, value: object) -> int:
    """Return permissions given as a number or as octal text such as ``"0660"``. Pure.

    Raises:
        ConfigError: neither, or not what a file of blocks can have.
    """
    is_octal_text = isinstance(value, str) and re.fullmatch(r"(0o|0)?[0-7]{3}", value)
    mode = int(value.removeprefix("0o"), 8) if is_octal_text and isinstance(value, str) else value
    if isinstance(mode, bool) or not isinstance(mode, int) or mode & ~0o666 or mode & 0o600 != 0o600:
        remedy = (
            'must let the owner read and write and give no right to execute, for example "0600" or "0660"'
        )
        raise ConfigError(name, value, remedy)
    return mode


@dataclass(frozen=True, slots=True)
class PackSettings:
    """What the user set for the tier; each field says what it is."""

    root_dir: Path = field(
        metadata=setting(
            absolute_path,
            "the directory, on a local disk; created if it is missing; `~` is the home directory",
            unit="absolute path",
        )
    )
    capacity_bytes: int = field(
        metadata=setting(
            size_bytes,
            "bounds the whole directory, all namespaces and engines; the smallest value of all engines counts",
            unit="bytes",
        )
    )
    pack_bytes: int | None = field(
        default=None,
        metadata=setting(
            size_bytes,
            "length of a pack, the file that one engine writes and gives away as a whole",
            unit="bytes",
            default_text="a 64th of the capacity",
        ),
    )
    file_mode: int = field(
        default=DEFAULT_FILE_MODE,
        metadata=setting(
            parse_file_mode,
            'private to the user; `"0660"` shares with a group; folders get matching permissions',
            unit="octal text",
            default_text='`"0600"`',
        ),
    )
    allow_shrink: bool = field(
        default=False,
        metadata=setting(
            flag,
            "`true` allows a `capacity_bytes` below half of what the directory holds, or of what other engines in it "
            "allow; the rest is removed",
        ),
    )
    direct_io: bool | None = field(default=None, metadata=DIRECT_IO)
    ttl_s: float | None = field(default=None, metadata=TTL)
    durability: Durability = field(default=Durability.NONE, metadata=DURABILITY)
    num_threads: int | None = field(default=None, metadata=NUM_THREADS)


def explain_shrinking(settings: PackSettings, used_bytes: int, allowed: Collection[int]) -> str | None:
    """Return why a capacity is too small for a directory, None where it is not. Pure.

    Args:
        settings: the engine's.
        used_bytes: what the directory holds.
        allowed: the capacities of the engines that use it now; the smallest counts for all.
    """
    allowed_bytes = min(allowed, default=0)
    most_bytes = max(used_bytes, allowed_bytes)
    if settings.allow_shrink or 2 * settings.capacity_bytes >= most_bytes:
        return None
    what = f"{settings.root_dir} holds" if used_bytes >= allowed_bytes else "engines that use it allow"
    return (
        f"is less than half of the {most_bytes} bytes that {what}, and the smallest capacity counts for all: give "
        'more, another root_dir, or "allow_shrink": true to remove the rest'
    )


def plan_max_task_blocks(row_bytes: int) -> int:
    """Return how many blocks a thread moves at a stretch. Pure."""
    return min(MAX_TASK_BLOCKS, max(1, MAX_TASK_BYTES // row_bytes))
