"""Which own slot holds which block, and which slot the next block gets.

An own pack is one that this process writes. A slot of it is free, or holds a whole block, or is pinned: by readers, or
by the one writer that fills it.

A slot that a block has left is *undropped* until the journal says so. INVARIANT: no slot is written while the last
record of the journal says that it holds a block. So a store that takes slots appends a record for each undropped one
first.
"""

import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.base import OffloadKey
from kvtier.cpu.policies import BlockStatus, CachePolicy
from kvtier.departed import Loss
from kvtier.tiering.fs.block_accounts import BlockAccounts
from kvtier.tiering.fs.expiry import SlotExpiry
from kvtier.tiering.fs.neighbours import (
    SLOT_BITS,
    SLOT_MASK,
    PackContents,
    PackNamespace,
    SlotContent,
    address_of,
)
from kvtier.tiering.fs.own_blocks import OwnBlocks, OwnPack, SlotPin, SlotReservation

MAX_TIME_S = 2**32 - 1
"""The latest time that a record can have, seconds since 1970."""


class SlotTable:
    """The slots of own packs: which jobs read and write them, and what they hold.

    Mutable is all of it. ``_lock`` guards it; it is held for a few operations per block of a job at most, because
    the scheduler's thread looks keys up under it. ``_changed`` is the same lock, for waiting until a write ends.

    Args:
        make_policy: builds the eviction policy, now and after each reset.
        wall_clock: seconds since 1970.
        accounts: of blocks that come and go.
    """

    def __init__(
        self,
        make_policy: Callable[[], CachePolicy],
        wall_clock: Callable[[], float],
        accounts: BlockAccounts,
    ) -> None:
        self._make_policy = make_policy
        self._wall_clock = wall_clock
        self._accounts = accounts
        self._expiry = accounts.expiry
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._namespace: PackNamespace | None = None
        self._packs: dict[int, OwnPack] = {}
        self._own = OwnBlocks(make_policy(), self._used_s)
        self._free: deque[int] = deque()
        self._undropped: list[int] = []
        self._failed: deque[int] = deque()
        self._lost: set[int] = set()
        self._num_ahead = 0

    # Packs

    def open_namespace(self, namespace: PackNamespace) -> list[int]:
        """Make ``namespace`` the one whose blocks are found; forget the packs of the one before, and return them."""
        with self._lock:
            self._namespace = namespace
            before = list(self._packs)
            self._packs = {}
            self._own = OwnBlocks(self._make_policy(), self._used_s)
            self._free, self._failed = deque(), deque()
            self._undropped, self._lost = [], set()
            self._accounts.clear()
            self._changed.notify_all()
            return before

    def add_pack(self, namespace: PackNamespace, number: int, num_slots: int, contents: PackContents) -> bool:
        """Take an own pack in; False when the namespace is another by now.

        Args:
            namespace: whose it is.
            number: the pack's.
            num_slots: how many slots it has.
            contents: what it holds; of a block that another own slot holds too, the slot becomes undropped.
        """
        with self._lock:
            if namespace is not self._namespace:
                return False
            times = array("I", bytes(4 * num_slots))
            pack = OwnPack([None] * num_slots, times, times[:])
            self._packs[number] = pack
            base, keys = address_of(number, 0), pack.keys
            slots, used_s = contents.slots, contents.used_s
            doubles = self._own.find_doubles(contents.keys)
            if doubles:
                is_new = [key not in doubles for key in contents.keys]
                self._undropped += [
                    base + slot for slot, new in zip(slots.tolist(), is_new, strict=True) if not new
                ]
                added = [key for key in contents.keys if key not in doubles]
                slots, used_s = slots[is_new], used_s[is_new]
            else:
                added = list(contents.keys)
            for slot, key in zip(slots.tolist(), added, strict=True):
                keys[slot] = key
            np.frombuffer(pack.stored_s, np.uint32)[contents.slots] = contents.stored_s
            np.frombuffer(pack.used_s, np.uint32)[slots] = used_s
            self._own.adopt(number, (slots + base).tolist(), added, array("I", used_s.tobytes()))
            if self._expiry is not None:
                for slot, key in zip(slots.tolist(), added, strict=True):
                    self._expiry.record(key, pack.stored_s[slot])
            undropped = {address & SLOT_MASK for address in self._undropped if address >> SLOT_BITS == number}
            self._free.extend(
                address_of(number, slot)
                for slot, held in enumerate(pack.keys)
                if held is None and slot not in undropped
            )
            self._accounts.add(added)
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
                if self._own.forget(key, address_of(number, slot)):
                    gone.append(SlotContent(slot, key, pack.stored_s[slot], pack.used_s[slot]))
                self._accounts.remove((key,))
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
        """Return when the block was last used that was used longest ago, and which pack to give; None without a block.

        It is not that block's: it is the pack whose blocks are the oldest on average, which has a half to a fifth as
        many young ones.
        """
        with self._lock:
            times = {number: np.array(pack.used_s, np.uint32) for number, pack in self._packs.items()}
        used = {number: found[found > 0] for number, found in times.items() if found.any()}
        if not used:
            return None
        oldest_s = min(int(found.min()) for found in used.values())
        return oldest_s, min(used, key=lambda number: (used[number].mean(), number))

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
            return namespace is self._namespace and self._own.is_ready(key)

    def touch(self, namespace: PackNamespace, keys: Collection[OffloadKey]) -> None:
        """Mark own blocks among ``keys`` as recently used, the first of them most."""
        now_s = min(int(self._wall_clock()), MAX_TIME_S)
        with self._lock:
            if namespace is self._namespace:
                self._touch(keys, now_s)

    def touch_slots(self, number: int, slots: Iterable[int]) -> None:
        """Mark blocks as used that neighbours have used."""
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
                status = self._own.use(key)
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
            for number, excess in self._accounts.rank_beyond(())[0]:
                self._evict(self._own.evict_of(number, -(-excess // num_processes)))
            return self.take_undropped()

    def complete_store(
        self,
        pins: Iterable[SlotPin],
        written: Collection[OffloadKey],
        undropped: Collection[int] = (),
    ) -> list[OffloadKey]:
        """Unpin slots after writing, and return the blocks that are held now; those not in ``written`` are not.

        Args:
            pins: the slots.
            written: the blocks that are whole and recorded.
            undropped: of the others, slots whose last record may say that they hold a block. The device has refused the
                rest: they are taken last from then on.
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
                        self._accounts.record_store(pin.key, now_s)
                    continue
                if self._own.remove(pin.key, pin.status):
                    self._accounts.remove((pin.key,))
                if pack is None:
                    continue
                pack.keys[address & SLOT_MASK] = None
                (self._undropped if address in undropped else self._failed).append(address)
            self._changed.notify_all()
        return held

    def wait_written(
        self, namespace: PackNamespace, keys: Collection[OffloadKey], timeout_s: float
    ) -> list[OffloadKey]:
        """Block until the writes of ``keys`` have ended, and return those that are held then."""
        with self._lock:
            self._changed.wait_for(lambda: not any(map(self._own.is_in_flight, keys)), timeout_s)
            return [key for key in keys if namespace is self._namespace and self._own.is_ready(key)]

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
                    self._accounts.remove((pin.key,), loss)
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
            victims = self._own.evict(num) if tenant is None else self._own.evict_of(tenant)
            for _, status in victims:
                self._vacate(status.block_id)
            keys = [key for key, _ in victims]
            self._accounts.remove(keys, Loss.PURGED)
            return keys

    def count_neighbours(
        self, added: Iterable[OffloadKey], removed: Collection[OffloadKey], loss: Loss = Loss.EVICTED
    ) -> None:
        """Count blocks that neighbours have stored and dropped; the latter are reported as gone unless they are own."""
        with self._lock:
            self._accounts.add(added)
            self._accounts.remove_neighbours(removed)
            self.report_gone(removed, loss)

    def report_gone(self, keys: Collection[OffloadKey], loss: Loss = Loss.EVICTED) -> None:
        """Report blocks that are not there any more, unless they are in another own slot."""
        with self._lock:
            self._accounts.report_gone([key for key in keys if not self._own.is_ready(key)], loss)

    def report_foreign(self, keys: Collection[OffloadKey]) -> None:
        """Remember that blocks are there and cannot be read by this engine."""
        with self._lock:
            self._accounts.report_foreign(keys)

    def drain_evicted(
        self, being_stored: Collection[OffloadKey], is_neighbours: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey] | None:
        """Return the blocks that are gone since the last call and are not back.

        Args:
            being_stored: blocks whose store has not been reported yet; they wait for a later call.
            is_neighbours: whether a neighbour holds a block.
        """
        with self._lock:
            is_ready = self._own.is_ready
            return self._accounts.drain(being_stored, lambda key: is_ready(key) or is_neighbours(key))

    def stats(self) -> dict[str, float]:
        """Return how many slots hold what, and how many blocks were evicted."""
        with self._lock:
            counts: dict[str, float] = {
                "own_packs": len(self._packs),
                "own_blocks": len(self._own),
                "free_slots": len(self._free) + len(self._undropped),
                "failed_slots": len(self._failed),
            }
            return counts | self._accounts.stats()

    # Below, the lock is held.

    def _used_s(self, address: int) -> int:
        used_s: int = self._packs[address >> SLOT_BITS].used_s[address & SLOT_MASK]
        return used_s

    def _touch(self, keys: Collection[OffloadKey], now_s: int) -> None:
        packs, use = self._packs, self._own.use
        for key in keys:
            status = use(key)
            if status is not None:
                packs[status.block_id >> SLOT_BITS].used_s[status.block_id & SLOT_MASK] = now_s
        self._own.policy.touch(keys)

    def _pin(self, key: OffloadKey) -> SlotPin | None:
        status = self._own.use(key)
        if status is None or not status.is_ready:
            return None
        status.ref_cnt += 1
        return SlotPin(key, status)

    def _begin_write(self, key: OffloadKey, address: int) -> SlotPin:
        pin = SlotPin(key, BlockStatus(address))
        self._own.insert(key, pin.status)
        self._packs[address >> SLOT_BITS].keys[address & SLOT_MASK] = key
        self._accounts.add((key,))
        return pin

    def _vacate(self, address: int) -> None:
        """Note that a slot's block has left it; its record is written by the next store."""
        pack = self._packs.get(address >> SLOT_BITS)
        if pack is not None:
            slot = address & SLOT_MASK
            pack.keys[slot] = None
            pack.used_s[slot] = 0
            self._undropped.append(address)

    def _drop_if_over(self, expiry: SlotExpiry, keys: Collection[OffloadKey]) -> None:
        """Drop those of ``keys`` that are over and not in use."""
        for key in keys:
            if not expiry.is_over(key):
                continue
            status = self._own.use(key)
            if status is None or status.ref_cnt:
                continue
            self._own.remove(key, status)
            self._vacate(status.block_id)
            self._accounts.remove((key,), Loss.EXPIRED)

    def _take_slots(
        self, missing: Sequence[OffloadKey], protected: Collection[OffloadKey]
    ) -> tuple[list[int], list[int]]:
        """Return up to as many slots as blocks are missing, and those that have to be dropped before."""
        num = len(missing)
        num_lacking = max(0, num + self._num_ahead - len(self._free) - len(self._undropped))
        victims, num_any = self._evict_beyond(missing, num_lacking, protected)
        # No adopted block is named in the call that needs the room: those have come under the policy.
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
        self._accounts.remove([key for key, _ in victims], Loss.EVICTED)

    def _evict_beyond(
        self, missing: Sequence[OffloadKey], num: int, protected: Collection[OffloadKey]
    ) -> tuple[list[tuple[OffloadKey, BlockStatus]], int]:
        """Evict own blocks of tenants beyond their quotas; return them, and how many of anybody's may go besides."""
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        ranked, num_beyond = self._accounts.rank_beyond(missing)
        for number, excess in ranked:
            num_of = min(num - len(victims), excess)
            if num_of > 0:
                victims += self._own.evict_of(number, num_of, protected)
        return victims, min(num - min(num, num_beyond), num - len(victims))
