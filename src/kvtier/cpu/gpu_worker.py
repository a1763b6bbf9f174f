"""Copies between an engine's KV cache tensors and the rows of the primary tier, for CPU and CUDA tensors.

The connector submits jobs; ``row_layout`` plans which bytes move. Both kinds of memory have the same contract and
differ in their transfer queue:

- CPU tensors: a thread per direction (``CopyThread``) that copies with ``row_copy``. An engine's compute on CPU tensors
  has ended when its call returns, so a store submitted afterwards finds the bytes.
- CUDA tensors: a stream per direction. It waits for the work on the compute stream at submission. The way to copy is
  chosen at the start by proof and measurement (``cuda.copy_autotune``); the rows are pinned.

An engine may take its KV cache away for a while, to free the device's memory, and bring other tensors later: rows,
threads and streams are kept; tensor references are dropped.

The launches on CUDA have not been confirmed on a device; what they launch is tested on CPU tensors.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.base import (
    BlockIds,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.config import CudaCopier
from kvtier.cpu.audit_handler import AuditHandler
from kvtier.cpu.compare import PageFormat
from kvtier.cpu.cuda.copy_autotune import Choice
from kvtier.cpu.cuda.pinned_region import PinnedRows, pin_rows
from kvtier.cpu.cuda.start import StreamQueue, choose_copiers, map_rows, pin_region
from kvtier.cpu.row_copy import RowCopier
from kvtier.cpu.row_handler import CPU_TO_GPU, GPU_TO_CPU, RowHandler, TransferQueue
from kvtier.cpu.row_layout import (
    GroupMoves,
    RowLayout,
    plan_layout,
)
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.transfer_queue import CopyThread, DeviceTransferQueue
from kvtier.errors import KVCacheLayoutError, RegionMemoryError
from kvtier.limits import find_memory_limit

logger = logging.getLogger(__name__)


class Copier(Protocol):
    """Moves the bytes of one transfer; a CUDA copier has only launched the copies when it returns."""

    def store(self, moves: Sequence[GroupMoves]) -> None:
        """Copy device -> rows."""

    def load(self, moves: Sequence[GroupMoves]) -> None:
        """Copy rows -> device."""

    def release(self) -> None:
        """Drop tensors and rows; idempotent. No copy may be in flight."""


class CpuGpuOffloadingHandlers:
    """Both directions between one worker's KV cache and its part of the rows.

    Thread: all calls come from one thread.

    Args:
        kv_caches: the engine's tensors, all on one device.
        block_size_factor: device blocks in an offloaded block.
        num_cpu_blocks: slots.
        mmap_region: the rows; None: private ones.
        cuda_copier: how to move bytes of CUDA tensors.
        audit_formats: what the bytes of each group mean, to compare blocks with rows; none compares none.

    Raises:
        KVCacheLayoutError: the tensors cannot be placed in rows.
        WorkerAreaError: the worker's part of the region is too small for them.
        RegionMemoryError: there is no memory for private rows.
        ConfigError: ``cuda_copier`` cannot be used on this machine.
        DeviceCopyError: no way to copy moves the right bytes.

    Attributes:
        gpu_to_cpu_handler: stores.
        cpu_to_gpu_handler: loads.
        audit_handler: comparisons; None without ``audit_formats``.
        layout: the bytes within a row.
        rows: this worker's part of the rows, shape (num_cpu_blocks, layout.part_bytes), int8, CPU.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int,
        num_cpu_blocks: int,
        mmap_region: SharedOffloadRegion | None = None,
        cuda_copier: CudaCopier = CudaCopier.AUTO,
        audit_formats: Sequence[PageFormat] = (),
    ) -> None:
        self.layout = plan_layout(kv_caches, block_size_factor)
        pages = _take_pages(kv_caches)
        self._device = _common_device(pages)
        is_cuda = self._device.type == "cuda"
        self.rows = _make_rows(self.layout, num_cpu_blocks, mmap_region, is_mapped=is_cuda)
        self._pinned: PinnedRows | None = None
        self._choice: Choice | None = None
        if is_cuda:
            self._pinned, self._choice = _start_cuda(self.layout, pages, self.rows, mmap_region, cuda_copier)
        self._has_ended = False
        self._copiers: tuple[Copier, ...] = ()
        self._directions = (
            RowHandler(GPU_TO_CPU, self.layout, num_cpu_blocks, _make_queue(GPU_TO_CPU, self._device)),
            RowHandler(CPU_TO_GPU, self.layout, num_cpu_blocks, _make_queue(CPU_TO_GPU, self._device)),
        )
        self.gpu_to_cpu_handler: OffloadingHandler = self._directions[0]
        self.cpu_to_gpu_handler: OffloadingHandler = self._directions[1]
        self.audit_handler = (
            AuditHandler(self.layout, self.rows.numpy(), audit_formats) if audit_formats else None
        )
        self._use(pages)

    @property
    def is_attached(self) -> bool:
        """Whether there are tensors to copy from and to."""
        return bool(self._copiers)

    def attach(self, kv_caches: CanonicalKVCaches) -> None:
        """Use these tensors from now on and drop the previous ones. Does nothing after shutdown.

        Raises:
            KVCacheLayoutError: their layout or device differs from that of the previous ones; nothing changes.
        """
        layout = plan_layout(kv_caches, self.layout.block_size_factor)
        pages = _take_pages(kv_caches)
        device = _common_device(pages)
        if layout != self.layout or device != self._device:
            raise KVCacheLayoutError(
                f"the KV cache is now on {device} as {layout}, before it was on {self._device} as {self.layout}: "
                "register tensors of the same layout, or restart the engine"
            )
        self.detach()
        if not self._has_ended:
            self._use(pages)

    def detach(self) -> None:
        """Drop the tensors and decline transfers until ``attach``; the rows keep their bytes. Idempotent.

        Thread: blocks until started copies have ended; they are reported as usual.
        """
        for direction in self._directions:
            direction.detach()
        if self.audit_handler is not None:
            self.audit_handler.detach()
        for copier in self._copiers:
            copier.release()
        self._copiers = ()

    def shutdown(self) -> None:
        """Shut down both directions after their started copies, then drop the rows; idempotent."""
        self._has_ended = True
        for direction in self._directions:
            direction.shutdown()
        if self.audit_handler is not None:
            self.audit_handler.shutdown()
        # Before the rows are dropped: they may be what keeps the pinned mapping alive.
        if self._pinned is not None:
            self._pinned.unpin()
        self.detach()
        self.rows = self.rows[:0].clone()

    def _use(self, pages: Sequence[torch.Tensor]) -> None:
        if self._choice is not None and self._pinned is not None:
            # One copier per direction: its memory on the device is ordered by a single stream.
            self._copiers = tuple(
                way.build(self.layout, pages, self.rows, self._pinned.slots_per_chunk)
                for way in (self._choice.store, self._choice.load)
            )
        else:
            copier = RowCopier(self.layout, [page.numpy() for page in pages], self.rows.numpy())
            self._copiers = (copier, copier)
        storing, loading = self._directions
        storing.attach(self._copiers[0].store)
        loading.attach(self._copiers[1].load)
        if self.audit_handler is not None:
            self.audit_handler.attach(partial(_read_pages, pages))


