"""Ghosts: keys of evicted blocks, in the order of their eviction.

The order is a queue of keys beside a dictionary. A key that is deleted from the middle leaves a stale entry in the
queue, which is skipped later. An OrderedDict would do the same in one line, but costs up to 200 bytes a key after long
use: its hash table is up to six times its length, and each bucket carries a pointer. This costs at most 150 bytes.
"""

from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

from kvtier.base import OffloadKey

MemoryT = TypeVar("MemoryT", bool, int)

STALE_SHIFT = 4
"""The queue is rebuilt when more than one entry in 2**4 is stale. A smaller shift wastes memory on stale
entries, a larger one rebuilds more often; at 4 a deletion costs at most 16 steps of a rebuild."""

MIN_STALE = 64
"""Stale entries below which a rebuild is not worth its fixed cost."""


class GhostList(MutableMapping[OffloadKey, MemoryT]):
    """An insertion-ordered dictionary of keys, each with the policy's memory of it: a flag or a small number."""

    def __init__(self) -> None:
        self._members: dict[OffloadKey, MemoryT] = {}
        self._queue: deque[OffloadKey] = deque()
        # INVARIANT: stale entries of a key stand before its live one, so the first ones found are stale.
        self._num_stale_of: dict[OffloadKey, int] = {}
        self._num_stale = 0

    def __getitem__(self, key: OffloadKey) -> MemoryT:
        return self._members[key]

    def __setitem__(self, key: OffloadKey, memory: MemoryT) -> None:
        if key not in self._members:
            self._queue.append(key)
        self._members[key] = memory

    def __delitem__(self, key: OffloadKey) -> None:
        del self._members[key]
        self._num_stale_of[key] = self._num_stale_of.get(key, 0) + 1
        self._num_stale += 1
        if self._num_stale > max(MIN_STALE, len(self._members) >> STALE_SHIFT):
            self._queue = deque(self)
            self._num_stale_of.clear()
            self._num_stale = 0

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def pop_oldest(self) -> OffloadKey:
        """Forget and return the key that was evicted first.

        Raises:
            KeyError: the list is empty.
        """
        if not self._members:
            raise KeyError("pop_oldest() of an empty ghost list: check its length first")
        key = self._queue.popleft()
        while key in self._num_stale_of:
            self._num_stale_of[key] -= 1
            if self._num_stale_of[key] == 0:
                del self._num_stale_of[key]
            self._num_stale -= 1
            key = self._queue.popleft()
        del self._members[key]
        return key

    def clear(self) -> None:
        """Forget every key."""
        self._members.clear()
        self._queue.clear()
        self._num_stale_of.clear()
        self._num_stale = 0

    def __repr__(self) -> str:
        return f"GhostList({len(self._members)} keys, {self._num_stale} stale)"
