"""The primary tier as secondary tiers see it: readable, writable rows with holds for who waits.

It decides nothing about tiers. ``prepare_read`` and its siblings are the tiers' words for load and store; a
hold keeps a block from eviction while a request waits, from the moment the block is ready, counted per key so
that one waiter's end does not release it for another.
"""

import logging
import time
from collections.abc import Callable, Collection

from kvtier.base import (
    BlockIds,
    BlockIDsLoadStoreSpec,
    LoadStoreSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RowMemory,
)
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.base import EvictionPreview
from kvtier.cpu.policies.learning import ReuseForecaster
from kvtier.cpu.policies.registry import create_reuse_forecaster
from kvtier.errors import InvariantError

logger = logging.getLogger(__name__)


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """The books of host memory together with the memory itself.

    Args:
        num_blocks: slots.
        mmap_region: the rows; any object with ``create_kv_memoryview()`` and ``cleanup()``.
        cache_policy: name of the eviction policy.
        enable_events: whether to record OffloadingEvents.
        store_threshold: accesses of a key before it is stored from the device; promotions are not filtered.
        max_tracker_size: access counts kept by the reuse filter.
        clock: seconds, monotonic; for policies that learn when requests arrive.

    Attributes:
        departed: keys evicted since whoever watches them emptied the list; None while nobody does.
    """

    def __init__(
        self,
        num_blocks: int,
        mmap_region: RowMemory,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            num_blocks, cache_policy, enable_events, store_threshold, max_tracker_size, clock=clock
        )
        self._region = mmap_region
        self._view = mmap_region.create_kv_memoryview()
        self._holds: dict[OffloadKey, int] = {}
        self.departed: list[OffloadKey] | None = None

    def get_kv_memoryview(self) -> memoryview:
        """Return the rows: writable, zero-copy, shape (num_blocks, row_stride), format 'b'."""
        return self._view

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ready ``keys`` for a tier that will read them."""
        spec = self.prepare_load(keys, req_context)
        self._num_loaded -= len(keys)  # a cascade is no load
        return spec

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin ``keys`` after a tier has read them."""
        self._unpin_each(keys)

    def prepare_write(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        protected: Collection[OffloadKey] = (),
    ) -> PrepareStoreOutput | None:
        """Reserve slots that a tier will fill; the reuse filter has no say in it.

        Args:
            keys: the blocks.
            req_context: the request on whose behalf.
            protected: further keys that must not be evicted for it; its ``in`` should not search.
        """
        del req_context
        return self._reserve(keys, protected=protected)

    def reserve_slot(self, key: OffloadKey, protected: Collection[OffloadKey] = ()) -> int | None:
        """Do what prepare_write does for one key that is not held; return its slot, None when there is no room.

        A prefix is promoted block by block as it is searched, so this is called as often as a lookup.
        """
        if self.num_free == 0 and self._make_room(1, (), protected) is None:
            return None
        return self._assign_one(key)

    def has_room(self) -> bool:
        """Return whether a slot is free or a block can leave; what is protected may still stand against it."""
        return self._num_evictable > 0 or self.num_free > 0

    def complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make the in-flight ones of ``keys`` ready after a tier has filled them, or drop them."""
        finished = self._finish_live_writes(keys, success=success)
        self._on_finished(finished, success=success)
        self._pin_held(finished)

    def finish_store(self, keys: Collection[OffloadKey], *, success: bool) -> list[OffloadKey]:
        finished = super().finish_store(keys, success=success)
        self._pin_held(finished)
        return finished

    def slots_of(self, spec: LoadStoreSpec) -> BlockIds:
        """Return the slots of a spec that this tier has made, in the order of its keys. Pure."""
        if not isinstance(spec, BlockIDsLoadStoreSpec):
            raise InvariantError(f"the primary tier prepared {spec!r}, which has no slots")
        return spec.block_ids

    def settle_old_stores(self, keys: Collection[OffloadKey]) -> None:
        """Settle what a reset left of stores of ``keys``, and touch no newer block under them."""
        self._orphans.settle_keys(keys, is_write=True)

    def is_in_flight(self, key: OffloadKey) -> bool:
        """Return whether a write of ``key`` is in flight."""
        block = self._policy.get(key)
        return block is not None and not block.is_ready

    def next_victims(self, n: int) -> list[OffloadKey] | None:
        """Return at most ``n`` idle blocks that would leave next, in that order; None when the policy cannot say."""
        return self._policy.next_victims(n) if isinstance(self._policy, EvictionPreview) else None

    def create_forecaster(self, max_blocks: int) -> ReuseForecaster:
        """Build what estimates reuse in place of the policy, remembering at most ``max_blocks`` blocks."""
        return create_reuse_forecaster(max_blocks)

    def hold(self, key: OffloadKey) -> None:
        """Keep ``key`` from eviction, from the moment it is ready, until one release more."""
        self._holds[key] = self._holds.get(key, 0) + 1
        self._pin(key)

    def release(self, key: OffloadKey) -> None:
        """Take back one hold of ``key``."""
        count = self._holds.pop(key) - 1
        if count:
            self._holds[key] = count
        self._unpin(key)

    def check_holds(self, expected: dict[OffloadKey, int]) -> None:
        """Assert that exactly ``expected`` is held and that each ready held block is pinned that often.

        Raises:
            InvariantError: it is not so.
        """
        if self._holds != expected:
            raise InvariantError(f"holds are {self._holds}, waiting requests have {expected}")
        for key, count in expected.items():
            block = self._policy.get(key)
            if block is not None and block.is_ready and block.ref_cnt < count:
                raise InvariantError(f"{key.hex()} is held {count} times and pinned {block.ref_cnt} times")

    def shutdown(self) -> None:
        try:
            self._view.release()
        except BufferError:
            # Somebody still has an array over the rows; the region unmaps them when the last one is gone.
            logger.warning("the primary's rows are still in use: they are unmapped later")
        self._region.cleanup()

    def abandon(self) -> None:
        """Clean the region but leave the rows mapped: a thread of a tier may still touch them."""
        self._region.cleanup()

    def _make_room(
        self, num: int, named: Collection[OffloadKey], protected: Collection[OffloadKey]
    ) -> list[OffloadKey] | None:
        evicted = super()._make_room(num, named, protected)
        if evicted and self.departed is not None:
            self.departed += evicted
        return evicted

    def _pin_held(self, keys: Collection[OffloadKey]) -> None:
        """Pin what has just become ready as often as it is held; until now it could not be evicted."""
        if not self._holds or self._holds.keys().isdisjoint(keys):
            return
        for key in dict.fromkeys(keys):
            for _ in range(self._holds.get(key, 0)):
                self._pin(key)
