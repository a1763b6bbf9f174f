"""S3-FIFO: a small queue on probation, a main queue, and ghosts, all three in the order of insertion.

A new block enters ``small``. A use adds to its count and moves nothing. At the end of ``small`` a block with at least
PROMOTING_USES is promoted to ``main``; any other is evicted and its key becomes a ghost. At the end of ``main`` a block
with uses left is reinserted for the price of one use; any other is evicted without a ghost. A block whose key is a
ghost enters ``main`` at once. Victims come from ``small`` while it has its share of the capacity, otherwise from
``main``.

What differs from the paper comes from blocks that cannot be evicted. One that is pinned, in flight or protected when
its turn comes is reinserted at the new end of its queue, in ``main`` for the price of a use. When a queue has only such
blocks, victims come from the other. A use causes at most one reinsertion later, so an eviction is constant work a
block, plus one visit for each busy block on its way, which is not met again until its queue has turned.

A touch that names a block in flight counts no use (``touched``) and makes the block in flight the newest of its queue.

Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP '23.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, EvictionPreview, MoveToFront, check_same_blocks
from kvtier.cpu.policies.ghosts import GhostList
from kvtier.cpu.policies.touched import find_touched
from kvtier.errors import InvariantError

SMALL_SHARE = 10
"""``small`` has one part in this many of the capacity, the paper's tenth. A larger ``small`` gives blocks that are used
once the room of those used often; a smaller one evicts blocks that would have been reused a little later."""

MAX_USES = 3
"""Maximum of the use count, two bits in the paper. A block that was popular once stays for as many rounds."""

PROMOTING_USES = 2
"""Uses in ``small`` from which a block is promoted. With 1 every block that is reused once stays for a whole round of
``main``; with 3 hardly any gets there except as a ghost."""

MAX_PASSED_BLOCKS = 64
"""Busy blocks of ``small`` that one eviction passes before it prefers ``main``. A large store in flight can fill
``small``: without a limit each eviction would walk through it; with 0 one busy block sends evictions to ``main``."""


class Outcome(Enum):
    """What an eviction does with a block that it visits."""

    EVICTED = auto()
    PROMOTED = auto()
    REINSERTED = auto()


class S3FIFOCachePolicy(CachePolicy, EvictionPreview, MoveToFront):
    """S3-FIFO; a held block costs an entry of a dictionary, of an ordered one and, once used, one of the counts.

    Attributes:
        blocks: every held block, in no order. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
        small: blocks on probation, next victim first.
        main: the others, next victim first.
        uses: use count of held keys that have one, 1 to MAX_USES; a reinsertion in ``main`` takes one.
        ghosts: keys evicted from ``small``, as many as ``main`` has room for.
        small_capacity: blocks of ``small`` from which on victims come from it.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self.small: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.main: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self.uses: dict[OffloadKey, int] = {}
        self.ghosts: GhostList[bool] = GhostList()
        self.small_capacity = max(1, cache_capacity // SMALL_SHARE)

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.blocks.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        return self.blocks.get

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.blocks[key] = block
        if key in self.ghosts:
            del self.ghosts[key]
            self.main[key] = block
        else:
            self.small[key] = block

    def remove(self, key: OffloadKey) -> None:
        if self.blocks.pop(key, None) is not None:
            self._queue_of(key).pop(key)
            self.uses.pop(key, None)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        touched = find_touched(self.blocks.get, keys)
        if touched.is_use:
            uses = self.uses
            uses.update({key: min(uses.get(key, 0) + 1, MAX_USES) for key in touched.held})
        for key in touched.in_flight:
            self._queue_of(key).move_to_end(key)

    def move_to_front(self, key: OffloadKey) -> None:
        if key in self.blocks:
            self._queue_of(key).move_to_end(key)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        steps, num_found = _EvictionPlan(self, protected).plan_steps(n)
        if num_found < n:
            return None
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        for key, outcome in steps:
            queue = self._queue_of(key)
            if outcome is Outcome.REINSERTED:
                self._reinsert(key, queue)
            elif outcome is Outcome.PROMOTED:
                self.main[key] = queue.pop(key)
                del self.uses[key]
            else:
                if queue is self.small:
                    self.ghosts[key] = False
                victims.append((key, queue.pop(key)))
                del self.blocks[key]
                self.uses.pop(key, None)
        while len(self.ghosts) > self.cache_capacity - self.small_capacity:
            self.ghosts.pop_oldest()
        return victims

    def next_victims(self, n: int) -> list[OffloadKey]:
        steps, _ = _EvictionPlan(self, ()).plan_steps(n)
        return [key for key, outcome in steps if outcome is Outcome.EVICTED]

    def clear(self) -> None:
        for part in (self.blocks, self.small, self.main, self.uses, self.ghosts):
            part.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks(self.blocks, held)
        check_same_blocks({**self.small, **self.main}, held)
        if len(self.small) + len(self.main) != len(held):
            raise InvariantError("a key is in both queues")
        if not self.uses.keys() <= held.keys() or not set(self.uses.values()) <= {*range(1, MAX_USES + 1)}:
            raise InvariantError("a key that is not held has a use count, or a count exceeds the maximum")
        if not held.keys().isdisjoint(self.ghosts):
            raise InvariantError("a key is both held and a ghost")
        if len(self.ghosts) > self.cache_capacity:
            raise InvariantError(f"{len(self.ghosts)} ghosts for a capacity of {self.cache_capacity}")

    def _queue_of(self, key: OffloadKey) -> OrderedDict[OffloadKey, BlockStatus]:
        return self.small if key in self.small else self.main

    def _reinsert(self, key: OffloadKey, queue: OrderedDict[OffloadKey, BlockStatus]) -> None:
        queue.move_to_end(key)
        if queue is self.small:
            return
        num_left = self.uses.pop(key, 0) - 1
        if num_left > 0:
            self.uses[key] = num_left


class _EvictionPlan:
    """Plans one eviction block by block, without changing the policy.

    Args:
        policy: the policy.
        protected: keys that must stay.
    """

    def __init__(self, policy: S3FIFOCachePolicy, protected: Collection[OffloadKey]) -> None:
        self._uses = policy.uses
        self._protected = protected
        self._small = iter(policy.small.items())
        self._main = iter(policy.main.items())
        # Idle blocks that the plan has put at the new end of main, with the uses that they have left.
        self._main_again: deque[tuple[OffloadKey, int]] = deque()
        self._num_small_in_excess = len(policy.small) - policy.small_capacity + 1
        self._num_passes_left = MAX_PASSED_BLOCKS

    def plan_steps(self, n: int) -> tuple[list[tuple[OffloadKey, Outcome]], int]:
        """Return the steps until ``n`` blocks are evicted, block by block, and how many are evicted."""
        steps: list[tuple[OffloadKey, Outcome]] = []
        num_missing = n
        while num_missing > 0:
            is_small_next = self._num_small_in_excess > 0 and self._num_passes_left > 0
            if is_small_next:
                step = self._next_of_small() or self._next_of_main()
            else:
                step = self._next_of_main() or self._next_of_small()
            if step is None:
                break
            steps.append(step)
            num_missing -= step[1] is Outcome.EVICTED
        return steps, n - num_missing

    def _next_of_small(self) -> tuple[OffloadKey, Outcome] | None:
        found = next(self._small, None)
        if found is None:
            return None
        key, block = found
        if block.ref_cnt != 0 or key in self._protected:
            self._num_passes_left -= 1
            return key, Outcome.REINSERTED
        self._num_small_in_excess -= 1
        if self._uses.get(key, 0) < PROMOTING_USES:
            return key, Outcome.EVICTED
        self._main_again.append((key, 0))
        return key, Outcome.PROMOTED

    def _next_of_main(self) -> tuple[OffloadKey, Outcome] | None:
        found = next(self._main, None)
        if found is not None:
            key, block = found
            if block.ref_cnt != 0 or key in self._protected:
                return key, Outcome.REINSERTED
            num_uses = self._uses.get(key, 0)
        elif self._main_again:
            key, num_uses = self._main_again.popleft()
        else:
            return None
        if num_uses == 0:
            return key, Outcome.EVICTED
        self._main_again.append((key, num_uses - 1))
        return key, Outcome.REINSERTED
