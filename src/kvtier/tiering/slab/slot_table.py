"""Which slot of a slab holds which block, and which slot the next block gets.

A slot is free, or holds a whole block, or is pinned: by readers, or by the one writer that fills it. Blocks of the
present epoch are ordered by an eviction policy; those of earlier epochs and of other namespaces leave first. Blocks
that were found at the start wait outside the policy until their first use, because the policy would take them for
recent ones.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.base import OffloadKey, get_offload_tenant
from kvtier.cpu.policies import BlockStatus, CachePolicy
from kvtier.departed import DepartedBlocks, Loss
from kvtier.namespace import Namespace
from kvtier.tenants import OtherKeys
from kvtier.tiering.kit.block_format import BlockFormat, format_of
from kvtier.tiering.kit.eviction_log import EvictionLog
from kvtier.tiering.kit.tenant_counts import TenantCounts
from kvtier.tiering.slab.expiry import NO_TIME, SlotExpiry
from kvtier.tiering.slab.reusable_slots import EpochBlocks, ReusableSlots


@dataclass(frozen=True, slots=True, eq=False)
class SlabNamespace:
    """The identity of the blocks of one epoch; compared by identity, a reset opens another one.

    Attributes:
        identity: what makes its blocks its own: model, layout, epoch.
        format: how they are written.
    """

    identity: Namespace
    format: BlockFormat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_of(self.identity))


@dataclass(slots=True)
class Contents:
    """Every slot that can be used, once.

    Attributes:
        slot_of: our blocks, oldest first.
        foreign: slots of other namespaces, oldest first.
        foreign_keys: blocks of other namespaces, by name.
        free: slots that hold nothing.
        next_generation: beyond every one that was found.
        stored_s: time of the store of each of our blocks.
    """

    slot_of: dict[OffloadKey, int] = field(default_factory=dict)
    foreign: deque[int] = field(default_factory=deque)
    foreign_keys: dict[str, list[OffloadKey]] = field(default_factory=dict)
    free: deque[int] = field(default_factory=deque)
    next_generation: int = 1
    stored_s: dict[OffloadKey, float] = field(default_factory=dict)


class SlotPin(NamedTuple):
    """A slot that is being read or written, and therefore stays as it is.

    Attributes:
        key: its block.
        status: the slot's number and its pins.
        epoch: the epoch that the block is of.
        generation: of the write; 0 for a read.
    """

    key: OffloadKey
    status: BlockStatus
    epoch: EpochBlocks
    generation: int = 0

    @property
    def slot(self) -> int:
        """Number of the slot."""
        return self.status.block_id


class SlotReservation(NamedTuple):
    """What a store has to do.

    Attributes:
        held: blocks that are there already.
        awaited: blocks that another thread is writing just now.
        pins: slots for the others, as far as there was room.
        oldest_generation: of the writes that have not ended, these included; what is older is whole.
    """

    held: Sequence[OffloadKey]
    awaited: Sequence[OffloadKey]
    pins: Sequence[SlotPin]
    oldest_generation: int


class SlotTable:
    """The slots of a slab: who reads and writes which, and what they hold.

    Mutable is all of it. ``_lock`` guards it; it is held for a few operations per block of a job at most, because
    the scheduler's thread looks keys up under it. ``_changed`` is the same lock, for waiting until a write ends.

    Args:
        num_slots: slots of the file.
        make_policy: builds the eviction policy, now and after each reset.
        is_empty: whether no slot holds anything; otherwise there is no room before ``adopt``.
        emit_events: whether evictions are recorded for ``drain_evicted``.
        losses: remembers why blocks are gone.
        expiry: which blocks are over; None: none ever is.
        tenant_counts: counts the present epoch's blocks by tenant; None where there are no tenants.
    """

    def __init__(
        self,
        num_slots: int,
        make_policy: Callable[[], CachePolicy],
        *,
        is_empty: bool,
        emit_events: bool = False,
        losses: DepartedBlocks | None = None,
        expiry: SlotExpiry | None = None,
        tenant_counts: TenantCounts | None = None,
    ) -> None:
        self._tenant_counts = tenant_counts
        self._expiry = expiry
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._make_policy = make_policy
        self._namespace: SlabNamespace | None = None
        self._epoch = EpochBlocks(make_policy())
        self._reusable = ReusableSlots(num_slots if is_empty else 0)
        self._unused: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        # Keys of the unused by tenant, some of them used since: only where tenants have quotas.
        self._unused_of: dict[int, deque[OffloadKey]] = {}
        self._lost_slots: set[int] = set()
        self._next_generation = 1
        self._writing: set[int] = set()
        self._num_evicted = self._num_expired = 0
        self._evicted = EvictionLog() if emit_events else None
        self._losses = losses

    def open_namespace(self, namespace: SlabNamespace) -> None:
        """Make ``namespace`` the one whose blocks are found; those of the one before are the first to leave."""
        with self._lock:
            self._namespace = namespace
            self._reusable.add_foreign(status.block_id for status in self._unused.values())
            self._unused = OrderedDict()
            self._unused_of = {}
            if self._epoch.num_blocks:
                self._reusable.add_epoch(self._epoch)
                self._epoch = EpochBlocks(self._make_policy())
            if self._evicted is not None:
                self._evicted.clear()
            if self._expiry is not None:
                self._expiry.clear()
            if self._tenant_counts is not None:
                self._tenant_counts.clear()

    def adopt(self, namespace: SlabNamespace, contents: Contents) -> None:
        """Take over what was found at the start.

        Args:
            namespace: whose blocks were taken for ours.
            contents: what there is; it belongs to the table from now on.
        """
        unused = OrderedDict((key, _ready(slot)) for key, slot in contents.slot_of.items())
        with self._lock:
            self._reusable.add_free(contents.free)
            self._reusable.add_foreign(contents.foreign)
            self._next_generation = max(self._next_generation, contents.next_generation)
            if namespace is self._namespace:
                self._unused = unused
                if self._tenant_counts is not None:
                    self._tenant_counts.add(unused)
                    if self._tenant_counts.has_quotas:
                        for key in unused:
                            self._unused_of.setdefault(get_offload_tenant(key), deque()).append(key)
                self._adopt_times(contents)
            else:
                self._reusable.add_foreign(contents.slot_of.values())

    def is_held(self, namespace: SlabNamespace, key: OffloadKey) -> bool:
        """Return whether the block is there, whole."""
        with self._lock:
            if self._expiry is not None and namespace is self._namespace:
                self._drop_if_over(self._expiry, (key,))
            return namespace is self._namespace and self._is_ready(key)

    def touch(self, namespace: SlabNamespace, keys: Collection[OffloadKey]) -> None:
        """Mark ``keys`` as recently used, the first of them most."""
        with self._lock:
            if namespace is self._namespace:
                epoch = self._epoch
                for key in keys:
                    self._put_in_use(epoch, key)
                epoch.policy.touch(keys)

    def report(self, namespace: SlabNamespace, report: Callable[[CachePolicy], object]) -> None:
        """Call ``report`` with the policy, unless the namespace is another by now."""
        with self._lock:
            if namespace is self._namespace:
                report(self._epoch.policy)

    def prepare_store(self, namespace: SlabNamespace, keys: Sequence[OffloadKey]) -> SlotReservation:
        """Decide which of ``keys`` have to be written, and pin slots for them; evicts where it must.

        Args:
            namespace: when it is not the current one, nothing is stored in it any more.
            keys: each once.
        """
        with self._lock:
            if namespace is not self._namespace:
                return SlotReservation((), (), (), self._next_generation)
            epoch = self._epoch
            if self._expiry is not None:
                self._drop_if_over(self._expiry, (*keys, *self._expiry.list_oldest_over()))
            held: list[OffloadKey] = []
            awaited: list[OffloadKey] = []
            missing: list[OffloadKey] = []
            for key in keys:
                self._put_in_use(epoch, key)
                status = epoch.policy.get(key)
                group = missing if status is None else held if status.is_ready else awaited
                group.append(key)
            if held:
                epoch.policy.touch(held)
            slots = self._take_slots(epoch, missing, frozenset(keys))
            pins = [self._begin_write(epoch, key, slot) for key, slot in zip(missing, slots, strict=False)]
            oldest = min(self._writing, default=self._next_generation)
            return SlotReservation(held, awaited, pins, oldest)

    def complete_store(
        self, pins: Iterable[SlotPin], written: Collection[OffloadKey], stored_s: float = NO_TIME
    ) -> None:
        """Unpin slots after writing; those not in ``written`` hold nothing.

        Args:
            pins: the slots.
            written: the blocks that are whole.
            stored_s: what the headers say of the time of the store, where blocks have a time to live.
        """
        with self._lock:
            for pin in pins:
                self._writing.discard(pin.generation)
                pin.status.ref_cnt = 0
                if pin.key not in written and pin.epoch.remove(pin.key, pin.status):
                    self._reusable.add_failed(pin.slot)
                    self._uncount((pin.key,), pin.epoch)
                elif self._expiry is not None and pin.epoch is self._epoch:
                    self._expiry.record(pin.key, stored_s)
            self._changed.notify_all()

    def wait_written(
        self, namespace: SlabNamespace, keys: Collection[OffloadKey], timeout_s: float
    ) -> list[OffloadKey]:
        """Block until the writes of ``keys`` have ended, and return those that are held then."""
        with self._lock:
            self._changed.wait_for(
                lambda: not any(_is_in_flight(self._epoch, key) for key in keys), timeout_s
            )
            return [key for key in keys if namespace is self._namespace and self._is_ready(key)]

    def prepare_load(self, namespace: SlabNamespace, keys: Sequence[OffloadKey]) -> list[SlotPin | None]:
        """Pin the slots of ``keys``, each as often as it is named; None for those that are not there."""
        with self._lock:
            if namespace is not self._namespace:
                return [None] * len(keys)
            epoch = self._epoch
            if self._expiry is not None:
                self._drop_if_over(self._expiry, keys)
            return [self._pin(epoch, key) for key in keys]

    def complete_load(self, pins: Iterable[SlotPin], lost: Collection[OffloadKey]) -> None:
        """Unpin slots after reading; the blocks in ``lost`` are not there any more."""
        with self._lock:
            for pin in pins:
                pin.status.ref_cnt -= 1
                if pin.key in lost and pin.epoch.remove(pin.key, pin.status):
                    self._lost_slots.add(pin.slot)
                    self._uncount((pin.key,), pin.epoch)
                    if self._losses is not None and pin.epoch is self._epoch:
                        self._losses.report((pin.key,), Loss.DAMAGED)
                    if self._evicted is not None and pin.epoch is self._epoch:
                        self._evicted.add(pin.key)
                if pin.status.ref_cnt == 0 and pin.slot in self._lost_slots:
                    self._lost_slots.remove(pin.slot)
                    self._reusable.add_free((pin.slot,))

    def take_blocks(self, namespace_name: str, num: int, tenant: int | None = None) -> list[int]:
        """Forget up to ``num`` blocks that are not pinned, and return their slots, which ``give_back`` makes free.

        Args:
            namespace_name: whose blocks are to go; none when it is not the current one.
            num: how many; without a meaning for one tenant.
            tenant: number of the tenant whose blocks are to go, all at once, because each call visits those of others;
                None: anybody's.
        """
        with self._lock:
            if self._namespace is None or self._namespace.identity.name != namespace_name:
                return []
            if tenant is None:
                victims = [self._unused.popitem(last=False) for _ in range(min(num, len(self._unused)))]
                victims += self._epoch.evict(num - len(victims))
            else:
                unused = [key for key in self._unused if get_offload_tenant(key) == tenant]
                victims = [(key, self._unused.pop(key)) for key in unused]
                num_held = 0 if self._tenant_counts is None else self._tenant_counts.num_blocks[tenant]
                victims += self._epoch.evict(num_held - len(victims), OtherKeys(tenant, ((), ())))
            keys = [key for key, _ in victims]
            if self._evicted is not None:
                for key in keys:
                    self._evicted.add(key)
            if self._expiry is not None:
                for key in keys:
                    self._expiry.forget(key)
            self._uncount(keys, self._epoch)
            if self._losses is not None:
                self._losses.report(keys, Loss.PURGED)
            return [status.block_id for _, status in victims]

    def give_back(self, erased: Iterable[int], failed: Iterable[int]) -> None:
        """Make slots of ``take_blocks`` usable again: those that hold nothing, and those that still may."""
        with self._lock:
            self._reusable.add_free(erased)
            for slot in failed:
                self._reusable.add_failed(slot)

    def drain_evicted(self, being_stored: Collection[OffloadKey]) -> list[OffloadKey] | None:
        """Return the blocks that were evicted or found damaged since the last call and are not back.

        Args:
            being_stored: blocks whose store has not been reported yet; they wait for a later call.
        """
        with self._lock:
            if self._evicted is None:
                return []
            return self._evicted.take(being_stored, self._is_ready)

    def stats(self) -> dict[str, float]:
        """Return how many slots hold what, and how many blocks were evicted."""
        with self._lock:
            own: dict[str, float] = {
                "indexed_blocks": self._epoch.num_blocks + len(self._unused),
                "evicted_blocks": self._num_evicted,
            }
            if self._expiry is not None:
                own["expired_blocks"] = self._num_expired
            if self._tenant_counts is not None:
                own |= self._tenant_counts.stats()
            return own | self._reusable.stats()

    def _is_ready(self, key: OffloadKey) -> bool:
        if key in self._unused:
            return True
        status = self._epoch.policy.get(key)
        return status is not None and status.is_ready

    def _put_in_use(self, epoch: EpochBlocks, key: OffloadKey) -> None:
        status = self._unused.pop(key, None)
        if status is not None:
            epoch.insert(key, status)

    def _adopt_times(self, contents: Contents) -> None:
        expiry = self._expiry
        if expiry is not None:
            for key, stored_s in contents.stored_s.items():
                expiry.record(key, stored_s)
            self._drop_if_over(expiry, tuple(contents.stored_s))

    def _drop_if_over(self, expiry: SlotExpiry, keys: Collection[OffloadKey]) -> None:
        """Drop those of ``keys`` that are over and not in use; their slots hold nothing then."""
        for key in keys:
            if not expiry.is_over(key):
                continue
            self._put_in_use(self._epoch, key)
            status = self._epoch.policy.get(key)
            if status is None or status.ref_cnt:
                continue
            expiry.forget(key)
            self._epoch.remove(key, status)
            self._uncount((key,), self._epoch)
            self._reusable.add_free((status.block_id,))
            self._num_expired += 1
            if self._losses is not None:
                self._losses.report((key,), Loss.EXPIRED)
            if self._evicted is not None:
                self._evicted.add(key)

    def _begin_write(self, epoch: EpochBlocks, key: OffloadKey, slot: int) -> SlotPin:
        pin = SlotPin(key, BlockStatus(slot), epoch, self._next_generation)
        self._next_generation += 1
        self._writing.add(pin.generation)
        epoch.insert(key, pin.status)
        if self._tenant_counts is not None:
            self._tenant_counts.add((key,))
        return pin

    def _uncount(self, keys: Collection[OffloadKey], epoch: EpochBlocks) -> None:
        if self._tenant_counts is not None and epoch is self._epoch:
            self._tenant_counts.remove(keys)

    def _pin(self, epoch: EpochBlocks, key: OffloadKey) -> SlotPin | None:
        self._put_in_use(epoch, key)
        status = epoch.policy.get(key)
        if status is None or not status.is_ready:
            return None
        status.ref_cnt += 1
        return SlotPin(key, status, epoch)

    def _take_slots(
        self, epoch: EpochBlocks, missing: Sequence[OffloadKey], protected: Collection[OffloadKey]
    ) -> list[int]:
        """Return up to as many slots as blocks are missing, which hold nothing any more, from where it costs least."""
        slots: list[int] = []
        num = len(missing)
        while len(slots) < num and (slot := self._reusable.take()) is not None:
            slots.append(slot)
        victims, num_any = self._evict_beyond(epoch, missing, num - len(slots), protected)
        # None of the unused is named in the call that needs the room: those have come under the policy.
        while num_any and self._unused:
            victims.append(self._unused.popitem(last=False))
            num_any -= 1
        victims += epoch.evict(num_any, protected)
        for key, status in victims:
            slots.append(status.block_id)
            if self._evicted is not None:
                self._evicted.add(key)
            if self._expiry is not None:
                self._expiry.forget(key)
        self._uncount([key for key, _ in victims], epoch)
        self._num_evicted += len(victims)
        if self._losses is not None:
            self._losses.report([key for key, _ in victims], Loss.EVICTED)
        while len(slots) < num and (slot := self._reusable.take_failed()) is not None:
            slots.append(slot)
        return slots

    def _evict_beyond(
        self,
        epoch: EpochBlocks,
        missing: Sequence[OffloadKey],
        num: int,
        protected: Collection[OffloadKey],
    ) -> tuple[list[tuple[OffloadKey, BlockStatus]], int]:
        """Evict blocks of tenants beyond their quotas; return them, and how many of anybody's may go besides.

        Args:
            epoch: the present one.
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
                victims += self._evict_of(number, epoch, num_of, protected)
        return victims, min(num - min(num, num_beyond), num - len(victims))

    def _evict_of(
        self, number: int, epoch: EpochBlocks, num: int, protected: Collection[OffloadKey]
    ) -> list[tuple[OffloadKey, BlockStatus]]:
        """Evict up to ``num`` blocks of one tenant, those found at the start first."""
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        unused = self._unused_of.get(number, ())
        while unused and len(victims) < num:
            key = unused.popleft()
            if (status := self._unused.pop(key, None)) is not None:
                victims.append((key, status))
        return victims + epoch.evict(num - len(victims), OtherKeys(number, (protected, ())))


def _is_in_flight(epoch: EpochBlocks, key: OffloadKey) -> bool:
    status = epoch.policy.get(key)
    return status is not None and not status.is_ready


def _ready(slot: int) -> BlockStatus:
    status = BlockStatus(slot)
    status.ref_cnt = 0
    return status
