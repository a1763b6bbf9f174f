"""First in, first out: the block that was stored longest ago leaves first, used or not.

It learns nothing and remembers nothing; it is the floor that other policies are measured against, and the cheapest.
A use changes nothing. While its write is in flight a block still takes its place: a touch then makes it the newest,
so that of one request's blocks the tail of the prefix stands before its head. A block that is pinned or protected
when its turn comes is in use: it goes to the end, as if stored again, and the next evictions do not meet it. So an
eviction visits its victims and the busy blocks before them, and meets a busy block once each time the queue turns.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, EvictionPreview, check_same_blocks
from kvtier.cpu.policies.touched import find_touched


class FIFOCachePolicy(CachePolicy, EvictionPreview):
    """FIFO; as large as LRU, one entry of an ordered dictionary a block.

    Attributes:
        blocks: every held block, first stored first. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()

    def get(self, key: OffloadKey) -> BlockStatus | None:
        """Return the held block under ``key``, or None."""
        return self.blocks.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        """Return the dictionary's own ``get``."""
        return self.blocks.get

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        """Hold ``block`` as the newest."""
        self.blocks[key] = block

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        """Hold ``blocks``, the last of them as the newest."""
        self.blocks.update(zip(keys, blocks, strict=True))

    def remove(self, key: OffloadKey) -> None:
        """Stop holding ``key``; unknown keys are ignored."""
        self.blocks.pop(key, None)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Make those of ``keys`` that are in flight the newest, the first of them most; ready ones stay."""
        for key in find_touched(self.blocks.get, keys).in_flight:
            self.blocks.move_to_end(key)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        """Evict the ``n`` idle blocks stored first that are not protected, or none at all."""
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        busy: list[OffloadKey] = []
        num_missing = n
        for key, block in self.blocks.items():
            if num_missing <= 0:
                break
            if block.ref_cnt == 0 and key not in protected:
                victims.append((key, block))
                num_missing -= 1
            else:
                busy.append(key)
        if num_missing > 0:
            return None
        for key, _ in victims:
            del self.blocks[key]
        for key in busy:
            self.blocks.move_to_end(key)
        return victims

    def next_victims(self, n: int) -> list[OffloadKey]:
        """Return the ``n`` idle blocks stored first."""
        return list(islice((key for key, block in self.blocks.items() if block.ref_cnt == 0), n))

    def clear(self) -> None:
        """Forget every block."""
        self.blocks.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        """Compare the policy with the manager's books."""
        check_same_blocks(self.blocks, held)