class OthersStores(OffloadingHandler):
    """Ends the stores of a worker whose bytes another worker stores. Used from one thread.

    Where several workers hold the same bytes (latent attention, fewer KV heads than workers), a row has them once: the
    first of them copies them there and each loads them. The others end a store at once: its job ends when the first
    has copied.
    """

    def __init__(self) -> None:
        self._finished: list[TransferResult] = []

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[TransferJobId]) -> None:
        pass  # every job has ended


def _make_queue(transfer_type: TransferType, device: torch.device) -> TransferQueue:
    return (
        DeviceTransferQueue(transfer_type, StreamQueue(device))
        if device.type == "cuda"
        else CopyThread(transfer_type)
    )


def _take_pages(kv_caches: CanonicalKVCaches) -> list[torch.Tensor]:
    return [_as_pages(index, tensor) for index, tensor in enumerate(kv_caches.tensors)]


def _as_pages(index: int, cache: CanonicalKVCacheTensor) -> torch.Tensor:
    """Return a canonical tensor as shape (num_blocks, page_bytes), int8, without copying it."""
    tensor = cache.tensor.detach()
    try:
        pages = tensor.view(torch.int8).view(tensor.shape[0], -1)
    except RuntimeError as error:
        raise KVCacheLayoutError(
            f"tensor {index} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and {tensor.dtype}: the "
            "bytes of a block must be contiguous, with blocks in the first dimension"
        ) from error
    if pages.shape[1] != cache.page_size_bytes:
        raise KVCacheLayoutError(
            f"tensor {index} has {pages.shape[1]} bytes per block, but page_size_bytes={cache.page_size_bytes}: set it "
            "to the bytes of a block, padding included; a ref's page_size_bytes leaves padding out"
        )
    return pages


