"""SIEVE: a queue in the order of insertion, and a hand that spares each marked block once.

A use marks a block and moves nothing. The hand goes from the oldest block to the newest and then starts again: a marked
block loses its mark and keeps its place, an unmarked one is evicted. So new blocks are tried quickly while the hand is
near the new end, and blocks in use stay where they are. There are no ghosts.

The queue is two ordered dictionaries, oldest first: ``passed``, the blocks behind the hand in this round, and the newer
blocks ``ahead`` of it. Passing moves a block from the front of ``ahead`` to the end of ``passed``; when the newest has
been passed the two change roles. So no position in the middle of a queue is ever needed. A block that is pinned or
protected is passed like a marked one. An eviction visits its victims and the blocks that it passes: passing a
marked block consumes its use, and a busy one is not met again until the hand has gone round.

A touch that names a block in flight marks nothing (``touched``) and makes the block in flight the newest.

Source: Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key
Eviction Algorithm for Web Caches", NSDI '24.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, EvictionPreview, MoveToFront, check_same_blocks
from kvtier.cpu.policies.touched import find_touched
from kvtier.errors import InvariantError


class SieveCachePolicy(CachePolicy, EvictionPreview, MoveToFront):
    """SIEVE; a held block costs an entry of a dictionary, of an ordered one and, when marked, of a set.

    Attributes:
        blocks: every held block, in no order. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
        ahead: blocks that the hand has still to visit, next first. INVARIANT: not empty while a block is held.
        passed: blocks that it has passed in this round, oldest first; all are older than those ahead.
        marked: held keys that were used since the hand passed them.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self.ahead: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.passed: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.marked: set[OffloadKey] = set()

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.blocks.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        return self.blocks.get

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.blocks[key] = self.ahead[key] = block

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        pairs = list(zip(keys, blocks, strict=True))
        self.blocks.update(pairs)
        self.ahead.update(pairs)

    def remove(self, key: OffloadKey) -> None:
        if self.blocks.pop(key, None) is not None:
            (self.ahead if key in self.ahead else self.passed).pop(key)
            self.marked.discard(key)
            self._start_round()

    def touch(self, keys: Collection[OffloadKey]) -> None:
        touched = find_touched(self.blocks.get, keys)
        if touched.is_use:
            self.marked.update(touched.held)
        for key in touched.in_flight:
            self.move_to_front(key)

    def move_to_front(self, key: OffloadKey) -> None:
        if key in self.blocks:
            (self.ahead if key in self.ahead else self.passed).pop(key)
            self.ahead[key] = self.blocks[key]

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        steps, num_found = self._plan_steps(n, protected)
        if num_found < n:
            return None
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        for key, is_evicted in steps:
            block = self.ahead.pop(key)
            if is_evicted:
                del self.blocks[key]
                victims.append((key, block))
            else:
                self.passed[key] = block
            if not self.ahead:
                self._start_round()
        self.marked.difference_update([key for key, _ in steps])
        return victims

    def next_victims(self, n: int) -> list[OffloadKey]:
        steps, _ = self._plan_steps(n, ())
        return [key for key, is_evicted in steps if is_evicted]

    def clear(self) -> None:
        for part in (self.blocks, self.ahead, self.passed, self.marked):
            part.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks(self.blocks, held)
        check_same_blocks({**self.passed, **self.ahead}, held)
        if len(self.passed) + len(self.ahead) != len(held):
            raise InvariantError("a key is both ahead of the hand and passed")
        if held and not self.ahead:
            raise InvariantError("blocks are held, and none is ahead of the hand")
        if not self.marked <= held.keys():
            raise InvariantError("a key is marked and not held")

    def _plan_steps(
        self, n: int, protected: Collection[OffloadKey]
    ) -> tuple[list[tuple[OffloadKey, bool]], int]:
        """Return the hand's steps until ``n`` blocks are evicted, key by key, and how many are evicted. Pure."""
        steps: list[tuple[OffloadKey, bool]] = []
        num_missing = n
        for step in self._walk(protected) if n > 0 else ():
            steps.append(step)
            num_missing -= step[1]
            if num_missing == 0:
                break
        return steps, n - num_missing

    def _walk(self, protected: Collection[OffloadKey]) -> Iterator[tuple[OffloadKey, bool]]:
        """Yield each block as the hand visits it and whether it is evicted; a second round spares only busy ones."""
        spared: list[tuple[OffloadKey, bool]] = []
        for key, block in chain(self.ahead.items(), self.passed.items()):
            is_busy = block.ref_cnt != 0 or key in protected
            if is_busy or key in self.marked:
                spared.append((key, not is_busy))
                yield key, False
            else:
                yield key, True
        yield from spared

    def _start_round(self) -> None:
        """Start a new round when no block is ahead; blocks stored later come after all that were passed."""
        if not self.ahead:
            self.ahead, self.passed = self.passed, self.ahead
