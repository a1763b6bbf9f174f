"""Slots that hold no block which could be found now, in the order in which they are used again.

It knows no key of ours. First come slots that hold nothing; then those of other namespaces, which another engine may
want when its turn comes, but nobody does now; then blocks of epochs before the last reset, as their policies order
them. A block that somebody still reads or writes is passed over.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from operator import length_hint

from kvtier.tiering.slab.era import Era


class SpareSlots:
    """A queue of slots. Guarded by whoever has it.

    Args:
        num_fresh: slots from 0 on that have never held anything.
    """

    def __init__(self, num_fresh: int) -> None:
        self._fresh: Iterator[int] = iter(range(num_fresh))
        self._free: deque[int] = deque()
        self._foreign: deque[int] = deque()
        self._old_eras: deque[Era] = deque()
        self._failed: deque[int] = deque()
        self._num_overwritten = 0

    def add_free(self, slots: Iterable[int]) -> None:
        """Add slots that hold nothing."""
        self._free.extend(slots)

    def add_failed(self, slot: int) -> None:
        """Add a slot that could not be written."""
        self._failed.append(slot)

    def add_foreign(self, slots: Iterable[int]) -> None:
        """Add slots with blocks that are not found now, oldest first."""
        self._foreign.extend(slots)

    def add_era(self, era: Era) -> None:
        """Add the blocks of an epoch that is over."""
        self._old_eras.append(era)

    def take(self) -> int | None:
        """Return the next slot, None when there is none that can be had now."""
        if self._free:
            return self._free.popleft()
        slot = next(self._fresh, None)
        if slot is None:
            slot = self._foreign.popleft() if self._foreign else self._take_old()
            self._num_overwritten += slot is not None
        return slot

    def take_failed(self) -> int | None:
        """Return the slot that failed longest ago, None when there is none."""
        return self._failed.popleft() if self._failed else None

    def stats(self) -> dict[str, float]:
        """Return how many slots there are, and how many blocks of others have been given away."""
        return {
            "free_slots": len(self._free) + length_hint(self._fresh),
            "failed_slots": len(self._failed),
            "foreign_slots": len(self._foreign) + sum(era.num_held for era in self._old_eras),
            "evicted_foreign_blocks": self._num_overwritten,
        }

    def _take_old(self) -> int | None:
        for era in tuple(self._old_eras):
            for _, status in era.evict(1):
                return status.block_id
            if era.num_held == 0:
                self._old_eras.remove(era)
        return None
