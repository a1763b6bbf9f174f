"""The tier's own settings, and what follows from them for given rows.

Nothing is opened here; whether the file can be made is seen when the tier is built.
"""

from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.settings import absolute_path, flag, setting, size_bytes
from kvtier.tiering.kit.disk import DIRECT_IO, DURABILITY, Durability, num_threads_setting
from kvtier.tiering.kit.lifetime import TTL
from kvtier.tiering.slab.superblock import SlabGeometry, fit_geometry

MAX_TASK_BYTES = 4 * 2**20
"""Bytes of rows that a thread moves at a stretch. Less computes fewer checksums ahead of the writes; more keeps a load
waiting behind a store, two milliseconds as it is, and the last thread of a job busy alone."""

MAX_TASK_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


@dataclass(frozen=True, slots=True)
class SlabSettings:
    """What the user set for the tier; each field says what it is."""

    path: Path = field(
        metadata=setting(
            absolute_path,
            "the file, in an existing folder; one engine owns it while it runs",
            unit="absolute path",
        )
    )
    capacity_bytes: int = field(
        metadata=setting(
            size_bytes,
            "the maximal length of the file, reserved on the disk at the start",
            unit="bytes",
        )
    )
    allow_shrink: bool = field(
        default=False,
        metadata=setting(
            flag,
            "`true` allows a `capacity_bytes` below the length of the existing file, which is then emptied",
        ),
    )
    direct_io: bool | None = field(default=None, metadata=DIRECT_IO)
    ttl_s: float | None = field(default=None, metadata=TTL)
    durability: Durability = field(default=Durability.NONE, metadata=DURABILITY)
    num_threads: int | None = field(default=None, metadata=num_threads_setting())


def plan_geometry(settings: SlabSettings, row_bytes: int) -> SlabGeometry:
    """Return how the file is divided for rows of ``row_bytes``. Pure.

    Raises:
        ConfigError: the capacity is less than one block.
    """
    geometry = fit_geometry(settings.capacity_bytes, row_bytes)
    if geometry.num_slots < 1:
        least_bytes = SlabGeometry(row_bytes, 1).file_bytes
        remedy = f"a file with one block takes {least_bytes} bytes with its headers; give many times that"
        raise ConfigError("capacity_bytes", settings.capacity_bytes, remedy)
    return geometry


def explain_shrinking(settings: SlabSettings, found: SlabGeometry) -> str | None:
    """Return why a slab must not be divided anew for these settings, None where it may. Pure.

    A file of another length is emptied, and a smaller capacity may be a mistake.
    """
    if settings.allow_shrink or settings.capacity_bytes >= found.file_bytes:
        return None
    return (
        f"is less than the {found.file_bytes} bytes of the slab that is there, whose blocks would be lost: give as "
        'much, another path, or "allow_shrink": true to empty it'
    )


def plan_max_task_blocks(row_bytes: int) -> int:
    """Return how many blocks a thread moves at a stretch. Pure."""
    return min(MAX_TASK_BLOCKS, max(1, MAX_TASK_BYTES // row_bytes))
