"""Copies between an engine's KV cache tensors and the rows of the primary tier, for CPU and CUDA tensors.

It decides neither what is copied nor when: the connector submits jobs, ``row_layout`` says where bytes go. Both
kinds of memory keep the same promises; only the lane differs:

- CPU tensors: a thread for each direction (``copy_thread``) that copies with ``row_copy``. An engine's compute
  on CPU tensors is over when its call returns, so a store submitted afterwards finds the bytes it wants.
- CUDA tensors: a stream for each direction. It waits for what the compute stream holds at submission. Pages are
  gathered into a staging buffer on the device, so that the link sees one large copy a row and not one a page.

An engine may take its KV cache away for a while, to free the device's memory, and bring other tensors later: rows,
threads and streams stay, what leads to a tensor goes.

The launches on CUDA have not been confirmed on a device; what they launch is tested on CPU tensors.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from kvtier.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.copy_thread import CopyThread
from kvtier.cpu.memory_limits import find_memory_limit
from kvtier.cpu.queue_lane import QueueLane, Ticket
from kvtier.cpu.row_copy import RowCopier
from kvtier.cpu.row_layout import (
    GroupMoves,
    PagePlace,
    RowLayout,
    count_bytes,
    plan_layout,
    plan_moves,
    plan_slot_ranges,
    split_moves,
)
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.errors import KVCacheLayoutError, RegionMemoryError

logger = logging.getLogger(__name__)

STAGING_BYTES = 16 << 20
"""Device memory of one direction's staging buffer, at least one row. Filling 16 MiB takes some 20 us, sending it 300 us
or more; a larger buffer gains little and is memory that the model does not get."""

cuda: Any = torch.cuda  # Any: torch does not annotate its CUDA interface

GPU_TO_CPU = TransferType(GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium())
CPU_TO_GPU = TransferType(CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium())


class Copier(Protocol):
    """Moves the bytes of one transfer; a CUDA copier has only launched them when it returns."""

    def store(self, moves: Sequence[GroupMoves]) -> None:
        """Copy device -> rows."""

    def load(self, moves: Sequence[GroupMoves]) -> None:
        """Copy rows -> device."""

    def release(self) -> None:
        """Let go of tensors and rows; idempotent. There must be no copy any more."""


class Lane(Protocol):
    """Carries out the copies of one direction in the order of submission."""

    def submit(self, job_id: TransferJobId, num_bytes: int, copy: Callable[[], None]) -> bool:
        """Accept a copy; False when none is accepted any more."""

    def take_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call; does not block."""

    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has ended."""

    def shutdown(self) -> None:
        """Let begun copies end and accept no more; idempotent."""


class CpuGpuOffloadingHandlers:
    """Both directions between one worker's KV cache and its part of the rows.

    Thread: one thread calls.

    Args:
        kv_caches: the engine's tensors, all on one device.
        block_size_factor: device blocks in an offloaded block.
        num_cpu_blocks: slots.
        mmap_region: where the rows are; None makes private ones.

    Raises:
        KVCacheLayoutError: the tensors cannot be placed in rows.
        WorkerAreaError: the worker's part of the region is too small for them.
        RegionMemoryError: there is no room for private rows.

    Attributes:
        gpu_to_cpu_handler: stores.
        cpu_to_gpu_handler: loads.
        layout: where bytes are in a row.
        rows: this worker's part of the rows, shape (num_cpu_blocks, layout.part_bytes), int8, CPU.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int,
        num_cpu_blocks: int,
        mmap_region: SharedOffloadRegion | None = None,
    ) -> None:
        self.layout = plan_layout(kv_caches, block_size_factor)
        pages = _take_pages(kv_caches)
        self._device = _common_device(pages)
        is_cuda = self._device.type == "cuda"
        self.rows = _make_rows(self.layout, num_cpu_blocks, mmap_region, is_pinned=is_cuda)
        self._unpin = _pin_region(mmap_region) if is_cuda and mmap_region is not None else None
        self._has_ended = False
        self._copiers: tuple[Copier, ...] = ()
        self._directions = (
            RowHandler(GPU_TO_CPU, self.layout, num_cpu_blocks, _make_lane(GPU_TO_CPU, self._device)),
            RowHandler(CPU_TO_GPU, self.layout, num_cpu_blocks, _make_lane(CPU_TO_GPU, self._device)),
        )
        self.gpu_to_cpu_handler: OffloadingHandler = self._directions[0]
        self.cpu_to_gpu_handler: OffloadingHandler = self._directions[1]
        self._use(pages)

    @property
    def is_attached(self) -> bool:
        """Whether there are tensors to copy from and to."""
        return bool(self._copiers)

    def attach(self, kv_caches: CanonicalKVCaches) -> None:
        """Copy between the rows and these tensors from now on; those before are let go. Nothing after shutdown.

        Raises:
            KVCacheLayoutError: they are laid out otherwise than those before, or on another device; nothing changes.
        """
        layout = plan_layout(kv_caches, self.layout.block_size_factor)
        pages = _take_pages(kv_caches)
        device = _common_device(pages)
        if layout != self.layout or device != self._device:
            raise KVCacheLayoutError(
                f"the KV cache came back on {device} as {layout}, it was on {self._device} as {self.layout}: "
                "register tensors of the same layout, or start the engine anew"
            )
        self.detach()
        if not self._has_ended:
            self._use(pages)

    def detach(self) -> None:
        """Let go of the tensors; what the rows hold stays, and transfers are declined until ``attach``. Idempotent.

        Thread: blocks until begun copies have ended; they are reported as ever.
        """
        for direction in self._directions:
            direction.detach()
        for copier in self._copiers:
            copier.release()
        self._copiers = ()

    def shutdown(self) -> None:
        """End both directions after the copies they have begun, and let go of the rows; idempotent."""
        self._has_ended = True
        for direction in self._directions:
            direction.shutdown()
        # Before the rows are let go: they may be what keeps the pinned mapping alive.
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.detach()
        self.rows = self.rows[:0].clone()

    def _use(self, pages: Sequence[torch.Tensor]) -> None:
        if self._device.type == "cuda":
            # One each: a copier's staging buffer is ordered by a single stream.
            self._copiers = tuple(StagedCopier(self.layout, pages, self.rows) for _ in self._directions)
        else:
            copier = RowCopier(self.layout, [page.numpy() for page in pages], self.rows.numpy())
            self._copiers = (copier, copier)
        storing, loading = self._directions
        storing.attach(self._copiers[0].store)
        loading.attach(self._copiers[1].load)


