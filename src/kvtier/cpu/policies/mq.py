"""MQ, the multi-queue algorithm: least recently used within classes of how often a block was used.

Queue k holds blocks used 2**k to 2**(k+1) - 1 times, each queue in the order of use; the lowest queue that is not
empty gives its oldest block. A block that has not been used for ``lifetime`` uses of any block sinks one queue, so
that what was popular once leaves in the end. Keys that left stay as ghosts with their count, and a block that comes
back goes on from it.

What differs from the paper: its clock ticks with each use of a block, and here blocks sink once a call, after the
last of its ticks, as many as are due, so that a call for a thousand blocks looks at the queues once; the count ends
where more would change nothing. A block that is pinned or protected when its turn comes is in use: it is renewed in its
queue without a count. So an eviction visits its victims and the busy blocks before them, and meets a busy block once
each time its queue turns. A block sinks at most as often as it rose.

A touch that names a block in flight renews each block where it is and counts no use (``touched``).

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
"""Classes of use, the paper's number: the top one means 128 uses and more. With 4 or 12 a chat service finds as
many blocks, within 0.05 points; each more costs a look at a queue with every call, and lets what was popular once
stay a lifetime longer."""

MAX_USES = 2 ** (NUM_QUEUES - 1)
"""Uses that are counted: more would not reach a higher queue, and a ghost need not remember more."""

LIFETIMES = 1
"""``lifetime`` in capacities: about the time in which LRU would throw out what is not used. Longer keeps what was
popular once from sinking, which helps a cache far too small and costs one that is nearly large enough (2: +1.1
points of hits at 1 % of the blocks of a chat service, -0.6 at 5 %, -0.5 at 20 %); shorter ends in LRU; with 0 a
block sinks with each call."""

GHOSTS = 4
"""Ghosts in capacities, the paper's number. A cache far too small forgets what left before it comes back: at 1 % of
the blocks of a chat service it finds 5.7 of 100 with one capacity of ghosts, 6.2 with four, at 5 % 21.8 and 22.2,
at 20 % the same. Each costs at most 150 bytes."""


class MQCachePolicy(CachePolicy, EvictionPreview, MoveToFront):
    """MQ; a held block costs an entry of two dictionaries and of an ordered one, and there are GHOSTS ghosts a block.

    Attributes:
        blocks: every held block, in no order. INVARIANT: the same object for the policy's life, because
            ``getter`` hands out its bound method.
        queues: when each block sinks, by class of use, oldest first. INVARIANT: ascending within a queue.
        uses: how often each held block was used, its store included.
        ghosts: keys that left, the first to leave first, with their uses.
        lifetime: uses of any block after which a block that was not used sinks.
        num_uses: uses of any block so far, the clock.
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
            self._renew(touched.held)
            return
        uses = self.uses
        for key in touched.held:
            del self._queue_of(key)[key]
            self.num_uses += 1
            self._place(key, uses[key] + 1)
        self._sink()

    def move_to_front(self, key: OffloadKey) -> None:
        if key in self.blocks:
            self._renew((key,))

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
        self._renew(busy)
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
            raise InvariantError("the use of a block is not counted, or a key is held and a ghost")
        placed = ((level, key) for level, queue in enumerate(self.queues) for key in queue)
        if any(level > _level(self.uses[key]) for level, key in placed):
            raise InvariantError("a block is in a queue above its uses")
        if any(list(queue.values()) != sorted(queue.values()) for queue in self.queues):
            raise InvariantError("a queue is not in the order in which its blocks sink")
        if len(self.ghosts) > GHOSTS * self.cache_capacity:
            raise InvariantError(f"{len(self.ghosts)} ghosts for a capacity of {self.cache_capacity}")

    def _queue_of(self, key: OffloadKey) -> OrderedDict[OffloadKey, int]:
        """Return the queue of a held block: that of its uses, or one below, if it has sunk."""
        level = _level(self.uses[key])
        while key not in self.queues[level]:
            level -= 1
        return self.queues[level]

    def _place(self, key: OffloadKey, num_uses: int) -> None:
        """Make a block that is in no queue the newest of the one of its uses."""
        self.uses[key] = num_uses = min(num_uses, MAX_USES)
        self.queues[_level(num_uses)][key] = self.num_uses + self.lifetime

    def _renew(self, keys: Iterable[OffloadKey]) -> None:
        """Make blocks the newest of their queues."""
        for key in keys:
            queue = self._queue_of(key)
            del queue[key]
            queue[key] = self.num_uses + self.lifetime

    def _sink(self) -> None:
        """Let the blocks sink whose time is over, each by one queue."""
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
