"""Builds both halves of offloading to host memory alone from one configuration.

Sizes follow from the configuration and the machine's fixed sizes alone, so that all processes of an engine agree on
them. A spec with secondary tiers overrides the alignment of rows and always has a region.

Rows are private memory of each worker, or one region in shared memory. In a region the scheduler's side maps the rows
without a rank, and each worker's side maps the same with its rank. The scheduler starts no transfer before every worker
has shown that it mapped the same memory; then the region's name is removed, so that the kernel takes the memory back
however the processes die. The name does not keep out another engine with the same instance id: before its removal such
an engine would join, and afterwards the name is free again. The scheduler's side therefore holds the id while it lives.
Without secondary tiers a region is made only where several workers hold the same bytes, and shared memory has room.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, TypeVar

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    HandlerEntry,
    OffloadingManager,
    OffloadingSpec,
)
from kvtier.config import HostSize, OffloadingConfig
from kvtier.cpu.auto_size import AutoSize, find_auto_size
from kvtier.cpu.common import AuditLoadStoreSpec, CPULoadStoreSpec
from kvtier.cpu.compare import FORMATS, PageFormat, find_page_formats
from kvtier.cpu.gpu_worker import CpuGpuOffloadingHandlers, OthersStores
from kvtier.cpu.instance_lock import InstanceLock, remove_dead_locks, remove_dead_regions
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY, RegionIdentity
from kvtier.cpu.row_layout import check_page_sizes, plan_layout
from kvtier.cpu.shared_offload_region import SharedOffloadRegion, plan_row_stride
from kvtier.errors import ConfigError, RegionError, RegionMemoryError
from kvtier.limits import find_memory_size, find_mount_size
from kvtier.namespace import make_namespace
from kvtier.quantities import size_in_words
from kvtier.redaction import shorten
from kvtier.tenants import Tenants, make_tenants

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CPUOffloadingSpec(OffloadingSpec):
    """The primary tier alone.

    Args:
        config: the engine's configuration; ``cpu_bytes_to_use`` is required.

    Raises:
        ConfigError: ``cpu_bytes_to_use`` is missing or below one block, or "auto" leaves less than one.

    Attributes:
        system_root: the folder that holds /proc, /sys and /dev, from which "auto" follows.
        tenants: the tenants of requests; None where there are none.
        row_alignment_bytes: ``row_stride`` is a multiple of it; 1 packs rows without gaps.
        needs_region: whether something beside the workers reads the rows, so that they are always in a region.
        has_region: whether the rows are in a region that processes find by the instance id.
        cpu_page_size_per_worker: bytes of one block on one worker: those of the largest group.
        workers_per_part: consecutive workers whose bytes a row has once: in a region those that hold the same.
        num_row_parts: parts of a row.
        row_stride: bytes of one block over all workers.
        auto_size: the arithmetic of "auto"; None where the size was given.
        num_blocks: slots that fit ``cpu_bytes_to_use``.
        eviction_policy: name of the policy.
        store_threshold: accesses before a key is stored; below 2 it is stored at once.
        max_tracker_size: access counts kept.
        audit_formats: what the bytes of each group mean, to compare blocks; empty: no block is compared.
    """

    row_alignment_bytes: ClassVar[int] = 1
    needs_region: ClassVar[bool] = False
    system_root: ClassVar[Path] = Path("/")

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        settings = config.settings
        self.tenants: Tenants | None = make_tenants(settings)
        self.eviction_policy = settings.eviction_policy
        self.store_threshold = settings.store_threshold
        self.max_tracker_size = settings.max_tracker_size
        largest_page_bytes = max(group.page_size_bytes for group in config.groups)
        self.cpu_page_size_per_worker = largest_page_bytes * self.block_size_factor
        self.has_region = self.needs_region or self._can_share_rows()
        # Private rows cannot be shared, so there each worker keeps its own.
        self.workers_per_part = config.workers_per_part if self.has_region else 1
        self.num_row_parts = config.world_size // self.workers_per_part
        self.row_stride = plan_row_stride(
            self.cpu_page_size_per_worker, self.num_row_parts, self.row_alignment_bytes
        )
        self.auto_size = self._find_auto_size() if settings.cpu_bytes_to_use is HostSize.AUTO else None
        self.num_blocks = _count_blocks(self.auto_size or settings.cpu_bytes_to_use, self.row_stride)
        if self.auto_size is not None and config.rank is None:  # the scheduler's half speaks for all
            logger.info('"cpu_bytes_to_use": "auto" is %s', self.auto_size)
        self.audit_formats = self._find_audit_formats() if settings.audit_ratio else ()
        self._manager: OffloadingManager | None = None
        self._handlers: CpuGpuOffloadingHandlers | None = None
        self._instance_lock: InstanceLock | None = None
        self._region: SharedOffloadRegion | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            with ExitStack() as undo:
                self._instance_lock = self._lock_instance()
                if self._instance_lock is not None:
                    undo.callback(self._instance_lock.release)
                self._manager = self.make_manager()
                undo.pop_all()
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        if self._handlers is None:
            self._check_caches(kv_caches)
            self._handlers = self.make_handlers(kv_caches)
        elif not self._handlers.is_attached:
            self._handlers.attach(kv_caches)
        storing = self._handlers.gpu_to_cpu_handler
        if self.config.rank is not None and self.config.rank % self.workers_per_part:
            storing = OthersStores()
        yield HandlerEntry(GPULoadStoreSpec, CPULoadStoreSpec, storing)
        yield HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, self._handlers.cpu_to_gpu_handler)
        if self._handlers.audit_handler is not None:
            yield HandlerEntry(GPULoadStoreSpec, AuditLoadStoreSpec, self._handlers.audit_handler)

    def audited_namespace(self) -> str | None:
        return make_namespace(self.config, self.row_stride).name if self.audit_formats else None

    def audited_groups(self) -> frozenset[int]:
        return frozenset(idx for idx, page_format in enumerate(self.audit_formats) if page_format)

    def describe_start(self) -> list[str]:
        sizes = [group.block_size_tokens * self.block_size_factor for group in self.config.groups]
        # Blocks of each group take slots of the same size, and a prompt needs all of its groups.
        num_tokens = int(self.num_blocks / sum(1 / block_tokens for block_tokens in sizes))
        of_tokens = " or ".join(map(str, sorted(set(sizes))))
        size = size_in_words(self.row_stride * self.num_blocks)
        blocks = f"{self.num_blocks:,} blocks of {of_tokens} tokens and {size_in_words(self.row_stride)}"
        return [f"host memory {size}: {blocks}, room for {num_tokens:,} tokens"]

    def detach_kv_caches(self) -> None:
        if self._handlers is not None:
            self._handlers.detach()

    def make_manager(self) -> OffloadingManager:
        """Build the scheduler side, with a region where there is one."""
        if not self.has_region:
            self._require_memory()
            return self.build_manager(None)
        remove_dead_regions()
        region = self.make_region(rank=None)
        return self._keep(region, lambda: self.build_manager(region))

    def build_manager(self, region: SharedOffloadRegion | None) -> OffloadingManager:
        """Build the manager of the rows; a subclass adds tiers."""
        return CPUOffloadingManager(
            self.num_blocks,
            cache_policy=self.eviction_policy,
            enable_events=self.config.enable_events,
            store_threshold=self.store_threshold,
            max_tracker_size=self.max_tracker_size,
            ttl_s=self.config.settings.ttl_s,
            tenants=self.tenants,
            block_bytes=self.row_stride,
            lookup_deadline_s=self.config.settings.lookup_deadline_s,
        )

    def make_handlers(self, kv_caches: CanonicalKVCaches) -> CpuGpuOffloadingHandlers:
        """Build the worker side, with private rows or over the region."""
        if not self.has_region:
            return self._build_handlers(kv_caches, None)
        rank = self.config.rank
        if rank is None:
            raise ConfigError("rank", rank, "a worker needs its number, from 0 to world_size - 1")
        region = self.make_region(rank)
        return self._keep(region, lambda: self._build_handlers(kv_caches, region))

    def make_region(self, rank: int | None) -> SharedOffloadRegion:
        """Create or join the engine's region.

        Args:
            rank: the worker; None on the scheduler's side.

        Raises:
            RegionError: it cannot be created or joined.
        """
        try:
            return SharedOffloadRegion(
                self._instance_id,
                self.row_stride * self.num_blocks,
                self.num_blocks,
                None if rank is None else rank // self.workers_per_part,
                self.num_row_parts,
                self.cpu_page_size_per_worker,
                row_alignment_bytes=self.row_alignment_bytes,
                # Without tiers the scheduler's side reads no row; it maps the region to know its identity.
                prefault=rank is not None or self.needs_region,
            )
        except RegionMemoryError as error:
            if self.auto_size is None:
                raise
            raise RegionMemoryError(f'{error}; now it is "auto", {self.auto_size}') from error

    def region_identity(self) -> RegionIdentity | None:
        return None if self._region is None else self._region.shared_identity

    def seal_region(self) -> None:
        if self._region is not None:
            self._region.seal()

    def shutdown(self) -> None:
        # Last in, first out, even if one raises: the id becomes free when nothing uses the rows any more.
        with ExitStack() as ending:
            if self._instance_lock is not None:
                ending.callback(self._instance_lock.release)
            if self._region is not None:
                ending.callback(self._region.cleanup)
            if self._manager is not None:
                ending.callback(self._manager.shutdown)
            if self._handlers is not None:
                ending.callback(self._handlers.shutdown)

    @property
    def _instance_id(self) -> str:
        return self.config.settings.instance_id or self.config.engine_id

    def _build_handlers(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion | None
    ) -> CpuGpuOffloadingHandlers:
        return CpuGpuOffloadingHandlers(
            kv_caches,
            self.block_size_factor,
            self.num_blocks,
            mmap_region=region,
            cuda_copier=self.config.settings.cuda_copier,
            audit_formats=self.audit_formats,
        )

    def _keep(self, region: SharedOffloadRegion, build: Callable[[], T]) -> T:
        """Keep the region and return what ``build`` makes over it; when it fails, nothing is left of either."""
        try:
            built = build()
        except BaseException:
            region.cleanup()
            raise
        self._region = region
        return built

    def _can_share_rows(self) -> bool:
        """Return whether rows in shared memory hold what several workers have once; equal in every process.

        A mount that is too small, as containers have by default, must not end a start that private rows allow.
        """
        config, wanted = self.config, self.config.settings.cpu_bytes_to_use
        if wanted is None or not config.has_local_workers or config.workers_per_part == 1:
            return False
        mount = find_mount_size(self._mount)
        if mount is None:
            has_room = False
        elif isinstance(wanted, HostSize):
            private, shared = (find_auto_size(config, one, self.system_root) for one in (None, self._mount))
            has_room = shared.num_bytes * config.workers_per_part >= private.num_bytes
        else:
            has_room = mount.num_bytes >= wanted
        if not has_room and config.rank is None:  # the scheduler's half speaks for all
            logger.warning(
                "what %d workers hold alike is kept once for each: %s (%d bytes) is too small for host memory that "
                "they share; make it larger (docker run --shm-size, mount -o remount,size=)",
                config.workers_per_part,
                self._mount,
                mount.num_bytes if mount else 0,
            )
        return has_room

    def _require_memory(self) -> None:
        """Refuse private rows that this machine could never hold; making their table would take for ever."""
        memory, wanted = find_memory_size(self.system_root), self.row_stride * self.num_blocks
        if self.config.has_local_workers and memory is not None and wanted > memory.num_bytes:
            remedy = (
                f"this machine has {size_in_words(memory.num_bytes)} of memory ({memory.source}): give less, or "
                '"auto" for what it can spare'
            )
            raise ConfigError("cpu_bytes_to_use", wanted, remedy)

    @property
    def _mount(self) -> Path:
        return self.system_root / SHARED_MEMORY_DIRECTORY.relative_to("/")

    def _find_audit_formats(self) -> tuple[PageFormat, ...]:
        config = self.config
        found = find_page_formats(config.groups, config.kv_dtype, config.model.dtype)
        is_told = bool(config.kv_dtype) and config.rank is None  # the scheduler's half speaks for all
        if not any(found):
            if is_told:
                kv_dtype, known = shorten(config.kv_dtype), ", ".join(FORMATS)
                logger.info("no request is audited: KV dtype %s is none of %s", kv_dtype, known)
            return ()
        left_out = [idx for idx, page_format in enumerate(found) if not page_format]
        if is_told and left_out:
            logger.warning(
                "the audit leaves out the recurrent states of KV groups %s: their numbers are not known",
                left_out,
            )
        return found

    def _find_auto_size(self) -> AutoSize:
        return find_auto_size(self.config, self._mount if self.has_region else None, self.system_root)

    def _lock_instance(self) -> InstanceLock | None:
        """Lock the instance id; None where it is only a name that the engine gave itself."""
        if not self.has_region and self.config.settings.instance_id is None:
            return None
        try:
            lock = InstanceLock(self._instance_id)
        except RegionError as error:
            if self.has_region:
                raise
            # Private rows are safe from other engines, and containers without shared memory use them.
            logger.warning("instance_id is not checked for a second use on this machine: %s", error)
            return None
        remove_dead_locks()
        return lock

    def _check_caches(self, kv_caches: CanonicalKVCaches) -> None:
        plan_layout(kv_caches, self.block_size_factor)
        check_page_sizes(self.config.groups, kv_caches)


def _count_blocks(memory: int | HostSize | AutoSize | None, row_stride: int) -> int:
    if isinstance(memory, AutoSize):
        if memory.num_bytes < row_stride:
            remedy = (
                f"leaves {memory}, less than one block of {row_stride} bytes over all workers: give the container "
                "more memory, or a size"
            )
            raise ConfigError("cpu_bytes_to_use", "auto", remedy)
        return memory.num_bytes // row_stride
    if not isinstance(memory, int):
        remedy = (
            'is required: host memory over all workers, such as "8GiB", or "auto"; one block takes '
            f"{row_stride} bytes"
        )
        raise ConfigError("cpu_bytes_to_use", memory, remedy)
    if memory < row_stride:
        remedy = f"is less than one block over all workers: give at least {row_stride} bytes"
        raise ConfigError("cpu_bytes_to_use", memory, remedy)
    return memory // row_stride
