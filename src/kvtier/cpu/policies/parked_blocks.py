"""Parked blocks: pinned ones at the old end of a queue, which evictions skip.

A queue in the order of use keeps the place of a pinned block, and each eviction would have to pass a hundred thousand
of them again. Once they are many, the busy blocks before the first idle one move to the new end of the queue's
dictionary and are numbered: each is older than every block that is not parked. A parked block that becomes idle is
listed by its number and leaves before all others, as if it had stayed in its place. A parked block that is used again
is forgotten here, because the new end is then its right place. The policy must be an ``IdleListener``: without the
notifications only a look at each block would find those that have become idle.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import BlockStatus
from kvtier.errors import InvariantError

MIN_BUSY_BLOCKS = 64
"""Busy blocks before the first idle one that are passed each time: a batch of victims costs more than to look at so
many. Fewer would park blocks that are loading now and are used again when the load ends; more are passed in vain."""

Item = tuple[OffloadKey, BlockStatus]


class ParkedBlocks:
    """The parked blocks of one queue.

    Args:
        queue: every block of it, oldest first but for parked ones; shared with its policy.

    Attributes:
        is_notified: whether ``on_idle`` is called for each block that becomes idle; nothing is parked before.
        min_busy_blocks: busy blocks before the first idle one from which on they are parked.
    """

    def __init__(self, queue: OrderedDict[OffloadKey, BlockStatus]) -> None:
        self.is_notified = False
        self.min_busy_blocks = MIN_BUSY_BLOCKS
        self._queue = queue
        # INVARIANT: each key of _places is in the queue, and older than those that are not, a lower number older.
        self._places: dict[OffloadKey, int] = {}
        self._num_places = 0
        self._listed: list[tuple[int, OffloadKey]] = []
        self._walked: list[tuple[int, OffloadKey]] = []

    def walk(self, protected: Collection[OffloadKey]) -> Iterator[Item]:
        """Yield the queue's idle blocks that are not protected, oldest first; ``settle`` ends the walk."""
        idle: Iterator[Item] = (item for item in self._queue.items() if not item[1].ref_cnt)
        if protected:
            idle = (item for item in idle if item[0] not in protected)
        if not self._places:
            return idle
        places = self._places
        return chain(self._walk_listed(protected), (item for item in idle if item[0] not in places))

    def settle(self, left: Iterable[Item]) -> None:
        """End a walk: those in ``left`` have left the queue, whatever else was walked over stays."""
        if not self.is_notified:
            return
        if self._places:
            self.forget([key for key, _ in left])
            for entry in self._walked:
                heappush(self._listed, entry)
            self._walked.clear()
        self._set_aside()

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Take note that ``keys`` were used, or are held no more."""
        if self._places:
            for key in keys:
                self._places.pop(key, None)

    def on_idle(self, keys: Iterable[OffloadKey]) -> None:
        """Take note that blocks may have become idle."""
        places = self._places
        if not places:
            return
        for key in keys:
            if key in places and self._queue[key].ref_cnt == 0:
                heappush(self._listed, (places[key], key))
        if len(self._listed) > 2 * len(places):  # a block may become idle again and again
            self._list_anew()

    def clear(self) -> None:
        """Forget everything."""
        for part in (self._places, self._listed, self._walked):
            part.clear()

    def _walk_listed(self, protected: Collection[OffloadKey]) -> Iterator[Item]:
        last: tuple[int, OffloadKey] | None = None
        while self._listed:
            entry = heappop(self._listed)
            place, key = entry
            # Stale when it was used or left meanwhile, and listed twice when it was pinned and released again.
            if entry == last or self._places.get(key) != place:
                continue
            last = entry
            block = self._queue[key]
            if block.ref_cnt:
                continue
            self._walked.append(entry)
            if key not in protected:
                yield key, block

    def _set_aside(self) -> None:
        """Set aside what stands before the first idle block, when that is much."""
        oldest = next(iter(self._queue.values()), None)
        if oldest is None or not oldest.ref_cnt:  # nearly always
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
            if key not in self._places:
                self._places[key] = self._num_places
                self._num_places += 1

    def _list_anew(self) -> None:
        queue = self._queue
        self._listed = [(place, key) for key, place in self._places.items() if not queue[key].ref_cnt]
        heapify(self._listed)

    def check(self) -> None:
        """Compare with the queue.

        Raises:
            InvariantError: a block is set aside that is not held, or has become idle and is not listed.
        """
        listed = {key for place, key in self._listed if self._places.get(key) == place}
        for key in self._places:
            block = self._queue.get(key)
            if block is None or (block.ref_cnt == 0 and key not in listed):
                raise InvariantError(f"block {key.hex()} is set aside, and is {block}")

    def __len__(self) -> int:
        return len(self._places)
