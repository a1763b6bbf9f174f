"""Parked blocks: busy ones at the old end of a queue, which evictions skip.

A pinned block keeps its place in a queue ordered by use, so each eviction would pass a hundred thousand of them again.
When they are many, the busy blocks before the first idle one move to the new end of the queue's dictionary and are
numbered: each is older than every block that is not parked. A parked block that becomes idle is listed by its number
and is evicted before all others, as if it had kept its place. A parked block that is used again is removed from this
table, because the new end is then its right place. The manager must call ``on_idle``: without the notifications,
only a scan would find the blocks that have become idle.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus
from kvtier.errors import InvariantError

MIN_BUSY_BLOCKS = 64
"""Busy blocks before the first idle one from which on they are parked. Fewer would park blocks that are loading and are
used again when the load ends. More would be passed in every eviction; up to 64 cost less than a batch of victims."""

Item = tuple[OffloadKey, BlockStatus]


class ParkedBlocks:
    """The parked blocks of one queue.

    Args:
        queue: all of its blocks, oldest first but for parked ones; the policy's own dictionary.

    Attributes:
        is_notified: whether ``on_idle`` is called for each block that becomes idle; nothing is parked without it.
        min_busy_blocks: MIN_BUSY_BLOCKS; tests set a smaller number.
        places: number of each parked block; mostly empty, and then ``forget`` and ``on_idle`` have no effect.
            INVARIANT: each key is in the queue and older than every block that is not parked; a lower number is older.
    """

    def __init__(self, queue: OrderedDict[OffloadKey, BlockStatus]) -> None:
        self.is_notified = False
        self.min_busy_blocks = MIN_BUSY_BLOCKS
        self._queue = queue
        self.places: dict[OffloadKey, int] = {}
        self._num_places = 0
        # A heap of (number, key) of idle parked blocks, and those of them that the present walk has passed.
        self._listed: list[tuple[int, OffloadKey]] = []
        self._walked: list[tuple[int, OffloadKey]] = []

    def walk(self, protected: Collection[OffloadKey]) -> Iterator[Item]:
        """Yield the queue's idle blocks that are not protected, oldest first; end with ``end_walk``."""
        idle: Iterator[Item] = (item for item in self._queue.items() if not item[1].ref_cnt)
        if protected:
            idle = (item for item in idle if item[0] not in protected)
        if not self.places:
            return idle
        places = self.places
        return chain(self._walk_listed(protected), (item for item in idle if item[0] not in places))

    def end_walk(self, evicted: Iterable[Item]) -> None:
        """End a walk: blocks in ``evicted`` have left the queue, all others stay."""
        if not self.is_notified:
            return
        if self.places:
            self.forget([key for key, _ in evicted])
            for entry in self._walked:
                heappush(self._listed, entry)
            self._walked.clear()
        self._park()

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Remove ``keys``, which were used or are not held any more."""
        if self.places:
            for key in keys:
                self.places.pop(key, None)

    def on_idle(self, keys: Iterable[OffloadKey]) -> None:
        """List those of ``keys`` that are parked and idle."""
        places = self.places
        if not places:
            return
        for key in keys:
            if key in places and self._queue[key].ref_cnt == 0:
                heappush(self._listed, (places[key], key))
        if len(self._listed) > 2 * len(places):  # a block is listed each time it becomes idle
            self._rebuild_list()

    def clear(self) -> None:
        """Forget everything."""
        for part in (self.places, self._listed, self._walked):
            part.clear()

    def _walk_listed(self, protected: Collection[OffloadKey]) -> Iterator[Item]:
        last: tuple[int, OffloadKey] | None = None
        while self._listed:
            entry = heappop(self._listed)
            place, key = entry
            # Stale: the block was used or evicted meanwhile. Listed twice: it was pinned and unpinned again.
            if entry == last or self.places.get(key) != place:
                continue
            last = entry
            block = self._queue[key]
            if block.ref_cnt:
                continue
            self._walked.append(entry)
            if key not in protected:
                yield key, block

    def _park(self) -> None:
        """Park the busy blocks before the first idle one when there are enough."""
        oldest = next(iter(self._queue.values()), None)
        if oldest is None or not oldest.ref_cnt:  # the usual case
            return
        busy: list[OffloadKey] = []
        for key, block in self._queue.items():
            if not block.ref_cnt:
                break
            busy.append(key)
        if len(busy) < self.min_busy_blocks:
            return
        for key in busy:
            self._queue.move_to_end(key)
            if key not in self.places:
                self.places[key] = self._num_places
                self._num_places += 1

    def _rebuild_list(self) -> None:
        queue = self._queue
        self._listed = [(place, key) for key, place in self.places.items() if not queue[key].ref_cnt]
        heapify(self._listed)

    def check(self) -> None:
        """Compare with the queue.

        Raises:
            InvariantError: a parked block is not held, or is idle and not listed.
        """
        listed = {key for place, key in self._listed if self.places.get(key) == place}
        for key in self.places:
            block = self._queue.get(key)
            if block is None or (block.ref_cnt == 0 and key not in listed):
                raise InvariantError(
                    f"block {key.hex()} is parked, but not held, or idle and not listed: {block}"
                )

    def __len__(self) -> int:
        return len(self.places)
