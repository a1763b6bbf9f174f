"""FIFO: evicts the block that was stored longest ago, used or not; the cheapest policy, and a floor to compare with.

A use changes nothing. A touch of a block in flight makes it the newest, so that the tail of a request's prefix is
evicted before its head. A block that is pinned or protected when its turn comes goes to the end, as if stored again. So
an eviction visits its victims and the busy blocks before them, and meets a busy block once for each turn of the queue.
"""

from collections.abc import Collection

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.lru import OneQueuePolicy
from kvtier.cpu.policies.touched import find_touched


class FIFOCachePolicy(OneQueuePolicy):
    """FIFO; each block costs one entry of an ordered dictionary, as with LRU."""

    def touch(self, keys: Collection[OffloadKey]) -> None:
        for key in find_touched(self.blocks.get, keys).in_flight:
            self.blocks.move_to_end(key)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
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
        if self._ended.watch is not None:
            self._ended.watch.on_evicted([key for key, _ in victims])
        return victims
