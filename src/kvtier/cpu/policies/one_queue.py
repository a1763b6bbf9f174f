"""Base class of policies whose whole state is one queue of blocks; they add what a use moves and which block to evict.

One ordered dictionary is both queue and index. Its C implementation keeps the cost of a million blocks well under a
microsecond a block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, EvictionPreview, MoveToFront, check_same_blocks
from kvtier.cpu.policies.ended_sessions import EndedSessions
from kvtier.cpu.policies.learning import ArrivedRequest, RequestLearner


class OneQueuePolicy(CachePolicy, EvictionPreview, MoveToFront, RequestLearner):
    """A policy with one queue; a subclass supplies ``touch`` and ``evict``. Blocks of ended sessions leave first.

    Attributes:
        blocks: every held block, the next victim first. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self._ended = EndedSessions(self.blocks, cache_capacity)
        # A class of one's own that learns from requests sees them all.
        self.learns_without_hints = type(self).note_request is not OneQueuePolicy.note_request

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

    def note_request(self, request: ArrivedRequest) -> None:
        # From the first hint on, requests without any take blocks from their owners too.
        self.learns_without_hints = True
        self._ended.note(request)

    def on_finished(self, req_id: str) -> None:
        for key in self._ended.finish(req_id):
            self.move_to_back(key)

    def move_to_back(self, key: OffloadKey) -> None:
        """Make a held block the next victim."""
        self.blocks.move_to_end(key, last=False)

    def next_victims(self, n: int) -> list[OffloadKey]:
        return list(islice((key for key, block in self.blocks.items() if block.ref_cnt == 0), n))

    def clear(self) -> None:
        self.blocks.clear()
        self._ended.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks(self.blocks, held)
