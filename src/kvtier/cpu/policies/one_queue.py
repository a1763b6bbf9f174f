"""Base class of policies whose whole state is one queue of blocks; they add what a use moves and which block to evict.

One ordered dictionary is both queue and index. Its C implementation keeps the cost of a million blocks well under a
microsecond a block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, EvictionPreview, MoveToFront, check_same_blocks


class OneQueuePolicy(CachePolicy, EvictionPreview, MoveToFront):
    """A policy with one queue; a subclass supplies ``touch`` and ``evict``.

    Attributes:
        blocks: every held block, the next victim first. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.blocks.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        return self.blocks.get

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.blocks[key] = block

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        self.blocks.update(zip(keys, blocks, strict=True))

    def remove(self, key: OffloadKey) -> None:
        self.blocks.pop(key, None)

    def move_to_front(self, key: OffloadKey) -> None:
        if key in self.blocks:
            self.blocks.move_to_end(key)

    def next_victims(self, n: int) -> list[OffloadKey]:
        return list(islice((key for key, block in self.blocks.items() if block.ref_cnt == 0), n))

    def clear(self) -> None:
        self.blocks.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks(self.blocks, held)
