"""What tiers on a local disk share: settings, and checksums ahead of writes.

A checksum reads its block into the core's cache, and a device that fetches the block from there is slowed down. With
other blocks checksummed in between, the block has left the cache when it is written.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeVar

import numpy as np

from kvtier.errors import ConfigError
from kvtier.settings import Setting, choice, setting, whole

ALIGNMENT_BYTES = 4096
"""What memory, offsets and lengths of direct I/O are multiples of: the largest logical block in use."""

CHECKSUM_AHEAD_BYTES = 2**20
"""Bytes that are read between the checksum of a block and its write, as nearly as whole blocks allow: about half of a
core's cache, and threads share cores. Fewer leave blocks in it; more let the device wait when a thread begins."""

DEFAULT_NUM_THREADS = 4
"""Threads that move blocks. Fewer leave a fast disk idle between system calls; more wait for the same device,
for the same cores and, with small blocks, for the interpreter."""

DIRECT_NUM_THREADS = 8
LARGE_ROW_BYTES = 512 * 2**10
"""The same for direct I/O on rows of at least this size: such threads wait for the device and little else, so more
of them keep it busy. With smaller rows they would wait for the interpreter."""

MAX_THREADS = 128

B = TypeVar("B")
H = TypeVar("H")


def parse_direct_io(name: str, value: object) -> bool | None:
    """Return whether direct I/O is insisted on or avoided, None for ``"auto"``: taken where it works. Pure.

    Raises:
        ConfigError: neither a flag nor ``"auto"``.
    """
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ConfigError(name, value, 'must be true, false or "auto"')
    return value


class Durability(Enum):
    """What of a stored block outlives a loss of power."""

    NONE = "none"
    FDATASYNC = "fdatasync"


DURABILITY: Mapping[str, Setting] = setting(
    choice(Durability),
    '`"fdatasync"` reports a store only when it would survive a loss of power; with `"none"` the kernel decides '
    "when to write, and torn or missing blocks are misses afterwards",
    default_text='`"none"`',
)
"""The setting ``durability`` of a tier on a disk."""


DIRECT_IO: Mapping[str, Setting] = setting(
    parse_direct_io,
    "direct I/O if file system and rows allow it; `true` requires it, `false` uses the page cache",
    default_text='`"auto"`',
)
"""The setting ``direct_io`` of a tier on a disk."""


NUM_THREADS: Mapping[str, Setting] = setting(
    whole(1, MAX_THREADS),
    "fewer leave a fast disk idle; more compete for the same device, cores and interpreter",
    unit=f"1 to {MAX_THREADS}",
    default_text="eight for direct I/O on rows of at least 512 KiB, else four",
)
"""The setting ``num_threads`` of a tier on a disk."""


def plan_num_threads(num_threads: int | None, row_bytes: int, *, has_direct_io: bool) -> int:
    """Return how many threads move rows of ``row_bytes`` bytes, given the setting ``num_threads``. Pure."""
    if num_threads is not None:
        return num_threads
    return DIRECT_NUM_THREADS if has_direct_io and row_bytes >= LARGE_ROW_BYTES else DEFAULT_NUM_THREADS


def sync_folder(path: str) -> None:
    """Have the names in a folder outlive a loss of power.

    Raises:
        OSError: the system refused.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_aligned(rows: memoryview) -> bool:
    """Return whether direct I/O accepts each of ``rows``, shape (num_rows, row_bytes). Pure."""
    address = int(np.asarray(rows).ctypes.data)
    return address % ALIGNMENT_BYTES == 0 and rows.shape is not None and rows.shape[1] % ALIGNMENT_BYTES == 0


def rest_of(buffers: Sequence[memoryview], offset: int) -> list[memoryview]:
    """Return what of ``buffers`` lies behind the first ``offset`` bytes. Pure."""
    rest = []
    for buffer in buffers:
        if offset < len(buffer):
            rest.append(buffer[offset:])
        offset = max(0, offset - len(buffer))
    return rest


def plan_num_checksums_ahead(block_bytes: int, *, has_direct_io: bool) -> int:
    """Return how many blocks get their checksum ahead, 0 where a write is a copy by the core that read them. Pure.

    Args:
        block_bytes: what is written at a stretch; one of more than 2 MiB pushes its own beginning out.
        has_direct_io: whether writes bypass the page cache.
    """
    return (CHECKSUM_AHEAD_BYTES + block_bytes // 2) // block_bytes if has_direct_io else 0


def checksum_ahead(blocks: Iterable[B], add_headers: Callable[[B], H], num_ahead: int) -> Iterator[H]:
    """Yield every block with its headers, in order, each when ``num_ahead`` later ones have theirs as well.

    Args:
        blocks: what is to be written, each with one call.
        add_headers: computes the checksums; at most ``num_ahead`` + 1 of its results are in use at a time.
        num_ahead: fewer are ahead where fewer follow.
    """
    ready: deque[H] = deque()
    for block in blocks:
        ready.append(add_headers(block))
        if len(ready) > num_ahead:
            yield ready.popleft()
    yield from ready
