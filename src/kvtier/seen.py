"""Which blocks requests have had before: so many of the last that "never" can be told from "no longer known".

Four bytes a block, in Bloom filters that are made as traffic comes. Each takes a generation of blocks; when there are
as many as are kept, the oldest goes. One new block in 300 is taken for one that was seen.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.keys import OffloadKey

GENERATION_BLOCKS = 2**18
"""Distinct blocks of one filter. Fewer make more filters to look through; more forget more at once."""

MAX_GENERATIONS = 16
"""Filters that are kept: four million blocks, 16 MB. More take memory for what hardly comes back; fewer let a busy
engine say of the prompts of this morning that it does not know them."""

BITS_OF_BLOCK = 32
PROBES = (0, 13, 27, 41)
"""Where in a hash of 64 bits the numbers of a block's four bits begin. With 32 bits a block a full filter takes two of
10,000 unknown blocks for known."""

MAX_WAITING_KEYS = 2048
"""Keys that wait to be put in. A call of numpy takes some microseconds however few it gets."""

HASH_MASK = 2**64 - 1
MIXER = 0x9E3779B97F4A7C15
"""Fibonacci hashing: the product's upper bits depend on all bits below, where hashes of small numbers stand."""


class _Generation:
    """The filter of one generation, and when it began."""

    __slots__ = ("began_s", "bits", "num_blocks", "seen")

    def __init__(self, num_bytes: int, began_s: float) -> None:
        self.bits = np.zeros(num_bytes, np.uint8)
        self.seen = self.bits.data  # an element of a memoryview is a number in a third of the time
        self.began_s = began_s
        self.num_blocks = 0


class SeenBlocks:
    """The blocks that the latest requests had. One thread uses it.

    Args:
        clock: seconds, monotonic.
        generation_blocks: distinct blocks of one filter, a power of two up to 2**18.
        max_generations: filters that are kept.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        generation_blocks: int = GENERATION_BLOCKS,
        max_generations: int = MAX_GENERATIONS,
    ) -> None:
        self._clock = clock
        self._generation_blocks = generation_blocks
        self._num_bits = generation_blocks * BITS_OF_BLOCK
        self._generations: deque[_Generation] = deque(maxlen=max_generations)
        self._waiting: list[Sequence[OffloadKey]] = []
        self._num_waiting = 0
        self._has_forgotten = False

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Remember ``keys``; the caller does not change the sequence afterwards."""
        self._waiting.append(keys)
        self._num_waiting += len(keys)
        if self._num_waiting >= MAX_WAITING_KEYS:
            self._put_waiting()

    def has(self, key: OffloadKey) -> bool:
        """Return whether ``key`` is remembered."""
        self._put_waiting()
        mixed = hash(key) * MIXER & HASH_MASK
        places = [mixed >> begin & self._num_bits - 1 for begin in PROBES]
        return any(
            all(generation.seen[bit >> 3] >> (bit & 7) & 1 for bit in places)
            for generation in reversed(self._generations)
        )

    @property
    def known_s(self) -> float | None:
        """For how many of the last seconds every block is remembered; None: since the start."""
        return self._clock() - self._generations[0].began_s if self._has_forgotten else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the filters."""
        return sum(one.bits.nbytes for one in self._generations)

    def _put_waiting(self) -> None:
        """Put what waits into the filters, a part at a time that fits into one."""
        if not self._waiting:
            return
        keys = [key for batch in self._waiting for key in batch]
        self._waiting.clear()
        self._num_waiting = 0
        for begin in range(0, len(keys), MAX_WAITING_KEYS):
            self._put(keys[begin : begin + MAX_WAITING_KEYS])

    def _put(self, keys: Sequence[OffloadKey]) -> None:
        if not self._generations or self._generations[-1].num_blocks >= self._generation_blocks:
            self._has_forgotten |= len(self._generations) == self._generations.maxlen
            self._generations.append(_Generation(self._num_bits // 8, self._clock()))
        latest = self._generations[-1]
        bits = self._bits_of(keys)
        places, masks = bits >> 3, np.left_shift(np.uint8(1), (bits & 7).astype(np.uint8))
        is_new = ((latest.bits[places] & masks) == 0).any(axis=0)
        latest.num_blocks += int(np.count_nonzero(is_new))
        np.bitwise_or.at(latest.bits, places[:, is_new], masks[:, is_new])

    def _bits_of(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.int64]:
        """Return the numbers of the bits of each key, shape (len(PROBES), len(keys)). Pure."""
        mixed = np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64) * np.uint64(MIXER)
        mask = np.uint64(self._num_bits - 1)
        return np.stack([mixed >> np.uint64(begin) & mask for begin in PROBES]).astype(np.int64)
