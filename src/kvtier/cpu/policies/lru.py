"""Least recently used: the block whose last use is longest ago leaves first.

It keeps no history of what left. One ordered dictionary is the whole state; its C implementation is the
reason that books of a million blocks cost well under a microsecond a block.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, EvictionPreview, check_same_blocks


class LRUCachePolicy(CachePolicy, EvictionPreview):
    """LRU; a stored block counts as used when its room is reserved.

    Attributes:
        blocks: every held block, oldest first. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()

    def get(self, key: OffloadKey) -> BlockStatus | None:
        """Return the held block under ``key``, or None."""
        return self.blocks.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        """Return the dictionary's own ``get``, which saves a Python call on every lookup."""
        return self.blocks.get

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Hold ``block`` as the most recent."""
        self.blocks[key] = block

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        """Hold ``blocks``, the last of them as the most recent."""
        self.blocks.update(zip(keys, blocks, strict=True))

    def remove(self, key: OffloadKey) -> None:
        """Stop holding ``key``; unknown keys are ignored."""
        self.blocks.pop(key, None)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Make ``keys`` the most recent, the first of them most."""
        oldest_first = tuple(keys)[::-1]
        try:
            _exhaust(map(self.blocks.move_to_end, oldest_first))
        except KeyError:  # asking for each key first would cost half as much again, and mostly for nothing
            _exhaust(map(self.blocks.move_to_end, filter(self.blocks.__contains__, oldest_first)))

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Evict the ``n`` oldest idle blocks that are not protected, or none at all."""
        idle = (item for item in self.blocks.items() if not item[1].ref_cnt)
        if protected:
            idle = (item for item in idle if item[0] not in protected)
        victims = list(islice(idle, n))
        if len(victims) < n:
            return None
        for key, _ in victims:
            del self.blocks[key]
        return victims

    def next_victims(self, n: int) -> list[OffloadKey]:
        """Return the ``n`` oldest idle blocks."""
        return list(islice((key for key, block in self.blocks.items() if block.ref_cnt == 0), n))

    def clear(self) -> None:
        """Forget every block."""
        self.blocks.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        """Compare the policy with the manager's books."""
        check_same_blocks(self.blocks, held)


def _exhaust(calls: Iterable[object]) -> None:
    """Make every call of a ``map``, in a C loop."""
    deque(calls, maxlen=0)
