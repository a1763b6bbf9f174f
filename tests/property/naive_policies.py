"""FIFO, SIEVE, S3-FIFO and MQ as lists that are searched: slow, short, and written from the papers, not from kvtier's.

What cannot leave is treated as kvtier's policies promise: a busy block is sent to the end of its queue, at most once in one
eviction, or, under SIEVE, loses its mark and keeps its place.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus, CachePolicy


@dataclass(eq=False)
class Entry:
    """A held block; ``block`` is shared with whoever pins it."""

    key: OffloadKey
    block: BlockStatus
    uses: int = 0
    sinks_after: int = 0
    is_passed: bool = False

    def __deepcopy__(self, memo: object) -> "Entry":
        return copy.copy(self)


class NaivePolicy(CachePolicy):
    """Queues as lists, next to leave first; evicts one block at a time on a copy, which it keeps when all went well."""

    num_queues = 1

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        self.queues: list[list[Entry]] = [[] for _ in range(self.num_queues)]
        self.ghosts: dict[OffloadKey, int] = {}
        self.hand = self.now = 0

    def place_of(self, key: OffloadKey) -> tuple[list[Entry], Entry] | None:
        found = ((queue, entry) for queue in self.queues for entry in queue if entry.key == key)
        return next(found, None)

    def get(self, key: OffloadKey) -> BlockStatus | None:
        place = self.place_of(key)
        return None if place is None else place[1].block

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.queues[0].append(Entry(key, block))

    def remove(self, key: OffloadKey) -> None:
        place = self.place_of(key)
        if place is not None:
            place[0].remove(place[1])

    def touch(self, keys: Collection[OffloadKey]) -> None:
        places = [place for key in dict.fromkeys(keys) if (place := self.place_of(key))]
        is_use = all(entry.block.is_ready for _, entry in places)
        for queue, entry in reversed(places):
            if is_use:
                self.use(queue, entry)
            else:
                self.order(queue, entry)

    def use(self, queue: list[Entry], entry: Entry) -> None:
        """Do nothing."""

    def order(self, queue: list[Entry], entry: Entry) -> None:
        if not entry.block.is_ready:
            queue.remove(entry)
            queue.append(entry)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        held = [entry for queue in self.queues for entry in queue]
        if sum(entry.block.ref_cnt == 0 and entry.key not in protected for entry in held) < n:
            return None
        victims = [self.evict_one(protected) for _ in range(n)]
        for queue in self.queues:
            for entry in queue:
                entry.is_passed = False
        self.trim_ghosts()
        return [(entry.key, entry.block) for entry in victims]

    def evict_one(self, protected: Collection[OffloadKey]) -> Entry:
        for queue in self.queues:
            for entry in self.idle_after_passing(queue, protected):
                queue.remove(entry)
                self.ghosts[entry.key] = entry.uses
                return entry
        raise AssertionError("nothing is idle")

    def idle_after_passing(self, queue: list[Entry], protected: Collection[OffloadKey]) -> list[Entry]:
        """Send busy blocks at the front to the end; return the first idle one, or nothing."""
        while waiting := [entry for entry in queue if not entry.is_passed]:
            entry = waiting[0]
            if entry.block.ref_cnt == 0 and entry.key not in protected:
                return [entry]
            entry.is_passed = True
            self.send_round(queue, entry)
        return []

    def send_round(self, queue: list[Entry], entry: Entry) -> None:
        queue.remove(entry)
        queue.append(entry)

    def trim_ghosts(self) -> None:
        self.ghosts.clear()


class NaiveFIFO(NaivePolicy):
    """One queue."""


class NaiveSieve(NaivePolicy):
    """One queue and the index of the hand; ``uses`` is the mark."""

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        super().insert(key, block)

    def remove(self, key: OffloadKey) -> None:
        place = self.place_of(key)
        if place is not None:
            idx = self.queues[0].index(place[1])
            del self.queues[0][idx]
            self.hand -= idx < self.hand
            self.hand %= max(1, len(self.queues[0]))

    def use(self, queue: list[Entry], entry: Entry) -> None:
        entry.uses = 1

    def order(self, queue: list[Entry], entry: Entry) -> None:
        if not entry.block.is_ready:
            self.hand -= queue.index(entry) < self.hand
            super().order(queue, entry)

    def evict_one(self, protected: Collection[OffloadKey]) -> Entry:
        queue = self.queues[0]
        while True:
            entry = queue[self.hand]
            if entry.block.ref_cnt == 0 and entry.key not in protected and not entry.uses:
                del queue[self.hand]
                self.hand %= max(1, len(queue))
                return entry
            entry.uses = 0
            self.hand = (self.hand + 1) % len(queue)


class NaiveS3FIFO(NaivePolicy):
    """Queue 0 is small, queue 1 main."""

    num_queues = 2

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.small_capacity = max(1, cache_capacity // 10)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.queues[key in self.ghosts].append(Entry(key, block))
        self.ghosts.pop(key, None)

    def use(self, queue: list[Entry], entry: Entry) -> None:
        entry.uses = min(entry.uses + 1, 3)

    def evict_one(self, protected: Collection[OffloadKey]) -> Entry:
        small, main = self.queues
        while True:
            is_small_first = len(small) >= self.small_capacity
            for queue in (small, main) if is_small_first else (main, small):
                found = self.idle_after_passing(queue, protected)
                if found:
                    break
            (entry,) = found
            queue.remove(entry)
            if queue is small and entry.uses >= 2:
                entry.uses = 0
                main.append(entry)
            elif queue is main and entry.uses:
                entry.uses -= 1
                main.append(entry)
            else:
                if queue is small:
                    self.ghosts[entry.key] = 0
                return entry

    def send_round(self, queue: list[Entry], entry: Entry) -> None:
        super().send_round(queue, entry)
        if queue is self.queues[1]:
            entry.uses = max(0, entry.uses - 1)

    def trim_ghosts(self) -> None:
        while len(self.ghosts) > self.cache_capacity - self.small_capacity:
            del self.ghosts[next(iter(self.ghosts))]


class NaiveMQ(NaivePolicy):
    """Eight queues; a call ends with blocks sinking."""

    num_queues = 8

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.insert_many([key], [block])

    def insert_many(self, keys: Collection[OffloadKey], blocks: Collection[BlockStatus]) -> None:  # type: ignore[override]  # lists are all that comes
        for key, block in zip(keys, blocks, strict=True):
            self.place(Entry(key, block, self.ghosts.pop(key, 0)))
        self.sink()

    def touch(self, keys: Collection[OffloadKey]) -> None:
        super().touch(keys)
        self.sink()

    def use(self, queue: list[Entry], entry: Entry) -> None:
        queue.remove(entry)
        self.place(entry)

    def order(self, queue: list[Entry], entry: Entry) -> None:
        self.send_round(queue, entry)

    def send_round(self, queue: list[Entry], entry: Entry) -> None:
        super().send_round(queue, entry)
        entry.sinks_after = self.now + self.cache_capacity

    def place(self, entry: Entry) -> None:
        self.now += 1
        entry.uses = min(entry.uses + 1, 128)
        entry.sinks_after = self.now + self.cache_capacity
        level = next(level for level in range(7, -1, -1) if entry.uses >= 2**level)
        self.queues[level].append(entry)

    def sink(self) -> None:
        for level in range(1, 8):
            for entry in [entry for entry in self.queues[level] if entry.sinks_after < self.now]:
                self.queues[level].remove(entry)
                self.queues[level - 1].append(entry)
                entry.sinks_after = self.now + self.cache_capacity

    def trim_ghosts(self) -> None:
        while len(self.ghosts) > 4 * self.cache_capacity:
            del self.ghosts[next(iter(self.ghosts))]