class RowHandler(OffloadingHandler):
    """One direction between device blocks and rows: plans a transfer at once, leaves its copy to a lane.

    Args:
        transfer_type: GPU_TO_CPU or CPU_TO_GPU.
        layout: where bytes are in a row.
        num_slots: slots of the primary tier.
        lane: carries copies out in order.
    """

    def __init__(
        self,
        transfer_type: TransferType,
        layout: RowLayout,
        num_slots: int,
        lane: Lane,
    ) -> None:
        self._transfer_type = transfer_type
        self._layout = layout
        self._num_slots = num_slots
        self._lane = lane
        self._copy: Callable[[Sequence[GroupMoves]], None] | None = None
        self._unreported: set[TransferJobId] = set()

    def attach(self, copy: Callable[[Sequence[GroupMoves]], None]) -> None:
        """Let ``copy`` move the bytes of each transfer that comes from now on."""
        self._copy = copy

    def detach(self) -> None:
        """Decline transfers until ``attach``; blocks until those that have begun have ended."""
        self._copy = None
        self._lane.wait(self._unreported)

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        """Start a transfer; False, with a logged reason, when its ends do not fit or there is nothing to copy."""
        if self._copy is None:
            logger.error(
                "job %d, %s to %s, is declined: no KV cache is registered", job_id, *self._transfer_type
            )
            return False
        try:
            moves = plan_moves(self._layout, *self._ends(spec), self._num_slots)
        except KVCacheLayoutError as error:
            logger.error("job %d, %s to %s, is declined: %s", job_id, *self._transfer_type, error)  # noqa: TRY400  # the message says it all
            return False
        is_begun = self._lane.submit(job_id, count_bytes(self._layout, moves), partial(self._copy, moves))
        if is_begun:
            self._unreported.add(job_id)
        return is_begun

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, in the order of submission."""
        finished = self._lane.take_finished()
        self._unreported.difference_update(result.job_id for result in finished)
        return finished

    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has ended, well or badly; unknown ids are ignored."""
        self._lane.wait(job_ids)

    def shutdown(self) -> None:
        """Let begun copies end, fail queued ones and decline what comes later; idempotent."""
        self._lane.shutdown()

    def _ends(self, spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        is_store = self._transfer_type == GPU_TO_CPU
        device, rows = (spec.source, spec.destination) if is_store else (spec.destination, spec.source)
        if not isinstance(device, GPULoadStoreSpec) or not isinstance(rows, CPULoadStoreSpec):
            raise KVCacheLayoutError(
                f"{spec.source!r} to {spec.destination!r} is not a transfer of this direction"
            )
        return device, rows


class StagedCopier:
    """Copies through a buffer on the device, so that the link sees whole rows; every call only launches.

    It works on the tensors of any device; on the CPU a launch is the copy itself.

    Thread: the launches of one copier must be ordered on one stream, because they share the buffer.

    Args:
        layout: where bytes are in a row.
        pages: the canonical tensors, each shape (num_blocks, page_bytes), int8, on the device.
        rows: the worker's part of all rows, shape (num_slots, part_bytes), int8, in pinned host memory.
        staging_bytes: size of the buffer; at least one row is taken.
    """

    def __init__(
        self,
        layout: RowLayout,
        pages: Sequence[torch.Tensor],
        rows: torch.Tensor,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._layout = layout
        self._rows = rows
        num_staged = min(len(rows), max(1, staging_bytes // layout.part_bytes))
        self._staging = torch.zeros((num_staged, layout.part_bytes), dtype=torch.int8, device=pages[0].device)
        self._refs = [
            [
                _view_ref(place, layout.block_size_factor, pages[place.tensor_idx], self._staging)
                for place in group.places
            ]
            for group in layout.groups
        ]

    def store(self, moves: Sequence[GroupMoves]) -> None:
        """Launch device -> rows; the tails of the rows are zeroed by it."""
        for portion in self._portions(moves):
            blocks, staged, sub_blocks = self._index(portion)
            for device_pages, staged_pages in self._refs[portion.group_idx]:
                staged_pages[staged, sub_blocks] = device_pages.index_select(0, blocks)
            self._staging[:, self._layout.groups[portion.group_idx].used_bytes :] = 0
            for staged_row, slot, start, end in plan_slot_ranges(self._layout, portion, has_tail=True):
                self._rows[slot, start:end].copy_(self._staging[staged_row, start:end], non_blocking=True)

    def load(self, moves: Sequence[GroupMoves]) -> None:
        """Launch rows -> device."""
        for portion in self._portions(moves):
            for staged_row, slot, start, end in plan_slot_ranges(self._layout, portion, has_tail=False):
                self._staging[staged_row, start:end].copy_(self._rows[slot, start:end], non_blocking=True)
            blocks, staged, sub_blocks = self._index(portion)
            for device_pages, staged_pages in self._refs[portion.group_idx]:
                device_pages.index_copy_(0, blocks, staged_pages[staged, sub_blocks])

    def release(self) -> None:
        """Let go of tensors and rows; idempotent. What was launched must have ended."""
        self._refs = []
        self._rows = self._rows[:0].clone()
        self._staging = self._staging[:0].clone()

    def _portions(self, moves: Sequence[GroupMoves]) -> list[GroupMoves]:
        factor, max_slots = self._layout.block_size_factor, len(self._staging)
        return [portion for move in moves for portion in split_moves(move, factor, max_slots)]

    def _index(self, portion: GroupMoves) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return device blocks, rows of the buffer and sub-blocks as index tensors on the device."""
        factor = self._layout.block_size_factor
        places = np.arange(len(portion.device_blocks)) + portion.first_sub_block
        index = torch.from_numpy(np.stack((portion.device_blocks, places // factor, places % factor)))
        blocks, staged, sub_blocks = index.to(self._staging.device, non_blocking=True)
        return blocks, staged, sub_blocks


class CudaQueue:
    """A stream beside the compute stream, for the copies of one direction.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = cuda.Stream(device)

    def launch(self, copy: Callable[[], None]) -> Ticket:
        """Launch ``copy`` after what the compute stream holds now.

        A store needs what compute is still writing; a load must not overwrite what compute is still reading.
        When ``copy`` raises, nothing of it is running any more by the time the error is passed on.
        """
        start = cuda.Event(enable_timing=True)
        end = cuda.Event(enable_timing=True)
        self._stream.wait_stream(cuda.current_stream(self._device))
        try:
            with cuda.stream(self._stream):
                start.record()
                copy()
                end.record()
        except BaseException:
            self._stream.synchronize()
            raise
        return CudaTicket(self._device, start, end)


class CudaTicket:
    """A launched copy on a stream."""

    def __init__(self, device: torch.device, start: torch.Event, end: torch.Event) -> None:
        self._device = device
        self._start = start
        self._end = end

    def is_done(self) -> bool:
        """Return True when the device has passed the copy."""
        return bool(self._end.query())

    def block(self) -> None:
        """Block until the device has passed the copy."""
        self._end.synchronize()

    def publish(self) -> None:
        """Order compute launched from now on after the copy."""
        cuda.current_stream(self._device).wait_event(self._end)

    def elapsed_s(self) -> float:
        """Return the seconds between the copy's first launch and its end, as the device measured them."""
        return float(self._start.elapsed_time(self._end)) / 1000


def _view_ref(
    place: PagePlace, factor: int, pages: torch.Tensor, staging: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a ref's pages on the device and in the buffer, in words of eight bytes where they are aligned."""
    device = pages[:, : place.page_size_bytes]
    end = place.offset_bytes + factor * place.page_size_bytes
    staged = staging[:, place.offset_bytes : end].view(len(staging), factor, place.page_size_bytes)
    try:
        return device.view(torch.int64), staged.view(torch.int64)
    except RuntimeError:  # sizes or strides that eight does not divide
        return device, staged


def _make_lane(transfer_type: TransferType, device: torch.device) -> Lane:
    return QueueLane(transfer_type, CudaQueue(device)) if device.type == "cuda" else CopyThread(transfer_type)


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
            "bytes of a block must follow one another, with blocks in the first dimension"
        ) from error
    if pages.shape[1] < cache.page_size_bytes:
        raise KVCacheLayoutError(
            f"tensor {index} has {pages.shape[1]} bytes a block, page_size_bytes={cache.page_size_bytes} says more"
        )
    return pages


def _common_device(pages: Sequence[torch.Tensor]) -> torch.device:
    devices = {page.device for page in pages}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise KVCacheLayoutError(f"the KV cache is on {names}: it must be on one CPU or CUDA device")
    return devices.pop()


def _make_rows(
    layout: RowLayout, num_slots: int, region: SharedOffloadRegion | None, *, is_pinned: bool
) -> torch.Tensor:
    if region is None:
        return _make_private_rows(num_slots, layout.part_bytes, is_pinned=is_pinned)
    if region.num_blocks != num_slots:
        raise KVCacheLayoutError(f"the region has {region.num_blocks} rows, num_cpu_blocks={num_slots}")
    return region.create_next_view(layout.part_bytes)


def _make_private_rows(num_slots: int, part_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Take the memory now: without a region it is nobody else's, and the first store should not fault pages."""
    size_bytes, limit = num_slots * part_bytes, find_memory_limit()
    if limit is not None and size_bytes > limit.available_bytes:
        raise RegionMemoryError(
            f"{num_slots} blocks need {size_bytes} bytes, {limit.source} leaves {limit.available_bytes}: "
            "lower cpu_bytes_to_use, or raise the container's memory limit"
        )
    return torch.empty((num_slots, part_bytes), dtype=torch.int8, pin_memory=is_pinned).zero_()


def _pin_region(region: SharedOffloadRegion) -> Callable[[], None] | None:
    """Register the region with CUDA; return how to undo it, None when the driver refused."""
    address = np.frombuffer(region.mapping(), dtype=np.int8).ctypes.data
    runtime = cuda.cudart()
    code = runtime.cudaHostRegister(address, region.total_size_bytes, 0)
    if int(code) != 0:
        logger.warning(
            "region %s cannot be pinned (CUDA error %s): copies will be slow", region.mmap_path, code
        )
        return None
    return partial(runtime.cudaHostUnregister, address)
