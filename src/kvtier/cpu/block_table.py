"""The blocks of the primary tier: their slots, their pins, and the slots that a reset left in use.

The policy keeps the held blocks by key; the table counts their states. A block's ``ref_cnt`` goes from IN_FLIGHT (its
write is under way) to 0 (idle, may be evicted) to n (pinned n times) and back to 0. A slot is fresh, taken, freed, or
orphaned: a reset forgets its block while a transfer still uses it. Slot numbers are deterministic, fresh ones ascending
from 0, then freed ones, last freed first, so that a run can be replayed and a lightly used tier touches few pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from kvtier.base import OffloadKey, overrides
from kvtier.cpu.orphaned_slots import OrphanedSlots
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus, CachePolicy, clear_policy
from kvtier.errors import BlockNotReadyError, ConfigError, InvariantError


class BlockListener(ABC):
    """Optional: follow which blocks are held. The table calls it on its own thread; ``keys`` are distinct."""

    def on_held(self, keys: Collection[OffloadKey]) -> None:
        """Handle that ``keys`` have got slots; their writes are in flight."""

    def on_ready(self, keys: Collection[OffloadKey]) -> None:
        """Handle that the writes of ``keys`` have ended well."""

    @abstractmethod
    def on_gone(self, keys: Collection[OffloadKey]) -> None:
        """Handle that ``keys`` are no longer held."""

    @abstractmethod
    def on_cleared(self) -> None:
        """Handle that nothing is held any more."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by dotted name. Thread: any."""
        return {}

    @abstractmethod
    def check(self, held: Mapping[OffloadKey, BlockStatus]) -> None:
        """Raise InvariantError when what was reported is not ``held``."""


class SlotAllocator:
    """A counter of fresh slots, a stack of freed ones, and for each slot its block and the key that took it last.

    All blocks are made at construction. Making a million of them one by one, as slots are taken, triggers full passes
    of the garbage collector again and again, which halves the rate of stores. Blocks made at the start can also be
    excluded from collection by an engine that calls ``gc.freeze()``.

    Args:
        num_slots: slots of the primary tier.

    Attributes:
        num_free: slots that can be taken now.
        high_water_mark: slots that have ever been taken; they are numbered 0 to ``high_water_mark - 1``.
        freed: slots that were taken and given back, in the order of giving.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self.high_water_mark = 0
        self.freed: list[int] = []
        self._num_slots = num_slots
        self._blocks = [BlockStatus(slot) for slot in range(num_slots)]
        # A stale entry is harmless: its block is gone or names another slot. Clearing it would slow eviction.
        self._last_keys: list[OffloadKey | None] = [None] * num_slots

    def take(self, keys: Collection[OffloadKey]) -> tuple[list[int], list[BlockStatus]]:
        """Take a slot for each of ``keys``; the caller ensures that so many are free.

        Returns:
            The slots and their blocks, in flight, in the order of ``keys``.
        """
        self.num_free -= len(keys)
        start = self.high_water_mark
        end = self.high_water_mark = min(start + len(keys), self._num_slots)
        # The block of a slot that was never taken is in flight from the beginning.
        slots, taken = list(range(start, end)), self._blocks[start:end]
        self._last_keys[start:end] = islice(keys, end - start)
        num_reused = len(keys) - len(slots)
        if num_reused:
            reused = self.freed[: -num_reused - 1 : -1]
            del self.freed[-num_reused:]
            last_keys, blocks = self._last_keys, self._blocks
            for key, slot in zip(islice(keys, end - start, None), reused, strict=True):
                last_keys[slot] = key
                block = blocks[slot]
                block.ref_cnt = IN_FLIGHT
                taken.append(block)
            slots += reused
        return slots, taken

    def take_one(self, key: OffloadKey) -> BlockStatus:
        """Take a slot for ``key``, as ``take`` does, and return its block."""
        self.num_free -= 1
        if self.high_water_mark < self._num_slots:
            slot = self.high_water_mark
            self.high_water_mark += 1
        else:
            slot = self.freed.pop()
        self._last_keys[slot] = key
        block = self._blocks[slot]
        block.ref_cnt = IN_FLIGHT
        return block

    def give_back(self, slots: Sequence[int]) -> None:
        """Free ``slots``; the last of them is taken first."""
        self.num_free += len(slots)
        self.freed += slots

    def held_blocks(
        self, get_block: Callable[[OffloadKey], BlockStatus | None]
    ) -> dict[OffloadKey, BlockStatus]:
        """Return every block that a slot's last key still holds, in the order of slots. Pure; visits each slot."""
        held: dict[OffloadKey, BlockStatus] = {}
        for slot, key in enumerate(self._last_keys[: self.high_water_mark]):
            block = None if key is None else get_block(key)
            if key is not None and block is not None and block.block_id == slot:
                held[key] = block
        return held


