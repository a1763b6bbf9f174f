"""Which slots of the primary tier are free, who took the others, and the one BlockStatus of each.

It does not know whether a block is still held: a policy does. Numbers are deterministic: fresh ones ascending
from 0, then freed ones, last freed first, so that a run can be replayed and a lightly used tier touches few
pages.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus, CachePolicy, IdleListener
from kvtier.errors import ConfigError, InvariantError


class SlotAllocator:
    """A counter of fresh slots, a stack of freed ones, and for each slot its block and the key that took it last.

    The blocks are made here, once: made one by one as slots are taken, a million of them would set off the
    garbage collector's full passes again and again, which halves the rate of stores. Made at the start they can
    also be frozen out of its sight by an engine that calls ``gc.freeze()``.

    Args:
        num_slots: slots of the primary tier.

    Attributes:
        num_used_once: slots that have ever been taken; they are numbered 0 to ``num_used_once - 1``.
        freed: slots that were taken and given back, in the order of giving.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_used_once = 0
        self.freed: list[int] = []
        self._num_slots = num_slots
        self._blocks = [BlockStatus(slot) for slot in range(num_slots)]
        # A stale entry is harmless: its block is gone or names another slot. Clearing it would slow eviction.
        self._last_keys: list[OffloadKey | None] = [None] * num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return self._num_slots - self.num_used_once + len(self.freed)

    def take(self, keys: Collection[OffloadKey]) -> tuple[list[int], list[BlockStatus]]:
        """Take a slot for each of ``keys``; the caller has made sure that so many are free.

        Returns:
            The slots and their blocks, in flight, in the order of ``keys``.
        """
        start = self.num_used_once
        end = self.num_used_once = min(start + len(keys), self._num_slots)
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
        if self.num_used_once < self._num_slots:
            slot = self.num_used_once
            self.num_used_once += 1
        else:
            slot = self.freed.pop()
        self._last_keys[slot] = key
        block = self._blocks[slot]
        block.ref_cnt = IN_FLIGHT
        return block

    def give_back(self, slots: Iterable[int]) -> None:
        """Free ``slots``; the last of them is taken first."""
        self.freed.extend(slots)

    def held_blocks(
        self, get_block: Callable[[OffloadKey], BlockStatus | None]
    ) -> dict[OffloadKey, BlockStatus]:
        """Return every block that a slot's last key still holds, by slot. Pure; visits each used slot."""
        held: dict[OffloadKey, BlockStatus] = {}
        for slot, key in enumerate(self._last_keys[: self.num_used_once]):
            block = None if key is None else get_block(key)
            if key is not None and block is not None and block.block_id == slot:
                held[key] = block
        return held


@dataclass(eq=False, slots=True)
class Orphan:
    """One slot, and the reports that are still to come for it.

    Attributes:
        slot: its number.
        key: what was held in it.
        is_write: True when the transfers write into it.
        num_by_key: reports expected by key.
        num_by_slot: reports expected by slot.
    """

    slot: int
    key: OffloadKey
    is_write: bool
    num_by_key: int
    num_by_slot: int = 0


class OrphanLedger:
    """Every orphaned slot. Its length is their number; it is false when there are none.

    Args:
        give_back: called with slots whose last report has arrived.
    """

    def __init__(self, give_back: Callable[[list[int]], None]) -> None:
        self._give_back = give_back
        self._by_slot: dict[int, Orphan] = {}
        self._by_key: dict[tuple[OffloadKey, bool], deque[Orphan]] = {}

    def __len__(self) -> int:
        return len(self._by_slot)

    def slots(self) -> list[int]:
        """Return the orphaned slots."""
        return list(self._by_slot)

    def adopt(self, slot: int, key: OffloadKey, *, is_write: bool, num_reports: int) -> None:
        """Keep ``slot`` until ``num_reports`` reports have come; the newest orphan of its key and kind."""
        orphan = Orphan(slot, key, is_write, num_reports)
        self._by_slot[slot] = orphan
        self._by_key.setdefault((key, is_write), deque()).append(orphan)

    def claim(self, slots: Iterable[int], *, is_write: bool) -> None:
        """Expect one report of each of ``slots`` by slot instead of by key; other slots are ignored."""
        for slot in slots:
            orphan = self._find(slot, is_write=is_write)
            if orphan is not None and orphan.num_by_key:
                orphan.num_by_slot += 1
                self._take_from_key(orphan)

    def settle_keys(self, keys: Collection[OffloadKey], *, is_write: bool) -> list[OffloadKey]:
        """Take one report for each distinct key that has an orphan; return the keys that have none."""
        others: list[OffloadKey] = []
        for key in dict.fromkeys(keys):
            waiting = self._by_key.get((key, is_write))
            if waiting is None:
                others.append(key)
            else:
                orphan = waiting[0]
                self._take_from_key(orphan)
                self._release_if_settled(orphan)
        return others

    def settle_slots(self, slots: Iterable[int], *, is_write: bool) -> None:
        """Take one report for each of ``slots`` that is an orphan of this kind."""
        for slot in slots:
            orphan = self._find(slot, is_write=is_write)
            if orphan is None:
                continue
            if orphan.num_by_slot:
                orphan.num_by_slot -= 1
            else:
                self._take_from_key(orphan)
            self._release_if_settled(orphan)

    def check(self) -> None:
        """Raise InvariantError when a slot waits for no report or the two indexes differ."""
        expected = [orphan.slot for orphan in self._by_slot.values() if orphan.num_by_key]
        found = [orphan.slot for waiting in self._by_key.values() for orphan in waiting]
        if sorted(expected) != sorted(found) or not all(self._by_key.values()):
            raise InvariantError(f"orphans expect reports by key for slots {expected}, indexed are {found}")
        idle = [orphan for orphan in self._by_slot.values() if orphan.num_by_key + orphan.num_by_slot < 1]
        if idle:
            raise InvariantError(f"orphans wait for no report: {idle}")

    def _find(self, slot: int, *, is_write: bool) -> Orphan | None:
        orphan = self._by_slot.get(slot)
        return orphan if orphan is not None and orphan.is_write is is_write else None

    def _take_from_key(self, orphan: Orphan) -> None:
        orphan.num_by_key -= 1
        if orphan.num_by_key == 0:
            index = (orphan.key, orphan.is_write)
            self._by_key[index].remove(orphan)
            if not self._by_key[index]:
                del self._by_key[index]

    def _release_if_settled(self, orphan: Orphan) -> None:
        if not orphan.num_by_key and not orphan.num_by_slot:
            del self._by_slot[orphan.slot]
            self._give_back([orphan.slot])


