"""Which slots of a slab may be written without evicting a block of the present epoch."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import length_hint

from kvtier.base import OffloadKey
from kvtier.cpu.policies import BlockStatus, CachePolicy


@dataclass(slots=True, eq=False)
class EpochBlocks:
    """The blocks of one epoch: an eviction policy and their number. The slot table's lock guards it.

    Attributes:
        policy: has the blocks in their order.
        num_blocks: how many there are.
    """

    policy: CachePolicy
    num_blocks: int = 0

    def insert(self, key: OffloadKey, status: BlockStatus) -> None:
        """Add a block that is not there."""
        self.policy.insert(key, status)
        self.num_blocks += 1

    def remove(self, key: OffloadKey, status: BlockStatus) -> bool:
        """Remove a block; False when another one, or none, stands under its key."""
        if self.policy.get(key) is not status:
            return False
        self.policy.remove(key)
        self.num_blocks -= 1
        return True

    def evict(self, num: int, protected: Collection[OffloadKey] = ()) -> list[tuple[OffloadKey, BlockStatus]]:
        """Remove ``num`` blocks, or as many as are not pinned, and return them."""
        if num <= 0:
            return []
        victims = self.policy.evict(num, protected)
        if victims is None:
            victims = []
            while one := self.policy.evict(1, protected):
                victims += one
        self.num_blocks -= len(victims)
        return victims


class ReusableSlots:
    """Slots that may be written without evicting a block of this epoch. The slot table's lock guards it.

    Args:
        num_fresh: slots from 0 on that have never held anything.
    """

    def __init__(self, num_fresh: int) -> None:
        self._fresh: Iterator[int] = iter(range(num_fresh))
        self._free: deque[int] = deque()
        self._foreign: deque[int] = deque()
        self._old_epochs: deque[EpochBlocks] = deque()
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

    def add_epoch(self, epoch: EpochBlocks) -> None:
        """Add the blocks of an epoch that is over."""
        self._old_epochs.append(epoch)

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
            "foreign_slots": len(self._foreign) + sum(epoch.num_blocks for epoch in self._old_epochs),
            "evicted_foreign_blocks": self._num_overwritten,
        }

    def _take_old(self) -> int | None:
        for epoch in tuple(self._old_epochs):
            for _, status in epoch.evict(1):
                return status.block_id
            if epoch.num_blocks == 0:
                self._old_epochs.remove(epoch)
        return None