def _read_pages(
    pages: Sequence[torch.Tensor], tensor_idx: int, blocks: BlockIds
) -> Callable[[], npt.NDArray[np.int8]]:
    """Begin to read device blocks for a comparison (``audit_handler.ReadPages``)."""
    tensor = pages[tensor_idx]
    if tensor.device.type == "cpu":
        return lambda: tensor.numpy()[blocks]
    # In the order of the compute stream, so that what computes the blocks has ended; blocks for the copy.
    found = tensor[torch.from_numpy(blocks).to(tensor.device)].cpu().numpy()
    return lambda: found


def _common_device(pages: Sequence[torch.Tensor]) -> torch.device:
    devices = {page.device for page in pages}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise KVCacheLayoutError(f"the KV cache is on {names}: it must be on one CPU or CUDA device")
    return devices.pop()


def _start_cuda(
    layout: RowLayout,
    pages: Sequence[torch.Tensor],
    rows: torch.Tensor,
    region: SharedOffloadRegion | None,
    wanted: CudaCopier,
) -> tuple[PinnedRows, Choice]:
    pinned = pin_rows(rows.data_ptr(), len(rows), layout.part_bytes) if region is None else pin_region(region)
    try:
        return pinned, choose_copiers(layout, pages, rows, pinned, wanted)
    except BaseException:
        pinned.unpin()
        raise


def _make_rows(
    layout: RowLayout, num_slots: int, region: SharedOffloadRegion | None, *, is_mapped: bool
) -> torch.Tensor:
    if region is None:
        return _make_private_rows(num_slots, layout.part_bytes, is_mapped=is_mapped)
    if region.num_blocks != num_slots:
        raise KVCacheLayoutError(f"the region has {region.num_blocks} rows, num_cpu_blocks={num_slots}")
    return region.create_next_view(layout.part_bytes)


def _make_private_rows(num_slots: int, part_bytes: int, *, is_mapped: bool) -> torch.Tensor:
    """Allocate the memory now: it is not shared, and the first store should not fault pages."""
    size_bytes, limit = num_slots * part_bytes, find_memory_limit()
    if limit is not None and size_bytes > limit.available_bytes:
        raise RegionMemoryError(
            f"{num_slots} blocks need {size_bytes} bytes, {limit.source} leaves {limit.available_bytes}: "
            "lower cpu_bytes_to_use, or raise the container's memory limit"
        )
    if is_mapped:
        return map_rows(num_slots, part_bytes)
    return torch.empty((num_slots, part_bytes), dtype=torch.int8).zero_()
