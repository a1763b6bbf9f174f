"""Removes the files of blocks whose time to live is over, of all engines: a directory has one retention.

A file's time of modification is that of its store. Tiers with a lifetime note uses in the time of access alone, so that
no use makes a block younger, and evict by the later of the two. Without a lifetime nothing of this is called.
"""

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvtier.tiering.fs.folders import BlockFile, namespace_of
from kvtier.tiering.kit.block_format import BlockName
from kvtier.tiering.kit.lifetime import Lifetime

MIN_SWEEP_S = 1.0
MAX_SWEEP_S = 600.0
"""Bounds of the pause between two sweeps, a sixteenth of the time to live within them. Shorter walks the directory all
the time; longer leaves the bytes of blocks that are over on the disk for longer. Loads need no sweep."""

SWEEPS_PER_LIFETIME = 16


class Swept(NamedTuple):
    """What a sweep has removed.

    Attributes:
        num_blocks: files.
        num_bytes: their length.
        own_names: of the present namespace's blocks.
    """

    num_blocks: int
    num_bytes: int
    own_names: list[BlockName]


class BlockExpiry:
    """What is over, and when to look. The times of sweeps belong to the evictor's thread; the rest is immutable.

    Args:
        lifetime: how long blocks live.
        wall_clock: seconds since 1970, comparable with the file system's times.
        clock: seconds, monotonic.
    """

    def __init__(
        self, lifetime: Lifetime, wall_clock: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._lifetime = lifetime
        self._wall_clock = wall_clock
        self._clock = clock
        self._pause_s = min(MAX_SWEEP_S, max(MIN_SWEEP_S, lifetime.ttl_s / SWEEPS_PER_LIFETIME))
        self._next_s = clock()

    def is_over(self, modified_s: float) -> bool:
        """Return whether a file modified at ``modified_s``, seconds since 1970, is over. Thread: any."""
        return self._lifetime.is_over(modified_s, self._wall_clock())

    def is_path_over(self, path: str) -> bool:
        """Return whether there is such a file and it is over. Thread: any; blocks."""
        try:
            return self.is_over(os.lstat(path).st_mtime)
        except OSError:
            return False

    def used_ns(self, block: BlockFile) -> int:
        """Return when a block was last used, nanoseconds since 1970. Pure."""
        return max(block.mtime_ns, block.atime_ns)

    def is_due(self) -> bool:
        """Return whether it is time for a sweep, and count the next pause from now."""
        if self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + self._pause_s
        return True

    def sweep(
        self, blocks: Iterable[BlockFile], remove: Callable[[BlockFile], int], own_namespace: str
    ) -> Swept:
        """Remove what is over.

        Args:
            blocks: every file of a block.
            remove: removes one and returns its length; 0 when it was gone.
            own_namespace: name of the tier's namespace.

        Thread: the evictor's; blocks.
        """
        num_blocks, num_bytes = 0, 0
        own_names: list[BlockName] = []
        for block in blocks:
            if not self.is_over(block.mtime_ns / 10**9):
                continue
            try:
                removed_bytes = remove(block)
            except OSError:
                continue  # another user's: that user's tier removes it
            num_blocks += removed_bytes > 0
            num_bytes += removed_bytes
            if namespace_of(block.path) == own_namespace:
                own_names.append(block.name)
        return Swept(num_blocks, num_bytes, own_names)
