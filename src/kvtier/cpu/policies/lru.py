"""Least recently used: the block whose last use is longest ago leaves first.

One queue is the whole state, without a history of what left. A busy block keeps its place in it; when many of them
stand before the first idle one they are parked (``parked_blocks``), so that the next evictions do not pass them again.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, IdleListener
from kvtier.cpu.policies.one_queue import OneQueuePolicy
from kvtier.cpu.policies.parked_blocks import Item, ParkedBlocks


class LRUCachePolicy(OneQueuePolicy, IdleListener):
    """LRU; a stored block counts as used when its room is reserved.

    Attributes:
        blocks: every held block, oldest first but for parked ones.
        aside: busy blocks that evictions need not pass; none unless ``expect_idle`` was called.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.aside = ParkedBlocks(self.blocks)

    def expect_idle(self) -> None:
        self.aside.is_notified = True

    def on_idle(self, keys: Iterable[OffloadKey]) -> None:
        self.aside.on_idle(keys)

    def remove(self, key: OffloadKey) -> None:
        super().remove(key)
        self.aside.forget((key,))

    def touch(self, keys: Collection[OffloadKey]) -> None:
        oldest_first = tuple(keys)[::-1]
        try:
            _exhaust(map(self.blocks.move_to_end, oldest_first))
        except KeyError:  # asking for each key first would cost half as much again, and mostly for nothing
            _exhaust(map(self.blocks.move_to_end, filter(self.blocks.__contains__, oldest_first)))
        self.aside.forget(oldest_first)

    def move_to_front(self, key: OffloadKey) -> None:
        self.touch((key,))

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[Item] | None:
        # What is set aside is older than the old end.
        victims = [] if protected or len(self.aside) else self._pop_idle(n)
        others = list(islice(self.aside.walk(protected), n - len(victims))) if len(victims) < n else []
        if len(victims) + len(others) < n:
            for victim in reversed(victims):
                self._put_back(victim)
            self.aside.settle(())
            return None
        for key, _ in others:
            del self.blocks[key]
        victims += others
        self.aside.settle(victims)
        return victims

    def next_victims(self, n: int) -> list[OffloadKey]:
        victims = [key for key, _ in islice(self.aside.walk(()), n)]
        self.aside.settle(())
        return victims

    def clear(self) -> None:
        super().clear()
        self.aside.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        super().check(held)
        self.aside.check()

    def _pop_idle(self, n: int) -> list[Item]:
        """Take up to ``n`` blocks from the old end, none behind the first busy one."""
        # For 64 blocks a fifth to a quarter faster than a walk.
        victims: list[Item] = []
        pop = self.blocks.popitem
        for _ in range(min(n, len(self.blocks))):
            item = pop(False)  # the oldest; by its name it would cost a tenth more
            if item[1].ref_cnt:
                self._put_back(item)
                break
            victims.append(item)
        return victims

    def _put_back(self, item: Item) -> None:
        key, block = item
        self.blocks[key] = block
        self.blocks.move_to_end(key, last=False)


def _exhaust(calls: Iterable[object]) -> None:
    """Make every call of a ``map``, in a C loop."""
    deque(calls, maxlen=0)
