"""One namespace of the tier, as jobs carry it along."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.cpu.policies import BlockStatus, CachePolicy
from kvtier.cpu.policies.learning import RequestLearner
from kvtier.namespace import Namespace
from kvtier.tiering.kit.eviction_log import EvictionLog


@dataclass(frozen=True, slots=True, eq=False)
class SlabNamespace:
    """The identity of the blocks of one epoch; compared by identity, a reset opens another one.

    Attributes:
        namespace: the identity of its blocks.
    """

    namespace: Namespace


@dataclass(slots=True)
class Contents:
    """Every slot that can be used, once.

    Attributes:
        slot_of: our blocks, oldest first.
        foreign: slots of other namespaces, oldest first.
        free: slots that hold nothing.
        next_generation: beyond every one that was found.
    """

    slot_of: dict[OffloadKey, int] = field(default_factory=dict)
    foreign: deque[int] = field(default_factory=deque)
    free: deque[int] = field(default_factory=deque)
    next_generation: int = 1


@dataclass(slots=True, eq=False)
class EpochBlocks:
    """An eviction policy and how much it holds. Guarded by whoever has it.

    Attributes:
        policy: holds the blocks and orders them.
        num_held: how many there are.
    """

    policy: CachePolicy
    num_held: int = 0

    def insert(self, key: OffloadKey, status: BlockStatus) -> None:
        """Hold a block that is not held."""
        self.policy.insert(key, status)
        self.num_held += 1

    def remove(self, key: OffloadKey, status: BlockStatus) -> bool:
        """Stop holding a block; False when another one, or none, stands under its key."""
        if self.policy.get(key) is not status:
            return False
        self.policy.remove(key)
        self.num_held -= 1
        return True

    def evict(self, num: int, protected: Collection[OffloadKey] = ()) -> list[tuple[OffloadKey, BlockStatus]]:
        """Stop holding ``num`` blocks, or as many as nobody reads or writes, and return them."""
        if num <= 0:
            return []
        victims = self.policy.evict(num, protected)
        if victims is None:
            victims = []
            while one := self.policy.evict(1, protected):
                victims += one
        self.num_held -= len(victims)
        return victims


class SlotPin(NamedTuple):
    """A slot that is being read or written, and therefore stays as it is.

    Attributes:
        key: its block.
        status: the slot's number and its pins.
        era: the epoch that the block is of.
        generation: of the write; 0 for a read.
    """

    key: OffloadKey
    status: BlockStatus
    era: EpochBlocks
    generation: int = 0

    @property
    def slot(self) -> int:
        """Number of the slot."""
        return self.status.block_id


class SpareSlots:
    """A queue of slots. Guarded by whoever has it.

    Args:
        num_fresh: slots from 0 on that have never held anything.
    """

    def __init__(self, num_fresh: int) -> None:
        self._fresh: Iterator[int] = iter(range(num_fresh))
        self._free: deque[int] = deque()
        self._foreign: deque[int] = deque()
        self._old_eras: deque[EpochBlocks] = deque()
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

    def add_era(self, era: EpochBlocks) -> None:
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


class SlotReservation(NamedTuple):
    """What a store has to do.

    Attributes:
        held: blocks that are there already.
        awaited: blocks that another thread is writing just now.
        holds: slots for the others, as far as there was room.
        oldest_generation: of the writes that have not ended, these included; what is older is whole.
    """

    held: Sequence[OffloadKey]
    awaited: Sequence[OffloadKey]
    holds: Sequence[SlotPin]
    oldest_generation: int


class SlotTable:
    """The books of a slab.

    Mutable is all of it. ``_lock`` guards it; it is held for a few operations per block of a job at most, because
    the scheduler's thread looks keys up under it. ``_changed`` is the same lock, for those who wait for a write.

    Args:
        num_slots: slots of the file.
        make_policy: builds the eviction policy, on its first use and after each reset.
        is_empty: whether no slot holds anything; otherwise there is no room before ``adopt``.
        tells_evicted: whether anybody will ask what was evicted; asked with each eviction.
    """

    def __init__(
        self,
        num_slots: int,
        make_policy: Callable[[], CachePolicy],
        *,
        is_empty: bool,
        tells_evicted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._make_policy = make_policy
        self._space: SlabNamespace | None = None
        self._era: EpochBlocks | None = None
        self._spare = SpareSlots(num_slots if is_empty else 0)
        self._unused: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self._lost_slots: set[int] = set()
        self._next_generation = 1
        self._writing: set[int] = set()
        self._num_evicted = 0
        self._evicted = EvictionLog(tells_evicted)

    def open_space(self, space: SlabNamespace) -> None:
        """Make ``space`` the one whose blocks are found; those of the one before are the first to leave."""
        with self._lock:
            self._space = space
            self._spare.add_foreign(status.block_id for status in self._unused.values())
            self._unused = OrderedDict()
            if self._era is not None and self._era.num_held:
                self._spare.add_era(self._era)
            self._era = None
            self._evicted.clear()

    def require_policy(self) -> None:
        """Build the policy now, to see whether it can be.

        Raises:
            UnknownNameError: nobody registered its name.
        """
        with self._lock:
            self._current_era()

    def adopt(self, space: SlabNamespace, contents: Contents) -> None:
        """Take over what was found at the start.

        Args:
            space: whose blocks were taken for ours.
            contents: what there is; it belongs to the book from now on.
        """
        unused = OrderedDict((key, _ready(slot)) for key, slot in contents.slot_of.items())
        with self._lock:
            self._spare.add_free(contents.free)
            self._spare.add_foreign(contents.foreign)
            self._next_generation = max(self._next_generation, contents.next_generation)
            if space is self._space:
                self._unused = unused
            else:
                self._spare.add_foreign(contents.slot_of.values())

    def is_held(self, space: SlabNamespace, key: OffloadKey) -> bool:
        """Return whether the block is there, whole."""
        with self._lock:
            return space is self._space and self._is_ready(key)

    def touch(self, space: SlabNamespace, keys: Collection[OffloadKey]) -> None:
        """Mark ``keys`` as recently used, the first of them most."""
        with self._lock:
            if space is self._space:
                era = self._current_era()
                for key in keys:
                    self._put_in_use(era, key)
                era.policy.touch(keys)

    def report_to_learner(self, space: SlabNamespace, tell: Callable[[RequestLearner], object]) -> None:
        """Call ``tell`` with the policy if it is one that learns from requests."""
        with self._lock:
            policy = self._current_era().policy if space is self._space else None
            if isinstance(policy, RequestLearner):
                tell(policy)

    def begin_store(self, space: SlabNamespace, keys: Sequence[OffloadKey]) -> SlotReservation:
        """Find out which of ``keys`` have to be written, and pin slots for them; evicts where it must.

        Args:
            space: when it is not the current one, nothing is stored in it any more.
            keys: each once.
        """
        with self._lock:
            if space is not self._space:
                return SlotReservation((), (), (), self._next_generation)
            era = self._current_era()
            held: list[OffloadKey] = []
            awaited: list[OffloadKey] = []
            missing: list[OffloadKey] = []
            for key in keys:
                self._put_in_use(era, key)
                status = era.policy.get(key)
                group = missing if status is None else held if status.is_ready else awaited
                group.append(key)
            if held:
                era.policy.touch(held)
            slots = self._take_slots(era, len(missing), frozenset(keys))
            holds = [self._begin_write(era, key, slot) for key, slot in zip(missing, slots, strict=False)]
            oldest = min(self._writing, default=self._next_generation)
            return SlotReservation(held, awaited, holds, oldest)

    def end_store(self, holds: Iterable[SlotPin], written: Collection[OffloadKey]) -> None:
        """Unpin slots after writing; those not in ``written`` hold nothing."""
        with self._lock:
            for hold in holds:
                self._writing.discard(hold.generation)
                hold.status.ref_cnt = 0
                if hold.key not in written and hold.era.remove(hold.key, hold.status):
                    self._spare.add_failed(hold.slot)
            self._changed.notify_all()

    def wait_written(
        self, space: SlabNamespace, keys: Collection[OffloadKey], timeout_s: float
    ) -> list[OffloadKey]:
        """Block until nobody writes ``keys`` any more, and return those that are there then."""
        with self._lock:
            self._changed.wait_for(lambda: not any(_is_in_flight(self._era, key) for key in keys), timeout_s)
            return [key for key in keys if space is self._space and self._is_ready(key)]

    def begin_load(self, space: SlabNamespace, keys: Sequence[OffloadKey]) -> list[SlotPin | None]:
        """Pin the slots of ``keys``, each as often as it is named; None for those that are not there."""
        with self._lock:
            if space is not self._space:
                return [None] * len(keys)
            era = self._current_era()
            return [self._pin(era, key) for key in keys]

    def end_load(self, holds: Iterable[SlotPin], lost: Collection[OffloadKey]) -> None:
        """Unpin slots after reading; the blocks in ``lost`` are not there any more."""
        with self._lock:
            for hold in holds:
                hold.status.ref_cnt -= 1
                if hold.key in lost and hold.era.remove(hold.key, hold.status):
                    self._lost_slots.add(hold.slot)
                    if hold.era is self._era:
                        self._evicted.add(hold.key)
                if hold.status.ref_cnt == 0 and hold.slot in self._lost_slots:
                    self._lost_slots.remove(hold.slot)
                    self._spare.add_free((hold.slot,))

    def drain_evicted(self, being_stored: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return blocks of the current space that have left and are not back since the last call, damaged ones too.

        Args:
            being_stored: blocks that wait for a later call, whose store nobody has heard of yet.
        """
        with self._lock:
            return self._evicted.take(being_stored, self._is_ready)

    def stats(self) -> dict[str, float]:
        """Return how many slots hold what, and how many blocks were evicted."""
        with self._lock:
            num_used = self._era.num_held if self._era is not None else 0
            own = {"indexed_blocks": num_used + len(self._unused), "evicted_blocks": self._num_evicted}
            return own | self._spare.stats()

    def _current_era(self) -> EpochBlocks:
        if self._era is None:
            self._era = EpochBlocks(self._make_policy())
        return self._era

    def _is_ready(self, key: OffloadKey) -> bool:
        if key in self._unused:
            return True
        status = self._era.policy.get(key) if self._era is not None else None
        return status is not None and status.is_ready

    def _put_in_use(self, era: EpochBlocks, key: OffloadKey) -> None:
        status = self._unused.pop(key, None)
        if status is not None:
            era.insert(key, status)

    def _begin_write(self, era: EpochBlocks, key: OffloadKey, slot: int) -> SlotPin:
        hold = SlotPin(key, BlockStatus(slot), era, self._next_generation)
        self._next_generation += 1
        self._writing.add(hold.generation)
        era.insert(key, hold.status)
        return hold

    def _pin(self, era: EpochBlocks, key: OffloadKey) -> SlotPin | None:
        self._put_in_use(era, key)
        status = era.policy.get(key)
        if status is None or not status.is_ready:
            return None
        status.ref_cnt += 1
        return SlotPin(key, status, era)

    def _take_slots(self, era: EpochBlocks, num: int, protected: Collection[OffloadKey]) -> list[int]:
        """Return up to ``num`` slots that hold nothing any more, from where it costs least."""
        slots: list[int] = []
        while len(slots) < num and (slot := self._spare.take()) is not None:
            slots.append(slot)
        # None of the unused is named in the call that needs the room: those have come under the policy.
        victims: list[tuple[OffloadKey, BlockStatus]] = []
        while len(slots) + len(victims) < num and self._unused:
            victims.append(self._unused.popitem(last=False))
        victims += era.evict(num - len(slots) - len(victims), protected)
        for key, status in victims:
            slots.append(status.block_id)
            self._evicted.add(key)
        self._num_evicted += len(victims)
        while len(slots) < num and (slot := self._spare.take_failed()) is not None:
            slots.append(slot)
        return slots


def _is_in_flight(era: EpochBlocks | None, key: OffloadKey) -> bool:
    status = era.policy.get(key) if era is not None else None
    return status is not None and not status.is_ready


def _ready(slot: int) -> BlockStatus:
    status = BlockStatus(slot)
    status.ref_cnt = 0
    return status
