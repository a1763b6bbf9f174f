"""The tier's own settings.

Nothing is opened here; whether the directory can be written is seen when the tier is built.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.settings import absolute_path, flag, seconds, setting, size_bytes
from kvtier.tiering.fs.shared_usage import UsageRecord
from kvtier.tiering.fs.system import Owner
from kvtier.tiering.kit.disk import (
    DEFAULT_NUM_THREADS,
    DIRECT_IO,
    DURABILITY,
    Durability,
    num_threads_setting,
)
from kvtier.tiering.kit.lifetime import TTL
from kvtier.tiering.kit.threaded_tier import DEFAULT_NEGATIVE_TTL_S

DEFAULT_FILE_MODE = 0o600

NO_LIMIT_BYTES = 2**63 - 1
"""The capacity of a command that removes blocks: the smallest counts, so it must not bound others."""


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
class FSSettings:
    """What the user set for the tier; each field says what it is.

    Raises:
        ConfigError: two settings do not fit together.
    """

    root_dir: Path = field(
        metadata=setting(
            absolute_path,
            "the directory; created if it is missing; `~` is the home directory",
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
    shared: bool = field(
        default=True,
        metadata=setting(flag, "searches the disk for blocks that other processes wrote; `false` skips that"),
    )
    negative_ttl_s: float = field(
        default=DEFAULT_NEGATIVE_TTL_S,
        metadata=setting(
            seconds,
            "how long a negative lookup is cached; longer finds blocks of other engines later, shorter searches more "
            "often",
            unit="seconds",
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
            "allow; the rest is evicted",
        ),
    )
    direct_io: bool | None = field(default=None, metadata=DIRECT_IO)
    ttl_s: float | None = field(default=None, metadata=TTL)
    durability: Durability = field(default=Durability.NONE, metadata=DURABILITY)
    num_threads: int | None = field(
        default=None,
        metadata=num_threads_setting(
            "; without a number, at most as many threads store through the page cache as there are "
            "[usable cores](troubleshooting.md#cores)"
        ),
    )

    def __post_init__(self) -> None:
        if not self.shared and self.negative_ttl_s != DEFAULT_NEGATIVE_TTL_S:
            remedy = (
                "has no effect with shared=False, which never searches the disk: leave one of the two out"
            )
            raise ConfigError("negative_ttl_s", self.negative_ttl_s, remedy)


def require_capacity(settings: FSSettings, block_bytes: int) -> None:
    """Refuse a capacity of less than one block.

    Raises:
        ConfigError: it is too small; the message has the least.
    """
    if settings.capacity_bytes < block_bytes:
        remedy = f"one block takes {block_bytes} bytes with its header; give many times that"
        raise ConfigError("capacity_bytes", settings.capacity_bytes, remedy)


def explain_shrinking(capacity_bytes: int, record: UsageRecord, here: Owner, now_s: float) -> str | None:
    """Return why a capacity is too small for a directory that others use, None where it is not.

    Args:
        capacity_bytes: of an engine that is about to join.
        record: the shared count; what engines have in flight is not held yet, and may be of one that was killed.
        here: this process.
        now_s: wall clock.
    """
    held_bytes = record.used_bytes - record.in_flight_bytes
    allowed = [member.capacity_bytes for member in record.without_dead(here, now_s).members.values()]
    allowed_bytes = min((num for num in allowed if num < NO_LIMIT_BYTES), default=0)
    most_bytes = max(held_bytes, allowed_bytes)
    if 2 * capacity_bytes >= most_bytes:
        return None
    what = "it holds" if held_bytes >= allowed_bytes else "other engines in it allow"
    return (
        f"is less than half of the {most_bytes} bytes that {what}, and the smallest capacity counts for all: give "
        'more, another root_dir, or "allow_shrink": true to evict the rest'
    )


def plan_num_store_threads(settings: FSSettings, num_cores: int, *, has_direct_io: bool) -> int | None:
    """Return how many of the threads may store at the same time, None for each of them. Pure.

    Through the page cache a store is a copy and a checksum until the kernel makes writers wait: more threads than
    cores take turns, and take the interpreter's lock and the cores from the engine more often.
    """
    if has_direct_io or settings.num_threads is not None:
        return None
    return min(DEFAULT_NUM_THREADS, num_cores)
