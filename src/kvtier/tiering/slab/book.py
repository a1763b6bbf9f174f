"""Which block is in which slot, who is next to leave, and which slots somebody reads or writes.

It moves no byte. Room for a block is taken from where it costs least: a slot that holds nothing, a slot of another
namespace or epoch (oldest first), a block of ours that nobody has used since the start (oldest first), then whatever
the eviction policy gives, and last of all a slot that could not be written. A block from before the start comes
under the policy with its first use: the slab knows in what order blocks were written, not how they were used.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.cpu.policies import BlockStatus, CachePolicy
from kvtier.cpu.policies.learning import RequestLearner
from kvtier.tiering.evicted import EvictedKeys
from kvtier.tiering.slab.contents import Contents
from kvtier.tiering.slab.era import Era, Hold
from kvtier.tiering.slab.space import Space
from kvtier.tiering.slab.spare import SpareSlots


class StorePlan(NamedTuple):
    """What a store has to do.

    Attributes:
        held: blocks that are there already.
        awaited: blocks that another thread is writing just now.
        holds: slots for the others, as far as there was room.
        oldest_generation: of the writes that have not ended, these included; what is older is whole.
    """

    held: Sequence[OffloadKey]
    awaited: Sequence[OffloadKey]
    holds: Sequence[Hold]
    oldest_generation: int


class SlotBook:
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
        self._space: Space | None = None
        self._era: Era | None = None
        self._spare = SpareSlots(num_slots if is_empty else 0)
        self._unused: OrderedDict[OffloadKey, BlockStatus] = OrderedDict()
        self._lost_slots: set[int] = set()
        self._next_generation = 1
        self._writing: set[int] = set()
        self._num_evicted = 0
        self._evicted = EvictedKeys(tells_evicted)

    def open_space(self, space: Space) -> None:
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

    def adopt(self, space: Space, contents: Contents) -> None:
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

    def is_held(self, space: Space, key: OffloadKey) -> bool:
        """Return whether the block is there, whole."""
        with self._lock:
            return space is self._space and self._is_ready(key)

    def touch(self, space: Space, keys: Collection[OffloadKey]) -> None:
        """Mark ``keys`` as recently used, the first of them most."""
        with self._lock:
            if space is self._space:
                era = self._current_era()
                for key in keys:
                    self._put_in_use(era, key)
                era.policy.touch(keys)

    def tell_learner(self, space: Space, tell: Callable[[RequestLearner], object]) -> None:
        """Call ``tell`` with the policy if it is one that learns from requests."""
        with self._lock:
            policy = self._current_era().policy if space is self._space else None
            if isinstance(policy, RequestLearner):
                tell(policy)

    def begin_store(self, space: Space, keys: Sequence[OffloadKey]) -> StorePlan:
        """Find out which of ``keys`` have to be written, and pin slots for them; evicts where it must.

        Args:
            space: when it is not the current one, nothing is stored in it any more.
            keys: each once.
        """
        with self._lock:
            if space is not self._space:
                return StorePlan((), (), (), self._next_generation)
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
            return StorePlan(held, awaited, holds, oldest)

    def end_store(self, holds: Iterable[Hold], written: Collection[OffloadKey]) -> None:
        """Unpin slots after writing; those not in ``written`` hold nothing."""
        with self._lock:
            for hold in holds:
                self._writing.discard(hold.generation)
                hold.status.ref_cnt = 0
                if hold.key not in written and hold.era.remove(hold.key, hold.status):
                    self._spare.add_failed(hold.slot)
            self._changed.notify_all()

    def wait_written(self, space: Space, keys: Collection[OffloadKey], timeout_s: float) -> list[OffloadKey]:
        """Block until nobody writes ``keys`` any more, and return those that are there then."""
        with self._lock:
            self._changed.wait_for(lambda: not any(_is_in_flight(self._era, key) for key in keys), timeout_s)
            return [key for key in keys if space is self._space and self._is_ready(key)]

    def begin_load(self, space: Space, keys: Sequence[OffloadKey]) -> list[Hold | None]:
        """Pin the slots of ``keys``, each as often as it is named; None for those that are not there."""
        with self._lock:
            if space is not self._space:
                return [None] * len(keys)
            era = self._current_era()
            return [self._pin(era, key) for key in keys]

    def end_load(self, holds: Iterable[Hold], lost: Collection[OffloadKey]) -> None:
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

    def take_evicted(self, being_stored: Collection[OffloadKey]) -> list[OffloadKey]:
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

    def _current_era(self) -> Era:
        if self._era is None:
            self._era = Era(self._make_policy())
        return self._era

    def _is_ready(self, key: OffloadKey) -> bool:
        if key in self._unused:
            return True
        status = self._era.policy.get(key) if self._era is not None else None
        return status is not None and status.is_ready

    def _put_in_use(self, era: Era, key: OffloadKey) -> None:
        status = self._unused.pop(key, None)
        if status is not None:
            era.insert(key, status)

    def _begin_write(self, era: Era, key: OffloadKey, slot: int) -> Hold:
        hold = Hold(key, BlockStatus(slot), era, self._next_generation)
        self._next_generation += 1
        self._writing.add(hold.generation)
        era.insert(key, hold.status)
        return hold

    def _pin(self, era: Era, key: OffloadKey) -> Hold | None:
        self._put_in_use(era, key)
        status = era.policy.get(key)
        if status is None or not status.is_ready:
            return None
        status.ref_cnt += 1
        return Hold(key, status, era)

    def _take_slots(self, era: Era, num: int, protected: Collection[OffloadKey]) -> list[int]:
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


def _is_in_flight(era: Era | None, key: OffloadKey) -> bool:
    status = era.policy.get(key) if era is not None else None
    return status is not None and not status.is_ready


def _ready(slot: int) -> BlockStatus:
    status = BlockStatus(slot)
    status.ref_cnt = 0
    return status
