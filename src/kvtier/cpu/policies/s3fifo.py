"""S3-FIFO: a small queue on probation, a main queue, and ghosts, all three in the order of insertion.

A new block enters ``small``. A use counts and moves nothing. At the end of ``small`` a block that was used more than
once since goes to ``main``, any other leaves and its key becomes a ghost. At the end of ``main`` a block with uses left
goes round again and pays one, any other leaves without a ghost. A block whose key is a ghost enters ``main`` at once.
``small`` gives while it has its share of the capacity, otherwise ``main`` does.

What differs from the paper comes from blocks that cannot leave. One that is pinned, in flight or protected when its
turn comes goes to the new end of its queue, in ``main`` for the price of a use, as it would anyway. A queue that has
nothing else gives way to the other. A use costs at most one pass later on, so an eviction is constant work a block,
and one visit for each busy block on its way, which is not met again until its queue has turned.

A touch that names a block in flight counts no use (``touched``); a block in flight becomes the newest of its queue.

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
"""``small`` is one part in so many of the capacity, the paper's tenth. A larger ``small`` lets blocks that are used
once take room from those used often; a smaller one throws out what would have been used again a little later."""

MAX_USES = 3
"""Uses that are counted, two bits in the paper. More keep a block that was popular once for as many rounds."""

PROMOTING_USES = 2
"""Uses in ``small`` that earn a place in ``main``. With 1 every block that comes back once is kept for a whole round of
``main``, with 3 next to none gets there but as a ghost."""

PATIENCE_BLOCKS = 64
"""Busy blocks of ``small`` that one eviction passes before it prefers ``main``. A large store in flight can be all
of ``small``: without an end to patience each eviction would walk through it; with 0 one busy block sends evictions
to ``main``."""


class Fate(Enum):
    """What an eviction does with a block that it meets."""

    LEAVES = auto()
    PROMOTED = auto()
    GOES_ROUND = auto()


class S3FIFOCachePolicy(CachePolicy, EvictionPreview, MoveToFront):
    """S3-FIFO; a held block costs an entry of a dictionary, of an ordered one and, once used, one of the counts.

    Attributes:
        blocks: every held block, in no order. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
        small: blocks on probation, next to leave first.
        main: the others, next to leave first.
        uses: of held keys, those since the block came to its queue that are not paid yet, 1 to MAX_USES.
        ghosts: keys that left ``small``, as many as ``main`` has room for.
        small_capacity: blocks from which on ``small`` gives.
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
        steps, num_found = _Walk(self, protected).plan_steps(n)
        if num_found < n:
            return None
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        for key, fate in steps:
            queue = self._queue_of(key)
            if fate is Fate.GOES_ROUND:
                self._send_round(key, queue)
            elif fate is Fate.PROMOTED:
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
        steps, _ = _Walk(self, ()).plan_steps(n)
        return [key for key, fate in steps if fate is Fate.LEAVES]

    def clear(self) -> None:
        for part in (self.blocks, self.small, self.main, self.uses, self.ghosts):
            part.clear()

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks(self.blocks, held)
        check_same_blocks({**self.small, **self.main}, held)
        if len(self.small) + len(self.main) != len(held):
            raise InvariantError("a key is in both queues")
        if not self.uses.keys() <= held.keys() or not set(self.uses.values()) <= {*range(1, MAX_USES + 1)}:
            raise InvariantError("uses are counted of a key that is not held, or beyond the maximum")
        if not held.keys().isdisjoint(self.ghosts):
            raise InvariantError("a key is held and a ghost")
        if len(self.ghosts) > self.cache_capacity:
            raise InvariantError(f"{len(self.ghosts)} ghosts for a capacity of {self.cache_capacity}")

    def _queue_of(self, key: OffloadKey) -> OrderedDict[OffloadKey, BlockStatus]:
        return self.small if key in self.small else self.main

    def _send_round(self, key: OffloadKey, queue: OrderedDict[OffloadKey, BlockStatus]) -> None:
        queue.move_to_end(key)
        if queue is self.small:
            return
        num_left = self.uses.pop(key, 0) - 1
        if num_left > 0:
            self.uses[key] = num_left


class _Walk:
    """What one eviction would do, planned block by block; it changes neither the policy nor its queues.

    Args:
        policy: whose queues.
        protected: keys that must stay.
    """

    def __init__(self, policy: S3FIFOCachePolicy, protected: Collection[OffloadKey]) -> None:
        self._uses = policy.uses
        self._protected = protected
        self._small = iter(policy.small.items())
        self._main = iter(policy.main.items())
        # Idle blocks that have come to the new end of main during the walk, with the uses they have left.
        self._main_again: deque[tuple[OffloadKey, int]] = deque()
        self._num_small_in_excess = len(policy.small) - policy.small_capacity + 1
        self._patience = PATIENCE_BLOCKS

    def plan_steps(self, n: int) -> tuple[list[tuple[OffloadKey, Fate]], int]:
        """Return what happens until ``n`` blocks have left, block by block, and how many leave."""
        steps: list[tuple[OffloadKey, Fate]] = []
        num_missing = n
        while num_missing > 0:
            is_small_next = self._num_small_in_excess > 0 and self._patience > 0
            if is_small_next:
                step = self._next_of_small() or self._next_of_main()
            else:
                step = self._next_of_main() or self._next_of_small()
            if step is None:
                break
            steps.append(step)
            num_missing -= step[1] is Fate.LEAVES
        return steps, n - num_missing

    def _next_of_small(self) -> tuple[OffloadKey, Fate] | None:
        found = next(self._small, None)
        if found is None:
            return None
        key, block = found
        if block.ref_cnt != 0 or key in self._protected:
            self._patience -= 1
            return key, Fate.GOES_ROUND
        self._num_small_in_excess -= 1
        if self._uses.get(key, 0) < PROMOTING_USES:
            return key, Fate.LEAVES
        self._main_again.append((key, 0))
        return key, Fate.PROMOTED

    def _next_of_main(self) -> tuple[OffloadKey, Fate] | None:
        found = next(self._main, None)
        if found is not None:
            key, block = found
            if block.ref_cnt != 0 or key in self._protected:
                return key, Fate.GOES_ROUND
            num_uses = self._uses.get(key, 0)
        elif self._main_again:
            key, num_uses = self._main_again.popleft()
        else:
            return None
        if num_uses == 0:
            return key, Fate.LEAVES
        self._main_again.append((key, num_uses - 1))
        return key, Fate.GOES_ROUND
