"""Builds both halves of offloading to host memory alone from one configuration.

It derives sizes and puts parts together; it moves no byte and keeps no books. Sizes follow from the configuration
alone, so that all processes of an engine agree on them. A spec with secondary tiers overrides the alignment of
rows and gives its handlers a region.
"""

from collections.abc import Iterator
from typing import ClassVar

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    HandlerEntry,
    OffloadingManager,
    OffloadingSpec,
)
from kvtier.config import OffloadingConfig
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.row_layout import plan_layout
from kvtier.cpu.shared_offload_region import SharedOffloadRegion, plan_row_stride
from kvtier.errors import ConfigError, KVCacheLayoutError


class CPUOffloadingSpec(OffloadingSpec):
    """The primary tier alone.

    Args:
        config: what the engine said of itself; ``cpu_bytes_to_use`` is required.

    Raises:
        ConfigError: ``cpu_bytes_to_use`` is missing or below one block.

    Attributes:
        row_alignment_bytes: ``row_stride`` is a multiple of it; 1 packs rows without gaps.
        cpu_page_size_per_worker: bytes of one block on one worker: those of the largest group.
        row_stride: bytes of one block over all workers.
        num_blocks: slots that fit ``cpu_bytes_to_use``.
        eviction_policy: name of the policy.
        store_threshold: accesses before a key is stored; below 2 it is stored at once.
        max_tracker_size: access counts kept.
    """

    row_alignment_bytes: ClassVar[int] = 1

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        settings = config.settings
        self.eviction_policy = settings.eviction_policy
        self.store_threshold = settings.store_threshold
        self.max_tracker_size = settings.max_tracker_size
        largest_page_bytes = max(group.page_size_bytes for group in config.groups)
        self.cpu_page_size_per_worker = largest_page_bytes * self.block_size_factor
        self.row_stride = plan_row_stride(
            self.cpu_page_size_per_worker, config.world_size, self.row_alignment_bytes
        )
        self.num_blocks = _count_blocks(settings.cpu_bytes_to_use, self.row_stride)
        self._manager: OffloadingManager | None = None
        self._handlers: CpuGpuOffloadingHandlers | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler side; the same object at every call."""
        if self._manager is None:
            self._manager = self.make_manager()
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        """Yield the handlers for stores and for loads; the same objects at every call.

        Raises:
            KVCacheLayoutError: the tensors need more of a row than the configuration said.
        """
        if self._handlers is None:
            self._check_caches(kv_caches)
            self._handlers = self.make_handlers(kv_caches)
        yield HandlerEntry(GPULoadStoreSpec, CPULoadStoreSpec, self._handlers.gpu_to_cpu_handler)
        yield HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, self._handlers.cpu_to_gpu_handler)

    def make_manager(self) -> OffloadingManager:
        """Build the scheduler side; a subclass puts more behind it."""
        return CPUOffloadingManager(
            self.num_blocks,
            cache_policy=self.eviction_policy,
            enable_events=self.config.enable_events,
            store_threshold=self.store_threshold,
            max_tracker_size=self.max_tracker_size,
        )

    def make_handlers(self, kv_caches: CanonicalKVCaches) -> CpuGpuOffloadingHandlers:
        """Build the worker side on rows of its own; a subclass gives it a region."""
        return CpuGpuOffloadingHandlers(kv_caches, self.block_size_factor, self.num_blocks)

    def make_region(self, rank: int | None) -> SharedOffloadRegion:
        """Create or join the engine's region.

        Args:
            rank: the worker; None on the scheduler's side.

        Raises:
            RegionError: it cannot be made or joined.
        """
        return SharedOffloadRegion(
            self.config.settings.instance_id or self.config.engine_id,
            self.row_stride * self.num_blocks,
            self.num_blocks,
            rank,
            self.config.world_size,
            self.cpu_page_size_per_worker,
            row_alignment_bytes=self.row_alignment_bytes,
        )

    def shutdown(self) -> None:
        """End what was built: handlers after the copies they have begun, then the manager; idempotent."""
        if self._handlers is not None:
            self._handlers.shutdown()
        if self._manager is not None:
            self._manager.shutdown()

    def _check_caches(self, kv_caches: CanonicalKVCaches) -> None:
        part_bytes = plan_layout(kv_caches, self.block_size_factor).part_bytes
        if part_bytes > self.cpu_page_size_per_worker:
            raise KVCacheLayoutError(
                f"the registered tensors need {part_bytes} bytes of a row, the configured groups give "
                f"{self.cpu_page_size_per_worker}: set page_size_bytes of each group to the sum of its layers'"
            )


def _count_blocks(cpu_bytes_to_use: int | None, row_stride: int) -> int:
    if cpu_bytes_to_use is None:
        remedy = (
            f'is required: host memory over all workers, such as "8GiB"; one block takes {row_stride} bytes'
        )
        raise ConfigError("cpu_bytes_to_use", cpu_bytes_to_use, remedy)
    if cpu_bytes_to_use < row_stride:
        remedy = f"is less than one block over all workers: give at least {row_stride} bytes"
        raise ConfigError("cpu_bytes_to_use", cpu_bytes_to_use, remedy)
    return cpu_bytes_to_use // row_stride
