"""The blocks in own slots: what their packs hold, the pins of jobs, and the order in which they leave.

An eviction policy orders them. Those of adopted packs wait outside it until their first use, because the policy would
take them for recent ones. Of them the one that was used longest ago leaves next, as long as it was used before the
block that the policy has given up last: so packs that go from process to process keep one order of use.
"""

import heapq
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.cpu.policies import BlockStatus, CachePolicy
from kvtier.tenants import OtherKeys
from kvtier.tiering.fs.neighbours import SLOT_BITS

Victim = tuple[OffloadKey, BlockStatus]


class SlotPin(NamedTuple):
    """An own slot that is being read or written, and therefore stays as it is.

    Attributes:
        key: its block.
        status: the slot's address and its pins.
    """

    key: OffloadKey
    status: BlockStatus

    @property
    def address(self) -> int:
        """Address of the slot."""
        return self.status.block_id


class SlotReservation(NamedTuple):
    """What a store has to do.

    Attributes:
        held: blocks that are there already.
        awaited: blocks that another thread is writing just now.
        pins: slots for the others, as far as there was room.
        drops: slots to be dropped in the journals before any of ``pins`` is written; some of them are pinned.
        lacks_room: whether slots were missing and nothing was to be evicted; then nothing else is said.
    """

    held: Sequence[OffloadKey] = ()
    awaited: Sequence[OffloadKey] = ()
    pins: Sequence[SlotPin] = ()
    drops: Sequence[int] = ()
    lacks_room: bool = False


@dataclass(slots=True)
class OwnPack:
    """What the slots of a pack hold; the slot table's lock guards it.

    Attributes:
        keys: the block of each slot, None where there is none.
        stored_s: when each was stored, seconds since 1970.
        used_s: when each was last used.
    """

    keys: list[OffloadKey | None]
    stored_s: "array[int]"
    used_s: "array[int]"


class _Queue(NamedTuple):
    """The blocks of one adopted pack from ``position`` on, oldest use first. Those that were used meanwhile are passed.

    Heads are compared first by the time of their last use, then by the pack's number, which is unique.
    """

    used_s: int
    number: int
    position: int
    keys: Sequence[OffloadKey]
    times: "array[int]"


class OwnBlocks:
    """The blocks of one epoch in own slots. The slot table's lock guards it.

    Args:
        policy: has the blocks in use in their order.
        used_s: returns when the block in a slot was last used, seconds since 1970.
    """

    def __init__(self, policy: CachePolicy, used_s: Callable[[int], int]) -> None:
        self.policy = policy
        self._used_s = used_s
        self._given_up_s: float = float("inf")
        self._num_in_use = 0
        self._adopted: dict[OffloadKey, int] = {}
        self._queues: list[_Queue] = []

    def __len__(self) -> int:
        return self._num_in_use + len(self._adopted)

    def find_doubles(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        """Return which of ``keys`` are there."""
        if not self._num_in_use and self._adopted.keys().isdisjoint(keys):
            return ()
        return {key for key in keys if key in self._adopted or self.policy.get(key) is not None}

    def is_ready(self, key: OffloadKey) -> bool:
        """Return whether a block is there, whole."""
        if key in self._adopted:
            return True
        status = self.policy.get(key)
        return status is not None and status.is_ready

    def is_in_flight(self, key: OffloadKey) -> bool:
        """Return whether a block is being written."""
        status = self.policy.get(key)
        return status is not None and not status.is_ready

    def adopt(
        self, number: int, addresses: Sequence[int], keys: Sequence[OffloadKey], times: "array[int]"
    ) -> None:
        """Add the blocks of an adopted pack.

        Args:
            number: the pack's.
            addresses: their slots.
            keys: the blocks, oldest use first; none is there.
            times: when each was last used, seconds since 1970.
        """
        self._adopted.update(zip(keys, addresses, strict=True))
        if keys:
            heapq.heappush(self._queues, _Queue(times[0], number, 0, keys, times))

    def insert(self, key: OffloadKey, status: BlockStatus) -> None:
        """Add a block that is not there."""
        self.policy.insert(key, status)
        self._num_in_use += 1

    def use(self, key: OffloadKey) -> BlockStatus | None:
        """Put a block under the policy, if it is not; return its slot, None where there is none."""
        address = self._adopted.pop(key, None)
        if address is None:
            return self.policy.get(key)
        status = _whole(address)
        self.insert(key, status)
        return status

    def forget(self, key: OffloadKey, address: int) -> bool:
        """Remove a block if it is in that slot; return whether it was there, whole."""
        if self._adopted.get(key) == address:
            del self._adopted[key]
            return True
        status = self.policy.get(key)
        if status is None or status.block_id != address:
            return False
        self.remove(key, status)
        return status.is_ready

    def remove(self, key: OffloadKey, status: BlockStatus) -> bool:
        """Remove a block under the policy; False when another one, or none, stands under its key."""
        if self.policy.get(key) is not status:
            return False
        self.policy.remove(key)
        self._num_in_use -= 1
        return True

    def evict(self, num: int, protected: Collection[OffloadKey] = ()) -> list[Victim]:
        """Remove ``num`` blocks, or as many as are not pinned, and return them. No adopted one is protected."""
        victims = self._evict_adopted(num, self._given_up_s)
        in_use = self._evict_in_use(num - len(victims), protected)
        if in_use:
            self._given_up_s = self._used_s(in_use[-1][1].block_id)
        victims += in_use
        return victims + self._evict_adopted(num - len(victims), float("inf"))

    def evict_of(
        self, tenant: int, num: int | None = None, protected: Collection[OffloadKey] = ()
    ) -> list[Victim]:
        """Remove up to ``num`` blocks of one tenant, adopted ones first; None: all that are not pinned."""
        num = len(self) if num is None else num
        keys = [key for key in self._adopted if get_offload_tenant(key) == tenant][:num]
        victims = [(key, _whole(self._adopted.pop(key))) for key in keys]
        return victims + self._evict_in_use(num - len(victims), OtherKeys(tenant, (protected, ())))

    def _evict_in_use(self, num: int, protected: Collection[OffloadKey]) -> list[Victim]:
        if num <= 0:
            return []
        victims = self.policy.evict(num, protected)
        if victims is None:
            victims = []
            while single := self.policy.evict(1, protected):
                victims += single
        self._num_in_use -= len(victims)
        return victims

    def _evict_adopted(self, num: int, until_s: float) -> list[Victim]:
        """Remove up to ``num`` adopted blocks that were last used until then, oldest use first."""
        victims: list[Victim] = []
        queues = self._queues
        while len(victims) < num and queues and queues[0].used_s <= until_s:
            _, number, position, keys, times = queues[0]
            key, following = keys[position], position + 1
            if following < len(keys):
                heapq.heapreplace(queues, _Queue(times[following], number, following, keys, times))
            else:
                heapq.heappop(queues)
            address = self._adopted.get(key)
            if address is not None and address >> SLOT_BITS == number:
                del self._adopted[key]
                victims.append((key, _whole(address)))
        return victims


def _whole(address: int) -> BlockStatus:
    """Return the status of a slot that holds a whole block."""
    status = BlockStatus(address)
    status.ref_cnt = 0
    return status
