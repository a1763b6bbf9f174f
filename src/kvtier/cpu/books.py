"""The state of the primary tier's blocks, and the only functions that change it.

It knows neither requests nor events nor what a lookup answers; the manager does. Here stand the rules that
keep the books right: a slot is free, held by one key, or orphaned; a block is in flight, idle or pinned; and
the number of idle blocks is counted at each change, so that "no room" costs one comparison.
"""

from collections.abc import Collection, Iterable

from kvtier.base import OffloadKey
from kvtier.cpu.orphans import OrphanLedger
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus, CachePolicy, IdleNews
from kvtier.cpu.slots import SlotTable
from kvtier.errors import ConfigError, InvariantError


class BlockBooks:
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
        self._idle_news = policy if isinstance(policy, IdleNews) else None
        if self._idle_news is not None:
            self._idle_news.expect_news()
        self._slots = SlotTable(num_blocks)
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
            self._note_idle(1, (key,))
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
        self._note_idle(num_idle, distinct)

    def _note_idle(self, num_idle: int, keys: Iterable[OffloadKey]) -> None:
        """Count blocks that have become idle, which are some of ``keys``, and tell a policy that wants to know."""
        self._num_evictable += num_idle
        if num_idle and self._idle_news is not None:
            self._idle_news.note_idle(keys)

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
            self._note_idle(len(finished), finished)
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
