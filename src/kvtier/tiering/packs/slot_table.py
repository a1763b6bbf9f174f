"""Which own slot holds which block, and which slot the next block gets.

An own pack is one that this process writes. A slot of it is free, or holds a whole block, or is pinned: by readers, or
by the one writer that fills it. Own blocks are ordered by an eviction policy; those that were adopted wait outside it
until their first use, because the policy would take them for recent ones, and leave first, oldest use first.

A slot that a block has left is *undropped* until the journal says so. INVARIANT: no slot is written while the last
record of the journal says that it holds a block. So whoever takes slots appends a record for each undropped one first.
"""

import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.cpu.policies import BlockStatus, CachePolicy
from kvtier.departed import DepartedBlocks, Loss
from kvtier.tenants import OtherKeys
from kvtier.tiering.kit.eviction_log import EvictionLog
from kvtier.tiering.kit.tenant_counts import TenantCounts
from kvtier.tiering.packs.expiry import SlotExpiry
from kvtier.tiering.packs.neighbours import SLOT_BITS, SLOT_MASK, PackNamespace, SlotContent, address_of

MAX_TIME_S = 2**32 - 1
"""The latest time that a record can have, seconds since 1970."""


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


@dataclass(slots=True, eq=False)
class OwnBlocks:
    """The blocks of one epoch under the policy, and their number. The slot table's lock guards it."""

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
            while single := self.policy.evict(1, protected):
                victims += single
        self.num_blocks -= len(victims)
        return victims


