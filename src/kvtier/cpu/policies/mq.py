"""MQ, the multi-queue algorithm: LRU within classes of use count.

Queue k holds blocks used 2**k to 2**(k+1) - 1 times, each queue in the order of use. The lowest queue that is not empty
gives its oldest block. A block that has not been used for ``lifetime`` uses of any block sinks by one queue, so blocks
that were popular once are evicted in the end. Keys of evicted blocks stay as ghosts with their use count, and a block
that is stored again goes on from it.

What differs from the paper: its clock ticks with each use of a block. Here blocks sink once a call, after the last of
its ticks, so that a call for a thousand blocks looks at the queues once. The use count has a maximum. A block that is
pinned or protected when its turn comes becomes the newest of its queue without a count. So an eviction visits its
victims and the busy blocks before them, and meets a busy block once for each turn of its queue. A block sinks at most
as often as it rose.

A touch that names a block in flight makes each block the newest of its queue and counts no use (``touched``).

Source: Y. Zhou, J. Philbin, K. Li, "The Multi-Queue Replacement Algorithm for Second Level Buffer Caches", USENIX
ATC '01.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, islice

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy, EvictionPreview, MoveToFront, check_same_blocks
from kvtier.cpu.policies.ghosts import GhostList
from kvtier.cpu.policies.touched import find_touched
from kvtier.errors import InvariantError

NUM_QUEUES = 8
"""Classes of use count, the paper's number: the top one means 128 uses and more. With 4 or 12 a chat service finds as
many blocks, within 0.05 points. Each more costs a look at a queue in every call, and keeps blocks that were popular
once for a lifetime longer."""

MAX_USES = 2 ** (NUM_QUEUES - 1)
"""Maximum of the use count: more uses would not reach a higher queue."""

LIFETIMES = 1
"""``lifetime`` in capacities: about the time in which LRU would evict an unused block. A longer one keeps blocks that
were popular once, which helps a cache far too small and costs one that is nearly large enough (2: +1.1 points of hits
at 1 % of the blocks of a chat service, -0.6 at 5 %, -0.5 at 20 %). A shorter one approaches LRU; with 0 a block sinks
in each call."""

GHOSTS = 4
"""Ghosts in capacities, the paper's number. With fewer, a cache far too small forgets blocks before they are reused: at
1 % of the blocks of a chat service it finds 5.7 of 100 with one capacity of ghosts, 6.2 with four; at 5 % 21.8 and
22.2; at 20 % the same. Each costs at most 150 bytes."""


class MQCachePolicy(CachePolicy, EvictionPreview, MoveToFront):
    """MQ; a held block costs an entry of two dictionaries and of an ordered one, and there are GHOSTS ghosts a block.

    Attributes:
        blocks: every held block, in no order. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
        queues: for each class of use the time at which each block sinks, oldest first. INVARIANT: ascending within a
            queue.
        uses: how often each held block was used, its store included.
        ghosts: keys of evicted blocks with their uses, oldest first.
        lifetime: uses of any block after which an unused block sinks.
        num_uses: uses of any block so far: the clock.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.blocks: dict[OffloadKey, BlockStatus] = {}
        self.queues: list[OrderedDict[OffloadKey, int]] = [OrderedDict() for _ in range(NUM_QUEUES)]
        self.uses: dict[OffloadKey, int] = {}
        self.ghosts: GhostList[int] = GhostList()
        self.lifetime = LIFETIMES * cache_capacity
        self.num_uses = 0

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self.blocks.get(key)

    def getter(self) -> Callable[[OffloadKey], BlockStatus | None]:
        return self.blocks.get

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.insert_many((key,), (block,))

    def insert_many(self, keys: Iterable[OffloadKey], blocks: Iterable[BlockStatus]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self.blocks[key] = block
            self.num_uses += 1
            self._place(key, self.ghosts.pop(key) + 1 if key in self.ghosts else 1)
        self._sink()

    def remove(self, key: OffloadKey) -> None:
        if self.blocks.pop(key, None) is not None:
            del self._queue_of(key)[key], self.uses[key]

    def touch(self, keys: Collection[OffloadKey]) -> None:
        touched = find_touched(self.blocks.get, keys)
        if not touched.is_use:
            self._move_to_end(touched.held)
            return
        uses = self.uses
        for key in touched.held:
            del self._queue_of(key)[key]
            self.num_uses += 1
            self._place(key, uses[key] + 1)
        self._sink()

    def move_to_front(self, key: OffloadKey) -> None:
        if key in self.blocks:
            self._move_to_end((key,))

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        victims: list[OffloadKey] = []
        busy: list[OffloadKey] = []
        for key in chain.from_iterable(self.queues) if n > 0 else ():
            if self.blocks[key].ref_cnt != 0 or key in protected:
                busy.append(key)
                continue
            victims.append(key)
            if len(victims) == n:
                break
        if len(victims) < n:
            return None
        self._move_to_end(busy)
        for key in victims:
            del self._queue_of(key)[key]
            self.ghosts[key] = self.uses.pop(key)
        while len(self.ghosts) > GHOSTS * self.cache_capacity:
            self.ghosts.pop_oldest()
        return [(key, self.blocks.pop(key)) for key in victims]

    def next_victims(self, n: int) -> list[OffloadKey]:
        blocks = self.blocks
        return list(islice((key for key in chain.from_iterable(self.queues) if blocks[key].ref_cnt == 0), n))

    def clear(self) -> None:
        for part in (self.blocks, self.uses, self.ghosts):
            part.clear()
        for queue in self.queues:
            queue.clear()
        self.num_uses = 0

    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        check_same_blocks(self.blocks, held)
        if sorted(chain.from_iterable(self.queues)) != sorted(held):
            raise InvariantError("the queues together do not hold each block once")
        if self.uses.keys() != held.keys() or not held.keys().isdisjoint(self.ghosts):
            raise InvariantError("a block has no use count, or a key is both held and a ghost")
        placed = ((level, key) for level, queue in enumerate(self.queues) for key in queue)
        if any(level > _level(self.uses[key]) for level, key in placed):
            raise InvariantError("a block is in a queue above its uses")
        if any(list(queue.values()) != sorted(queue.values()) for queue in self.queues):
            raise InvariantError("a queue is not in the order in which its blocks sink")
        if len(self.ghosts) > GHOSTS * self.cache_capacity:
            raise InvariantError(f"{len(self.ghosts)} ghosts for a capacity of {self.cache_capacity}")

    def _queue_of(self, key: OffloadKey) -> OrderedDict[OffloadKey, int]:
        """Return the queue of a held block: that of its use count, or a lower one if it has sunk."""
        level = _level(self.uses[key])
        while key not in self.queues[level]:
            level -= 1
        return self.queues[level]

    def _place(self, key: OffloadKey, num_uses: int) -> None:
        """Append a block that is in no queue to the queue of its use count."""
        self.uses[key] = num_uses = min(num_uses, MAX_USES)
        self.queues[_level(num_uses)][key] = self.num_uses + self.lifetime

    def _move_to_end(self, keys: Iterable[OffloadKey]) -> None:
        """Make blocks the newest of their queues."""
        for key in keys:
            queue = self._queue_of(key)
            del queue[key]
            queue[key] = self.num_uses + self.lifetime

    def _sink(self) -> None:
        """Move each block whose lifetime has passed down by one queue."""
        now, lower = self.num_uses, self.queues[0]
        for queue in self.queues[1:]:
            while queue:
                key, end = next(iter(queue.items()))
                if end >= now:
                    break
                del queue[key]
                lower[key] = now + self.lifetime
            lower = queue


def _level(num_uses: int) -> int:
    """Return the class of a count from 1 to MAX_USES. Pure."""
    return num_uses.bit_length() - 1