class BlockTable:
    """Blocks, their slots and their pins.

    Args:
        num_blocks: slots of the primary tier.
        policy: who orders the blocks; it is empty.

    Raises:
        ConfigError: ``num_blocks`` is below one.
    """

    def __init__(self, num_blocks: int, policy: CachePolicy) -> None:
        if num_blocks < 1:
            remedy = "the primary tier holds at least one block: give it more bytes or use smaller blocks"
            raise ConfigError("num_blocks", num_blocks, remedy)
        self.num_blocks = num_blocks
        self._policy = policy
        self._get_block = policy.getter()
        self._idle_news = policy if isinstance(policy, IdleListener) else None
        if self._idle_news is not None:
            self._idle_news.expect_idle()
        self._slots = SlotAllocator(num_blocks)
        self._orphans = OrphanLedger(self._slots.give_back)
        # INVARIANT: _num_evictable held blocks have ref_cnt 0, _num_in_flight have IN_FLIGHT.
        self._num_evictable = 0
        self._num_in_flight = 0

    @property
    def num_evictable(self) -> int:
        """Ready blocks that nobody has pinned."""
        return self._num_evictable

    @property
    def num_free(self) -> int:
        """Slots that a store can take without evicting."""
        return self._slots.num_free

    def is_ready(self, key: OffloadKey) -> bool:
        """Return whether ``key`` can be read now; unlike lookup this is no access. Pure."""
        block = self._get_block(key)
        return block is not None and block.is_ready

    def ready_among(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return those of ``keys`` that can be read now, in order; unlike lookup this is no access. Pure."""
        blocks = map(self._get_block, keys)
        return [
            key for key, block in zip(keys, blocks, strict=True) if block is not None and block.ref_cnt >= 0
        ]

    def check(self) -> None:
        """Recount the books; for tests, it visits every block.

        Raises:
            InvariantError: a slot is lost or in two places, a counter is wrong, or the policy disagrees.
        """
        held = self._slots.held_blocks(self._get_block)
        self._policy.check(held)
        self._orphans.check()
        slots = [block.block_id for block in held.values()] + self._slots.freed + self._orphans.slots()
        num_used_once = self._slots.num_used_once
        if sorted(slots) != list(range(num_used_once)):
            raise InvariantError(
                f"slots held, freed, orphaned: {sorted(slots)}, expected {num_used_once} from 0"
            )
        ref_counts = [block.ref_cnt for block in held.values()]
        recount = (ref_counts.count(0), ref_counts.count(IN_FLIGHT))
        if recount != (self._num_evictable, self._num_in_flight):
            counted = (self._num_evictable, self._num_in_flight)
            raise InvariantError(f"(evictable, in flight) blocks are {recount}, counted were {counted}")

    def _pin(self, key: OffloadKey) -> bool:
        """Pin a ready block once; False when it is absent or in flight."""
        block = self._get_block(key)
        if block is None or block.ref_cnt < 0:
            return False
        if block.ref_cnt == 0:
            self._num_evictable -= 1
        block.ref_cnt += 1
        return True

    def _unpin(self, key: OffloadKey) -> bool:
        """Unpin a pinned block once; False when it is absent or not pinned."""
        block = self._get_block(key)
        if block is None or block.ref_cnt < 1:
            return False
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            self._on_idle(1, (key,))
        return True

    def _unpin_each(self, keys: Iterable[OffloadKey]) -> None:
        """Unpin each of ``keys`` once, however often they name it; those that are not pinned are ignored."""
        distinct = dict.fromkeys(keys)
        num_idle = 0
        for block in map(self._get_block, distinct):
            if block is None:
                continue
            num_pins = block.ref_cnt
            if num_pins == 1:
                block.ref_cnt = 0
                num_idle += 1
            elif num_pins > 1:
                block.ref_cnt = num_pins - 1
        self._on_idle(num_idle, distinct)

    def _on_idle(self, num_idle: int, keys: Iterable[OffloadKey]) -> None:
        """Count blocks that have become idle, which are some of ``keys``, and tell a policy that wants to know."""
        self._num_evictable += num_idle
        if num_idle and self._idle_news is not None:
            self._idle_news.on_idle(keys)

    def _assign(self, keys: Collection[OffloadKey]) -> list[int]:
        """Hold ``keys``, distinct and not held, as in flight; return their slots. So many slots are free."""
        slots, blocks = self._slots.take(keys)
        self._policy.insert_many(keys, blocks)
        self._num_in_flight += len(blocks)
        return slots

    def _assign_one(self, key: OffloadKey) -> int:
        """Hold ``key``, which is not held, as in flight; return its slot. A slot is free."""
        block = self._slots.take_one(key)
        self._policy.insert(key, block)
        self._num_in_flight += 1
        return block.block_id

    def _evict(
        self, num: int, named: Collection[OffloadKey], protected: Collection[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Evict ``num`` idle blocks outside ``named`` and ``protected``; None when there are fewer."""
        if num > self._num_evictable:
            return None
        if not named and not protected:
            return self._take_victims(self._policy.evict(num, ()))
        # A pin keeps the named ones without copying ``protected``, which may be every waiting request's keys.
        pinned = list(filter(self._pin, named))
        try:
            has_room = num <= self._num_evictable_outside(protected, at_least=num)
            victims = self._policy.evict(num, protected) if has_room else None
        finally:
            self._unpin_each(pinned)
        return self._take_victims(victims)

    def _take_victims(self, victims: list[tuple[OffloadKey, BlockStatus]] | None) -> list[OffloadKey] | None:
        """Free the slots of what a policy has evicted, if it has; return the keys."""
        if victims is None:
            return None
        self._num_evictable -= len(victims)
        self._slots.give_back([block.block_id for _, block in victims])
        return [key for key, _ in victims]

    def _num_evictable_outside(self, protected: Collection[OffloadKey], at_least: int) -> int:
        """Return how many blocks may leave, or a lower bound that is not below ``at_least``. Pure.

        A policy would find out by visiting every block; this visits the protected ones, and only in need.
        """
        num_evictable = self._num_evictable
        if num_evictable - len(protected) >= at_least:
            return num_evictable - len(protected)
        blocks = map(self._get_block, protected)
        return num_evictable - sum(block is not None and block.ref_cnt == 0 for block in blocks)

    def _finish_writes(self, keys: Collection[OffloadKey], *, success: bool) -> list[OffloadKey]:
        """End writes that are reported by key: those of before a reset settle their orphans, others go on."""
        if self._orphans:
            keys = self._orphans.settle_keys(keys, is_write=True)
        return self._finish_live_writes(keys, success=success)

    def _finish_live_writes(self, keys: Collection[OffloadKey], *, success: bool) -> list[OffloadKey]:
        """Make the in-flight ones of ``keys`` ready, or forget them; return those that were in flight.

        It settles no orphan: a caller that knows these writes to be of after the last reset must come here.
        """
        finished: list[OffloadKey] = []
        for key, block in zip(keys, map(self._get_block, keys), strict=True):
            if block is not None and block.ref_cnt < 0:  # only the first time of a key that is named twice
                block.ref_cnt = 0
                finished.append(key)
        self._num_in_flight -= len(finished)
        if success:
            self._on_idle(len(finished), finished)
        else:
            blocks = map(self._get_block, finished)
            self._slots.give_back([block.block_id for block in blocks if block is not None])
            for key in finished:
                self._policy.remove(key)
        return finished

    def _forget_blocks(self) -> list[OffloadKey]:
        """Forget every block and orphan the slots in use; return the keys that were ready."""
        held = self._slots.held_blocks(self._get_block)
        for key, block in held.items():
            if block.ref_cnt:
                is_write = block.ref_cnt == IN_FLIGHT
                self._orphans.adopt(block.block_id, key, is_write=is_write, num_reports=abs(block.ref_cnt))
        idle_slots = [block.block_id for block in held.values() if block.ref_cnt == 0]
        self._policy.clear()
        self._slots.give_back(reversed(idle_slots))
        self._num_evictable = self._num_in_flight = 0
        return [key for key, block in held.items() if block.ref_cnt >= 0]