class SlotTable:
    """The slots of own packs: which jobs read and write them, and what they hold.

    Mutable is all of it. ``_lock`` guards it; it is held for a few operations per block of a job at most, because
    the scheduler's thread looks keys up under it. ``_changed`` is the same lock, for waiting until a write ends.

    Args:
        make_policy: builds the eviction policy, now and after each reset.
        wall_clock: seconds since 1970.
        emit_events: whether evictions are recorded for ``drain_evicted``.
        losses: remembers why blocks are gone.
        expiry: which blocks are over; None: none ever is.
        tenant_counts: counts the namespace's blocks by tenant; None where there are no tenants.
    """

    def __init__(
        self,
        make_policy: Callable[[], CachePolicy],
        wall_clock: Callable[[], float],
        *,
        emit_events: bool = False,
        losses: DepartedBlocks | None = None,
        expiry: SlotExpiry | None = None,
        tenant_counts: TenantCounts | None = None,
    ) -> None:
        self._make_policy = make_policy
        self._wall_clock = wall_clock
        self._losses = losses
        self._expiry = expiry
        self._tenant_counts = tenant_counts
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._namespace: PackNamespace | None = None
        self._packs: dict[int, OwnPack] = {}
        self._own = OwnBlocks(make_policy())
        self._unused: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self._free: deque[int] = deque()
        self._undropped: list[int] = []
        self._failed: deque[int] = deque()
        self._lost: set[int] = set()
        self._num_ahead = 0
        self._num_evicted = self._num_expired = 0
        self._evicted = EvictionLog() if emit_events else None

    # Packs

    def open_namespace(self, namespace: PackNamespace) -> list[int]:
        """Make ``namespace`` the one whose blocks are found; forget the packs of the one before, and return them."""
        with self._lock:
            self._namespace = namespace
            before = list(self._packs)
            self._packs = {}
            self._own = OwnBlocks(self._make_policy())
            self._unused = OrderedDict()
            self._free, self._failed = deque(), deque()
            self._undropped, self._lost = [], set()
            if self._evicted is not None:
                self._evicted.clear()
            if self._expiry is not None:
                self._expiry.clear()
            if self._tenant_counts is not None:
                self._tenant_counts.clear()
            self._changed.notify_all()
            return before

    def add_pack(
        self, namespace: PackNamespace, number: int, num_slots: int, blocks: Sequence[SlotContent]
    ) -> bool:
        """Take an own pack in; False when the namespace is another by now.

        Args:
            namespace: whose it is.
            number: the pack's.
            num_slots: how many slots it has.
            blocks: what it holds; of one that another own slot holds too, the slot becomes undropped.
        """
        with self._lock:
            if namespace is not self._namespace:
                return False
            times = array("I", bytes(4 * num_slots))
            pack = OwnPack([None] * num_slots, times, times[:])
            self._packs[number] = pack
            added = []
            for slot, key, stored_s, used_s in sorted(blocks, key=lambda block: block.used_s):
                if key is None:
                    continue
                address = address_of(number, slot)
                if key in self._unused or self._own.policy.get(key) is not None:
                    self._undropped.append(address)
                    continue
                pack.keys[slot] = key
                pack.stored_s[slot], pack.used_s[slot] = stored_s, used_s
                status = BlockStatus(address)
                status.ref_cnt = 0
                self._unused[key] = status
                added.append(key)
                if self._expiry is not None:
                    self._expiry.record(key, stored_s)
            undropped = {address & SLOT_MASK for address in self._undropped if address >> SLOT_BITS == number}
            self._free.extend(
                address_of(number, slot)
                for slot, held in enumerate(pack.keys)
                if held is None and slot not in undropped
            )
            if added and len(self._packs) > 1:
                self._unused = OrderedDict(
                    sorted(self._unused.items(), key=lambda item: self._used_s(item[1]))
                )
            if self._tenant_counts is not None:
                self._tenant_counts.add(added)
            if self._expiry is not None:
                self._drop_if_over(self._expiry, added)
            return True

    def remove_pack(self, number: int) -> list[SlotContent] | None:
        """Forget a pack that is lost or given away; return what it holds, oldest use first; None when it is not own."""
        with self._lock:
            pack = self._packs.pop(number, None)
            if pack is None:
                return None
            gone = []
            for slot, key in enumerate(pack.keys):
                if key is None:
                    continue
                status = self._unused.pop(key, None) or self._own.policy.get(key)
                if status is None or status.block_id != address_of(number, slot):
                    continue
                self._own.remove(key, status)
                if status.is_ready:
                    gone.append(SlotContent(slot, key, pack.stored_s[slot], pack.used_s[slot]))
                if self._expiry is not None:
                    self._expiry.forget(key)
                self._uncount((key,))
            self._free = deque(address for address in self._free if address >> SLOT_BITS != number)
            self._failed = deque(address for address in self._failed if address >> SLOT_BITS != number)
            self._undropped = [address for address in self._undropped if address >> SLOT_BITS != number]
            self._lost = {address for address in self._lost if address >> SLOT_BITS != number}
            self._changed.notify_all()
            return sorted(gone, key=lambda block: block.used_s)

    def used_times(self, number: int) -> "npt.NDArray[np.uint32] | None":
        """Return when each slot of an own pack was last used, seconds since 1970; None when it is not own."""
        with self._lock:
            pack = self._packs.get(number)
            return None if pack is None else np.array(pack.used_s, np.uint32)

    def own_packs(self) -> list[int]:
        """Return the numbers of own packs."""
        with self._lock:
            return list(self._packs)

    def find_oldest(self) -> tuple[int, int] | None:
        """Return when the block was last used that was used longest ago, and its pack; None without a block."""
        with self._lock:
            oldest: tuple[int, int] | None = None
            for number, pack in self._packs.items():
                used_s = np.frombuffer(pack.used_s, np.uint32)
                used_s = used_s[used_s > 0]
                if len(used_s):
                    found = int(used_s.min()), number
                    oldest = found if oldest is None else min(oldest, found)
            return oldest

    def set_ahead(self, num_slots: int) -> None:
        """Set how many slots are dropped before they are needed, so that neighbours know before they are written."""
        with self._lock:
            self._num_ahead = num_slots

    def num_lacking(self, num: int) -> int:
        """Return how many slots are missing for ``num`` blocks without an eviction; 0 or less: none."""
        with self._lock:
            return num + self._num_ahead - len(self._free) - len(self._undropped)

    # Blocks

    def is_held(self, namespace: PackNamespace, key: OffloadKey) -> bool:
        """Return whether the block is there, whole."""
        with self._lock:
            if self._expiry is not None and namespace is self._namespace:
                self._drop_if_over(self._expiry, (key,))
            return namespace is self._namespace and self._is_ready(key)

    def touch(self, namespace: PackNamespace, keys: Collection[OffloadKey]) -> None:
        """Mark own blocks among ``keys`` as recently used, the first of them most."""
        now_s = min(int(self._wall_clock()), MAX_TIME_S)
        with self._lock:
            if namespace is self._namespace:
                self._touch(keys, now_s)

    def touch_slots(self, number: int, slots: Iterable[int]) -> None:
        """Mark blocks as used that neighbours have read."""
        now_s = min(int(self._wall_clock()), MAX_TIME_S)
        with self._lock:
            pack = self._packs.get(number)
            if pack is not None:
                keys = [pack.keys[slot] for slot in slots if slot < len(pack.keys)]
                self._touch([key for key in keys if key is not None], now_s)

    def report(self, namespace: PackNamespace, report: Callable[[CachePolicy], object]) -> None:
        """Call ``report`` with the policy, unless the namespace is another by now."""
        with self._lock:
            if namespace is self._namespace:
                report(self._own.policy)

    def prepare_store(
        self, namespace: PackNamespace, keys: Sequence[OffloadKey], *, evicts: bool = True
    ) -> SlotReservation:
        """Decide which of ``keys`` have to be written, and pin slots for them; evicts where it must.

        Args:
            namespace: when it is not the current one, nothing is stored in it any more.
            keys: each once.
            evicts: False: nothing is evicted or reserved where slots are missing.
        """
        now_s = min(int(self._wall_clock()), MAX_TIME_S)
        with self._lock:
            if namespace is not self._namespace:
                return SlotReservation()
            if self._expiry is not None:
                self._drop_if_over(self._expiry, (*keys, *self._expiry.list_oldest_over()))
            held: list[OffloadKey] = []
            awaited: list[OffloadKey] = []
            missing: list[OffloadKey] = []
            for key in keys:
                self._put_in_use(key)
                status = self._own.policy.get(key)
                group = missing if status is None else held if status.is_ready else awaited
                group.append(key)
            if missing and not evicts and self.num_lacking(len(missing)) > 0:
                return SlotReservation(lacks_room=True)
            if held:
                self._touch(held, now_s)
            addresses, drops = self._take_slots(missing, frozenset(keys))
            pins = [self._begin_write(key, address) for key, address in zip(missing, addresses, strict=False)]
            return SlotReservation(held, awaited, pins, drops)

    def complete_drops(self, reservation: SlotReservation, failed: Collection[int]) -> None:
        """Make dropped slots free, those of ``failed``, whose record was not written, undropped again.

        A pinned slot among the failed must not be written: ``complete_store`` without it is the caller's.
        """
        pinned = {pin.address for pin in reservation.pins}
        with self._lock:
            for address in reservation.drops:
                if address >> SLOT_BITS in self._packs and address not in pinned:
                    (self._undropped if address in failed else self._free).append(address)

    def take_undropped(self) -> SlotReservation:
        """Return the slots whose record has yet to be written, for ``complete_drops``."""
        with self._lock:
            drops, self._undropped = self._undropped, []
            return SlotReservation(drops=drops)

    def take_overdue(self, num_processes: int) -> SlotReservation:
        """Drop blocks that are over, and those of tenants beyond their quotas; return all undropped slots.

        Args:
            num_processes: how many use the namespace: each evicts a share of what is beyond, this one too.
        """
        with self._lock:
            if self._expiry is not None:
                self._drop_if_over(self._expiry, self._expiry.list_oldest_over())
            if self._tenant_counts is not None and self._tenant_counts.has_quotas:
                for number, excess in self._tenant_counts.rank_beyond(())[0]:
                    self._evict(self._evict_of(number, -(-excess // num_processes), ()))
            return self.take_undropped()

    def complete_store(
        self,
        pins: Iterable[SlotPin],
        written: Collection[OffloadKey],
        undropped: Collection[int] = (),
        *,
        are_broken: bool = True,
    ) -> list[OffloadKey]:
        """Unpin slots after writing, and return the blocks that are held now; those not in ``written`` are not.

        Args:
            pins: the slots.
            written: the blocks that are whole and recorded.
            undropped: of the others, slots that were not touched because their last record stands.
            are_broken: whether the device refused the others: they are taken last from then on.
        """
        now_s = min(int(self._wall_clock()), MAX_TIME_S)
        held = []
        with self._lock:
            for pin in pins:
                pin.status.ref_cnt = 0
                address = pin.address
                pack = self._packs.get(address >> SLOT_BITS)
                if pin.key in written:
                    # A pack that was lost or given away meanwhile has taken the block with it.
                    if pack is not None and self._own.policy.get(pin.key) is pin.status:
                        slot = address & SLOT_MASK
                        pack.stored_s[slot] = pack.used_s[slot] = now_s
                        held.append(pin.key)
                        if self._expiry is not None:
                            self._expiry.record(pin.key, now_s)
                    continue
                if self._own.remove(pin.key, pin.status):
                    self._uncount((pin.key,))
                if pack is None:
                    continue
                pack.keys[address & SLOT_MASK] = None
                if address in undropped:
                    self._undropped.append(address)
                else:
                    (self._failed if are_broken else self._free).append(address)
            self._changed.notify_all()
        return held

    def wait_written(
        self, namespace: PackNamespace, keys: Collection[OffloadKey], timeout_s: float
    ) -> list[OffloadKey]:
        """Block until the writes of ``keys`` have ended, and return those that are held then."""
        with self._lock:
            self._changed.wait_for(lambda: not any(self._is_in_flight(key) for key in keys), timeout_s)
            return [key for key in keys if namespace is self._namespace and self._is_ready(key)]

    def prepare_load(self, namespace: PackNamespace, keys: Sequence[OffloadKey]) -> list[SlotPin | None]:
        """Pin the slots of ``keys``, each as often as it is named; None for those that are not there."""
        with self._lock:
            if namespace is not self._namespace:
                return [None] * len(keys)
            if self._expiry is not None:
                self._drop_if_over(self._expiry, keys)
            return [self._pin(key) for key in keys]

    def pin_slot(self, address: int) -> SlotPin | None:
        """Pin the block in a slot for a read; None where there is none, or it is being written."""
        with self._lock:
            pack = self._packs.get(address >> SLOT_BITS)
            slot = address & SLOT_MASK
            key = None if pack is None or slot >= len(pack.keys) else pack.keys[slot]
            return None if key is None else self._pin(key)

    def complete_load(
        self, pins: Iterable[SlotPin], lost: Collection[OffloadKey] = (), loss: Loss = Loss.DAMAGED
    ) -> None:
        """Unpin slots after reading; the blocks in ``lost`` are not there any more, and their slots are undropped."""
        with self._lock:
            for pin in pins:
                pin.status.ref_cnt -= 1
                address = pin.address
                if pin.key in lost and self._own.remove(pin.key, pin.status):
                    self._lost.add(address)
                    self._note_gone((pin.key,), loss)
                if pin.status.ref_cnt == 0 and address in self._lost:
                    self._lost.remove(address)
                    self._vacate(address)

    def take_blocks(self, namespace_name: str, num: int, tenant: int | None = None) -> list[OffloadKey]:
        """Forget up to ``num`` own blocks that are not pinned, and return them; their slots are undropped.

        Args:
            namespace_name: whose blocks are to go; none when it is not the current one.
            num: how many; without a meaning for one tenant.
            tenant: number of the tenant whose blocks are to go, all at once, because each call visits those of others;
                None: anybody's.
        """
        with self._lock:
            if self._namespace is None or self._namespace.name != namespace_name:
                return []
            if tenant is None:
                victims = [self._unused.popitem(last=False) for _ in range(min(num, len(self._unused)))]
                victims += self._own.evict(num - len(victims))
            else:
                unused = [key for key in self._unused if get_offload_tenant(key) == tenant]
                victims = [(key, self._unused.pop(key)) for key in unused]
                num_held = 0 if self._tenant_counts is None else self._tenant_counts.num_blocks[tenant]
                victims += self._own.evict(num_held - len(victims), OtherKeys(tenant, ((), ())))
            for _, status in victims:
                self._vacate(status.block_id)
            keys = [key for key, _ in victims]
            self._note_gone(keys, Loss.PURGED)
            return keys

    def count_neighbours(
        self, added: Iterable[OffloadKey], removed: Collection[OffloadKey], loss: Loss = Loss.EVICTED
    ) -> None:
        """Count blocks that neighbours have stored and dropped; the latter are reported as gone unless they are own."""
        with self._lock:
            if self._tenant_counts is not None:
                self._tenant_counts.add(added)
                self._tenant_counts.remove(removed)
            self.report_gone(removed, loss)

    def report_gone(self, keys: Collection[OffloadKey], loss: Loss = Loss.EVICTED) -> None:
        """Report blocks that are not there any more, unless they are in another own slot."""
        with self._lock:
            gone = [key for key in keys if not self._is_ready(key)]
            if self._losses is not None:
                self._losses.report(gone, loss)
            if self._evicted is not None:
                for key in gone:
                    self._evicted.add(key)

    def drain_evicted(
        self, being_stored: Collection[OffloadKey], is_neighbours: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey] | None:
        """Return the blocks that are gone since the last call and are not back.

        Args:
            being_stored: blocks whose store has not been reported yet; they wait for a later call.
            is_neighbours: whether a neighbour holds a block.
        """
        with self._lock:
            if self._evicted is None:
                return []
            return self._evicted.take(being_stored, lambda key: self._is_ready(key) or is_neighbours(key))

    def stats(self) -> dict[str, float]:
        """Return how many slots hold what, and how many blocks were evicted."""
        with self._lock:
            counts: dict[str, float] = {
                "own_packs": len(self._packs),
                "own_blocks": self._own.num_blocks + len(self._unused),
                "free_slots": len(self._free) + len(self._undropped),
                "failed_slots": len(self._failed),
                "evicted_blocks": self._num_evicted,
            }
            if self._expiry is not None:
                counts["expired_blocks"] = self._num_expired
            if self._tenant_counts is not None:
                counts |= self._tenant_counts.stats()
            return counts

    # Below, the lock is held.

    def _is_ready(self, key: OffloadKey) -> bool:
        if key in self._unused:
            return True
        status = self._own.policy.get(key)
        return status is not None and status.is_ready

    def _is_in_flight(self, key: OffloadKey) -> bool:
        status = self._own.policy.get(key)
        return status is not None and not status.is_ready

    def _used_s(self, status: BlockStatus) -> int:
        used_s: int = self._packs[status.block_id >> SLOT_BITS].used_s[status.block_id & SLOT_MASK]
        return used_s

    def _touch(self, keys: Collection[OffloadKey], now_s: int) -> None:
        packs, get = self._packs, self._own.policy.get
        for key in keys:
            self._put_in_use(key)
            status = get(key)
            if status is not None:
                packs[status.block_id >> SLOT_BITS].used_s[status.block_id & SLOT_MASK] = now_s
        self._own.policy.touch(keys)

    def _put_in_use(self, key: OffloadKey) -> None:
        status = self._unused.pop(key, None)
        if status is not None:
            self._own.insert(key, status)

    def _pin(self, key: OffloadKey) -> SlotPin | None:
        self._put_in_use(key)
        status = self._own.policy.get(key)
        if status is None or not status.is_ready:
            return None
        status.ref_cnt += 1
        return SlotPin(key, status)

    def _begin_write(self, key: OffloadKey, address: int) -> SlotPin:
        pin = SlotPin(key, BlockStatus(address))
        self._own.insert(key, pin.status)
        self._packs[address >> SLOT_BITS].keys[address & SLOT_MASK] = key
        if self._tenant_counts is not None:
            self._tenant_counts.add((key,))
        return pin

    def _vacate(self, address: int) -> None:
        """Note that a slot's block has left it; its record is written by whoever takes slots next."""
        pack = self._packs.get(address >> SLOT_BITS)
        if pack is not None:
            slot = address & SLOT_MASK
            pack.keys[slot] = None
            pack.used_s[slot] = 0
            self._undropped.append(address)

    def _note_gone(self, keys: Collection[OffloadKey], loss: Loss) -> None:
        if self._evicted is not None:
            for key in keys:
                self._evicted.add(key)
        if self._expiry is not None:
            for key in keys:
                self._expiry.forget(key)
        self._uncount(keys)
        if self._losses is not None:
            self._losses.report(list(keys), loss)

    def _uncount(self, keys: Collection[OffloadKey]) -> None:
        if self._tenant_counts is not None:
            self._tenant_counts.remove(keys)

    def _drop_if_over(self, expiry: SlotExpiry, keys: Collection[OffloadKey]) -> None:
        """Drop those of ``keys`` that are over and not in use."""
        for key in keys:
            if not expiry.is_over(key):
                continue
            self._put_in_use(key)
            status = self._own.policy.get(key)
            if status is None or status.ref_cnt:
                continue
            self._own.remove(key, status)
            self._vacate(status.block_id)
            self._num_expired += 1
            self._note_gone((key,), Loss.EXPIRED)

    def _take_slots(
        self, missing: Sequence[OffloadKey], protected: Collection[OffloadKey]
    ) -> tuple[list[int], list[int]]:
        """Return up to as many slots as blocks are missing, and those that have to be dropped before."""
        num = len(missing)
        num_lacking = max(0, num + self._num_ahead - len(self._free) - len(self._undropped))
        victims, num_any = self._evict_beyond(missing, num_lacking, protected)
        # None of the unused is named in the call that needs the room: those have come under the policy.
        while num_any and self._unused:
            victims.append(self._unused.popitem(last=False))
            num_any -= 1
        self._evict(victims + self._own.evict(num_any, protected))
        drops, self._undropped = self._undropped, []
        slots = [self._free.popleft() for _ in range(min(num, len(self._free)))]
        slots += drops[: num - len(slots)]
        while len(slots) < num and self._failed:
            slots.append(self._failed.popleft())
        return slots, drops

    def _evict(self, victims: Sequence[tuple[OffloadKey, BlockStatus]]) -> None:
        """Note that blocks were evicted."""
        for _, status in victims:
            self._vacate(status.block_id)
        self._num_evicted += len(victims)
        self._note_gone([key for key, _ in victims], Loss.EVICTED)

    def _evict_beyond(
        self, missing: Sequence[OffloadKey], num: int, protected: Collection[OffloadKey]
    ) -> tuple[list[tuple[OffloadKey, BlockStatus]], int]:
        """Evict own blocks of tenants beyond their quotas; return them, and how many of anybody's may go besides.

        Args:
            missing: blocks that the store adds.
            num: slots that it needs.
            protected: blocks that stay.
        """
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        if self._tenant_counts is None or not self._tenant_counts.has_quotas:
            return victims, num
        ranked, num_beyond = self._tenant_counts.rank_beyond(missing)
        for number, excess in ranked:
            num_of = min(num - len(victims), excess, self._tenant_counts.num_blocks[number])
            if num_of > 0:
                victims += self._evict_of(number, num_of, protected)
        return victims, min(num - min(num, num_beyond), num - len(victims))

    def _evict_of(
        self, tenant: int, num: int, protected: Collection[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]]:
        """Evict up to ``num`` own blocks of one tenant, adopted ones first."""
        unused = [key for key in self._unused if get_offload_tenant(key) == tenant][:num]
        victims = [(key, self._unused.pop(key)) for key in unused]
        return victims + self._own.evict(num - len(victims), OtherKeys(tenant, (protected, ())))