class BlockTable:
    """Blocks, their slots and their pins.

    A hold is a pin that may precede the block: it takes effect when the block's write ends.

    Args:
        num_blocks: slots of the primary tier.
        policy: the order in which blocks leave; it is empty.

    Attributes:
        num_blocks: the same.
        policy: the same.
        get_block: returns the held block under a key, or None; no use of it is counted.
        slots: which slots are free.
        orphans: slots in use by transfers of before a reset.
        holds: how often each key is held, whether its block is ready or not.
        listeners: who follows which blocks are held.
        num_evictable: INVARIANT: held blocks with ref_cnt 0.
        num_in_flight: INVARIANT: held blocks with ref_cnt IN_FLIGHT.

    Raises:
        ConfigError: ``num_blocks`` is below one.
    """

    def __init__(self, num_blocks: int, policy: CachePolicy) -> None:
        if num_blocks < 1:
            remedy = "the primary tier holds at least one block: give it more bytes or use smaller blocks"
            raise ConfigError("num_blocks", num_blocks, remedy)
        self.num_blocks = num_blocks
        self.policy = policy
        self.get_block = policy.getter()
        self._reports_idle = overrides(policy.on_idle, CachePolicy.on_idle)
        policy.expect_idle()
        self.slots = SlotAllocator(num_blocks)
        self.orphans = OrphanedSlots(self.slots.give_back)
        self.holds: dict[OffloadKey, int] = {}
        self.listeners: tuple[BlockListener, ...] = ()
        self.num_evictable = 0
        self.num_in_flight = 0

    @property
    def num_held(self) -> int:
        """Blocks that are held, in flight or ready."""
        return self.num_blocks - self.slots.num_free - len(self.orphans.by_slot)

    def is_ready(self, key: OffloadKey) -> bool:
        """Return whether ``key`` can be read now; unlike lookup this is no access. Pure."""
        block = self.get_block(key)
        return block is not None and block.ref_cnt >= 0

    def ready_among(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return those of ``keys`` that can be read now, in order; unlike lookup this is no access. Pure."""
        blocks = map(self.get_block, keys)
        return [
            key for key, block in zip(keys, blocks, strict=True) if block is not None and block.ref_cnt >= 0
        ]

    def held_among(self, keys: Collection[OffloadKey]) -> tuple[OffloadKey, ...]:
        """Return those of ``keys`` that are held, ready or in flight. Pure."""
        return tuple(key for key in keys if self.get_block(key) is not None)

    def absent_among(self, keys: Collection[OffloadKey], but: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return those of ``keys`` that are not held, ``but`` left out, in order. Pure."""
        left_out = frozenset(but)
        return [key for key in keys if key not in left_out and self.get_block(key) is None]

    def is_in_flight(self, key: OffloadKey) -> bool:
        """Return whether a write of ``key`` is in flight. Pure."""
        block = self.get_block(key)
        return block is not None and block.ref_cnt < 0

    def pin_ready(self, keys: Collection[OffloadKey]) -> list[int]:
        """Pin each of ``keys`` once, also those named twice; return their slots, in the same order.

        Raises:
            BlockNotReadyError: a key is absent or in flight; nothing is pinned.
        """
        blocks = list(map(self.get_block, keys))
        num_idle = 0
        # One pass checks and pins: a pass that only checks would be a second one. A bad key undoes the pins before it.
        for block in blocks:
            if block is None or (num_pins := block.ref_cnt) < 0:
                raise self._refuse_pins(keys, blocks)
            if num_pins:
                block.ref_cnt = num_pins + 1
            else:
                block.ref_cnt = 1
                num_idle += 1
        slots = [block.block_id for block in blocks if block is not None]
        if len(set(slots)) < len(slots):
            _take_back_pins(_repeated(blocks))
        self.num_evictable -= num_idle
        return slots

    def unpin_each(self, keys: Iterable[OffloadKey]) -> None:
        """Unpin each of ``keys`` once, however often they name it; those that are not pinned are ignored."""
        distinct = dict.fromkeys(keys)
        num_idle = 0
        for block in map(self.get_block, distinct):
            if block is None:
                continue
            num_pins = block.ref_cnt
            if num_pins == 1:
                block.ref_cnt = 0
                num_idle += 1
            elif num_pins > 1:
                block.ref_cnt = num_pins - 1
        self._count_idle(num_idle, distinct)

    def pin(self, key: OffloadKey) -> bool:
        """Pin a ready block once; False when it is absent or in flight."""
        block = self.get_block(key)
        if block is None or block.ref_cnt < 0:
            return False
        if block.ref_cnt == 0:
            self.num_evictable -= 1
        block.ref_cnt += 1
        return True

    def hold(self, key: OffloadKey) -> None:
        """Keep ``key`` from eviction, from the moment it is ready, until one release more."""
        self.holds[key] = self.holds.get(key, 0) + 1
        block = self.get_block(key)
        if (
            block is not None and block.ref_cnt >= 0
        ):  # pin, without its frame: a lookup of each key comes here
            if block.ref_cnt == 0:
                self.num_evictable -= 1
            block.ref_cnt += 1

    def release_each(self, keys: Collection[OffloadKey]) -> None:
        """Take back one hold of each of ``keys``, which are distinct."""
        holds = self.holds
        for key in keys:
            count = holds.pop(key) - 1
            if count:
                holds[key] = count
        self.unpin_each(keys)

    def assign(self, keys: Collection[OffloadKey]) -> list[int]:
        """Hold ``keys``, distinct and not held, as in flight; return their slots. So many slots are free."""
        slots, blocks = self.slots.take(keys)
        self.policy.insert_many(keys, blocks)
        self.num_in_flight += len(blocks)
        for listener in self.listeners:
            listener.on_held(keys)
        return slots

    def assign_one(self, key: OffloadKey) -> int:
        """Hold ``key``, which is not held, as in flight; return its slot. A slot is free."""
        block = self.slots.take_one(key)
        self.policy.insert(key, block)
        self.num_in_flight += 1
        for listener in self.listeners:
            listener.on_held((key,))
        return block.block_id

    def evict(
        self, num: int, named: Collection[OffloadKey], protected: Collection[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Evict ``num`` idle blocks outside ``named`` and ``protected``; None when there are fewer."""
        if num > self.num_evictable:
            return None
        if not named and not protected:
            victims = self.policy.evict(num, ())
        else:
            # A pin keeps the named ones without copying ``protected``, which may be every waiting request's keys.
            pinned = list(filter(self.pin, named))
            try:
                has_room = num <= self._num_evictable_outside(protected, at_least=num)
                victims = self.policy.evict(num, protected) if has_room else None
            finally:
                self.unpin_each(pinned)
        return None if victims is None else self._give_back(victims)

    def evict_each(self, parts: Iterable[tuple[int, Collection[OffloadKey]]]) -> list[OffloadKey]:
        """Evict so many idle blocks outside a collection of keys, for each of ``parts``; there are as many."""
        evicted: list[OffloadKey] = []
        for num, protected in parts:
            victims = self.policy.evict(num, protected)
            assert victims is not None, "a plan counts the idle blocks"
            evicted += self._give_back(victims)
        return evicted

    def finish_writes(self, keys: Collection[OffloadKey], *, success: bool) -> list[OffloadKey]:
        """Make the in-flight ones of ``keys`` ready, or forget them; return those that were in flight.

        It settles no orphan: the caller knows that these writes began after the last reset.
        """
        finished: list[OffloadKey] = []
        for key, block in zip(keys, map(self.get_block, keys), strict=True):
            if block is not None and block.ref_cnt < 0:  # only the first time of a key that is named twice
                block.ref_cnt = 0
                finished.append(key)
        self.num_in_flight -= len(finished)
        if success:
            self.num_evictable += len(finished)
            if finished and self._reports_idle:
                self.policy.on_idle(finished)
            holds = self.holds
            if holds and not holds.keys().isdisjoint(finished):
                for key in holds.keys() & finished:
                    block = self.get_block(key)
                    if block is not None:
                        block.ref_cnt = holds[key]
                        self.num_evictable -= 1
        else:
            blocks = map(self.get_block, finished)
            self.slots.give_back([block.block_id for block in blocks if block is not None])
            for key in finished:
                self.policy.remove(key)
        return finished

    def report_finished(self, keys: Collection[OffloadKey], *, success: bool) -> None:
        """Tell the listeners what ``finish_writes`` has returned; called right after it where there are some."""
        for listener in self.listeners:
            (listener.on_ready if success else listener.on_gone)(keys)

    def forget_idle(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Forget those of ``keys`` that are idle, and free their slots; return them."""
        idle = {
            key: block for key in keys if (block := self.get_block(key)) is not None and not block.ref_cnt
        }
        for key in idle:
            self.policy.remove(key)
        return self._give_back(list(idle.items()))

    def forget_blocks(self) -> list[OffloadKey]:
        """Forget every block and orphan the slots in use; return the keys that were ready."""
        held = self.slots.held_blocks(self.get_block)
        for key, block in held.items():
            if block.ref_cnt:
                is_write = block.ref_cnt == IN_FLIGHT
                self.orphans.adopt(block.block_id, key, is_write=is_write, num_reports=abs(block.ref_cnt))
        idle_slots = [block.block_id for block in held.values() if block.ref_cnt == 0]
        if clear_policy(self.policy, self.num_blocks):
            self.policy.expect_idle()
        self.slots.give_back(idle_slots[::-1])
        self.num_evictable = self.num_in_flight = 0
        for listener in self.listeners:
            listener.on_cleared()
        return [key for key, block in held.items() if block.ref_cnt >= 0]

    def stats(self) -> dict[str, float]:
        """Return counts of blocks by name, and what share of them no eviction could free now. Thread: any."""
        num_free = self.slots.num_free
        num_pinned = max(0, self.num_blocks - num_free - self.num_evictable)
        num_writing = min(self.num_in_flight, num_pinned)
        return {
            "capacity_blocks": self.num_blocks,
            "held_blocks": self.num_held,
            "free_blocks": num_free,
            "evictable_blocks": self.num_evictable,
            "in_flight_blocks": self.num_in_flight,
            "orphaned_blocks": len(self.orphans.by_slot),
            # vLLM's own dashboards show these shares.
            "pinned_ratio": num_pinned / self.num_blocks,
            "write_pinned_ratio": num_writing / self.num_blocks,
            "read_pinned_ratio": (num_pinned - num_writing) / self.num_blocks,
        }

    def check(self) -> None:
        """Recount slots and blocks; for tests, it visits every block.

        Raises:
            InvariantError: a slot is lost or in two places, a counter is wrong, or the policy disagrees.
        """
        held = self.slots.held_blocks(self.get_block)
        self.policy.check(held)
        self.orphans.check()
        for listener in self.listeners:
            listener.check(held)
        used = [block.block_id for block in held.values()] + self.slots.freed + list(self.orphans.by_slot)
        high_water_mark = self.slots.high_water_mark
        if sorted(used) != list(range(high_water_mark)):
            raise InvariantError(
                f"slots held, freed, orphaned: {sorted(used)}, expected {high_water_mark} from 0"
            )
        num_free = self.num_blocks - high_water_mark + len(self.slots.freed)
        if num_free != self.slots.num_free:
            raise InvariantError(f"{num_free} slots are free, counted were {self.slots.num_free}")
        ref_counts = [block.ref_cnt for block in held.values()]
        recount = (ref_counts.count(0), ref_counts.count(IN_FLIGHT))
        if recount != (self.num_evictable, self.num_in_flight):
            counted = (self.num_evictable, self.num_in_flight)
            raise InvariantError(f"(evictable, in flight) blocks are {recount}, counted were {counted}")

    def check_holds(self, expected: dict[OffloadKey, int]) -> None:
        """Check that exactly ``expected`` is held and that each ready held block is pinned that often.

        Raises:
            InvariantError: it is not so.
        """
        if self.holds != expected:
            raise InvariantError(f"holds are {self.holds}, waiting requests have {expected}")
        for key, count in expected.items():
            block = self.get_block(key)
            if block is not None and 0 <= block.ref_cnt < count:
                raise InvariantError(f"{key.hex()} is held {count} times and pinned {block.ref_cnt} times")

    def _give_back(self, victims: Sequence[tuple[OffloadKey, BlockStatus]]) -> list[OffloadKey]:
        """Free the slots of blocks that were idle and are no longer held by the policy; return their keys."""
        self.num_evictable -= len(victims)
        self.slots.give_back([block.block_id for _, block in victims])
        keys = [key for key, _ in victims]
        for listener in self.listeners:
            listener.on_gone(keys)
        return keys

    def _count_idle(self, num_idle: int, keys: Iterable[OffloadKey]) -> None:
        """Count blocks that have become idle, which are some of ``keys``, and notify a policy that listens."""
        self.num_evictable += num_idle
        if num_idle and self._reports_idle:
            self.policy.on_idle(keys)

    def _num_evictable_outside(self, protected: Collection[OffloadKey], at_least: int) -> int:
        """Return how many blocks may leave, or a lower bound that is not below ``at_least``. Pure.

        A policy would visit every block to find out; this visits the protected ones, and only in need.
        """
        num_evictable = self.num_evictable
        if num_evictable - len(protected) >= at_least:
            return num_evictable - len(protected)
        blocks = map(self.get_block, protected)
        return num_evictable - sum(block is not None and block.ref_cnt == 0 for block in blocks)

    def _refuse_pins(
        self, keys: Collection[OffloadKey], blocks: Sequence[BlockStatus | None]
    ) -> BlockNotReadyError:
        """Unpin the blocks before the first that cannot be read; return the error that names it."""
        position, block = next(
            (position, block) for position, block in enumerate(blocks) if block is None or block.ref_cnt < 0
        )
        _take_back_pins(blocks[:position])
        key = next(islice(keys, position, None))
        return BlockNotReadyError(key, "absent" if block is None else "in flight")


def _take_back_pins(blocks: Iterable[BlockStatus | None]) -> None:
    for block in blocks:
        if block is not None:
            block.ref_cnt -= 1


def _repeated(blocks: Iterable[BlockStatus | None]) -> Iterator[BlockStatus | None]:
    """Yield each block as often as it comes again after its first time. Pure."""
    seen: set[BlockStatus | None] = set()
    for block in blocks:
        if block in seen:
            yield block
        seen.add(block)
