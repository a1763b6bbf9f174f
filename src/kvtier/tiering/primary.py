"""The primary tier as secondary tiers see it: the manager of host memory together with its rows.

``prepare_read`` and its siblings are the tiers' words for load and store. They pin and complete like the engine's
calls, but a read is not counted as a load, and neither the reuse filter nor the policy's admission applies to a write.
"""

import logging
import time
from collections.abc import Callable, Collection

from kvtier.base import OffloadKey, PrepareStoreOutput, ReqContext, RowMemory
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.learning import ReuseForecaster
from kvtier.cpu.policies.registry import create_reuse_forecaster
from kvtier.tenants import Tenants

logger = logging.getLogger(__name__)


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """Host memory: which blocks it holds, and the rows themselves.

    Args:
        num_blocks: slots.
        mmap_region: the rows; any object with ``create_kv_memoryview()`` and ``cleanup()``.
        cache_policy: name of the eviction policy.
        enable_events: whether to record OffloadingEvents.
        store_threshold: accesses of a key before it is stored from the device; promotions are not filtered.
        max_tracker_size: access counts kept by the reuse filter.
        clock: seconds, monotonic; the times of arrival that policies learn from.
        ttl_s: seconds after its store that a block is a miss; None: never.
        tenants: the tenants of requests; None where there are none.
    """

    def __init__(
        self,
        num_blocks: int,
        mmap_region: RowMemory,
        cache_policy: str = "lru",
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = DEFAULT_MAX_TRACKER_SIZE,
        *,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._region = mmap_region
        self._view = mmap_region.create_kv_memoryview()
        super().__init__(
            num_blocks,
            cache_policy,
            enable_events,
            store_threshold,
            max_tracker_size,
            clock=clock,
            ttl_s=ttl_s,
            tenants=tenants,
            block_bytes=self._view.nbytes // len(self._view),
        )

    def get_kv_memoryview(self) -> memoryview:
        """Return the rows: writable, zero-copy, shape (num_blocks, row_stride), format 'b'."""
        return self._view

    def prepare_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pin ready ``keys`` for a tier that will read them."""
        del req_context
        return CPULoadStoreSpec(self.table.pin_ready(keys))

    def complete_read(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin ``keys`` after a tier has read them."""
        del req_context
        self.table.unpin_each(keys)

    def prepare_write(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        protected: Collection[OffloadKey] = (),
    ) -> PrepareStoreOutput | None:
        """Reserve slots that a tier will fill; the reuse filter does not apply.

        Args:
            keys: the blocks.
            req_context: the request on whose behalf.
            protected: further keys that must not be evicted for it; its ``in`` should not search.
        """
        del req_context
        return self.reserve(keys, protected)

    def complete_write(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make the in-flight ones of ``keys`` ready after a tier has filled them, or drop them."""
        del req_context
        self.finish_writes(keys, success=success, is_promotion=True)

    def create_forecaster(self, max_blocks: int) -> ReuseForecaster:
        """Build what estimates reuse in place of the policy, remembering at most ``max_blocks`` blocks."""
        return create_reuse_forecaster(max_blocks)

    def shutdown(self) -> None:
        super().shutdown()
        try:
            self._view.release()
        except BufferError:
            # An array over the rows still exists; the region unmaps them when the last one is gone.
            logger.warning("the primary's rows are still in use: they are unmapped later")
        self._region.cleanup()

    def abandon(self) -> None:
        """Clean the region but leave the rows mapped: a thread of a tier may still touch them."""
        super().shutdown()
        self._region.cleanup()
