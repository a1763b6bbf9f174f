"""The ways to carry out the copies of a transfer between device memory and rows.

- ``RunLauncher``: one ``copy_`` of torch's per span. It works on any device without another library, but costs the host
  some microseconds per span, so that the host is the limit for many small spans.
- ``BatchLauncher``: all spans with one call of ``cudaMemcpyBatchAsync``.
- ``KernelLauncher``: all spans with one kernel that reads and writes pinned host memory.
- ``StagedCopier``: through a buffer on the device, so that the link moves whole rows.
"""

import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.cpu.cuda.descriptors import Offsets, Spans, cut_spans
from kvtier.cpu.cuda.span_copier import Memories
from kvtier.cpu.row_layout import GroupMoves, PagePlace, RowLayout, plan_slot_ranges, split_moves
from kvtier.errors import DeviceCopyError

PIECE_BYTES = 32 << 10
"""Most bytes that a program copies before it takes the next piece. Smaller pieces make a longer table, larger ones
leave programs idle at the end."""

MAX_PROGRAMS = 64
"""Programs of a launch. Some 100 KiB in flight hide a link's latency; more programs would only take processors from the
model, fewer may not fill the link."""

LANES = 512
"""Words that a program copies at a time: 4 KiB."""

HOST_POINTERS = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: registered memory has one address on host and device."""

STAGING_BYTES = 16 << 20
"""Device memory of one direction's staging buffer, at least one row. Filling 16 MiB takes some 20 us, sending it 300 us
or more; a larger buffer gains little and takes memory from the model."""


class RunLauncher:
    """Launches a copy for each span.

    Args:
        memories: both sides of the spans.
    """

    def __init__(self, memories: Memories) -> None:
        self._memories = memories

    def launch(self, spans: Spans, *, is_store: bool) -> None:
        """Launch every span, in order."""
        rows = self._memories.rows
        for memory, device_offset, row_offset, size in zip(
            *(column.tolist() for column in spans), strict=True
        ):
            on_device = self._memories.device[memory][device_offset : device_offset + size]
            in_row = rows[row_offset : row_offset + size]
            if is_store:
                in_row.copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(in_row, non_blocking=True)


class BatchLauncher:
    """Launches all spans as one batch.

    Args:
        memories: both sides of the spans; the rows should be pinned.
        bindings: ``cuda.bindings.runtime``.
        current_stream: returns the handle of the stream to launch on.
    """

    def __init__(self, memories: Memories, bindings: Any, current_stream: Callable[[], int]) -> None:  # noqa: ANN401  # no types where it is not installed
        self._memories = memories
        self._bindings = bindings
        self._current_stream = current_stream
        self._attributes = bindings.cudaMemcpyAttributes()
        # In stream order: a store reads what earlier computation wrote.
        self._attributes.srcAccessOrder = bindings.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes.flags = int(bindings.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)

    def launch(self, spans: Spans, *, is_store: bool) -> None:
        """Launch every span; they may run in any order.

        Raises:
            DeviceCopyError: the runtime refused; some of the copies may have been launched.
        """
        stream = self._current_stream()
        if stream == 0:
            raise DeviceCopyError("cudaMemcpyBatchAsync", "the default stream", len(spans.sizes), None)
        on_device, in_rows = self._memories.addresses(spans)
        destinations, sources = (in_rows, on_device) if is_store else (on_device, in_rows)
        # The runtime has read the lists when the call returns.
        code, *failed = self._bindings.cudaMemcpyBatchAsync(
            destinations.tolist(),
            sources.tolist(),
            spans.sizes.tolist(),
            len(spans.sizes),
            [self._attributes],
            [0],
            1,
            stream,
        )
        if int(code) != 0:
            raise DeviceCopyError(
                "cudaMemcpyBatchAsync", code, len(spans.sizes), failed[0] if failed else None
            )


class Pieces(NamedTuple):
    """Pieces that are copied in words of one size.

    Attributes:
        aligned_bytes: 16 divides every address and size; 8 divides every address; or 1.
        table: sources, destinations and sizes, shape (3, num_pieces), int64, contiguous.
    """

    aligned_bytes: int
    table: Offsets


class KernelLauncher:
    """Launches one kernel for the spans of each alignment.

    Args:
        memories: both sides of the spans; the rows must be pinned.
        kernel: ``copy_kernel.copy_pieces``.
    """

    def __init__(self, memories: Memories, kernel: Any) -> None:  # noqa: ANN401  # Triton has no types for a kernel
        self._memories = memories
        self._kernel = kernel
        self._device = memories.device[0].device

    def launch(self, spans: Spans, *, is_store: bool) -> None:
        """Launch every span; they may run in any order."""
        cut = cut_spans(spans, PIECE_BYTES)
        on_device, in_rows = self._memories.addresses(cut)
        sources, destinations = (on_device, in_rows) if is_store else (in_rows, on_device)
        for aligned_bytes, table in plan_pieces(np.stack((sources, destinations, cut.sizes))):
            num_pieces = table.shape[1]
            self._kernel[(min(num_pieces, MAX_PROGRAMS),)](
                upload(table, self._device),
                num_pieces,
                ALIGNED_BYTES=aligned_bytes,
                LANES=LANES,
            )


class StagedCopier:
    """Copies through a buffer on the device, so that the link moves whole rows; every call only launches.

    It works on tensors of any device; on the CPU a launch copies at once.

    Thread: the launches of one copier must be ordered on one stream, because they share the buffer.

    Args:
        layout: the bytes within a row.
        pages: the canonical tensors, each shape (num_blocks, page_bytes), int8, on the device.
        rows: the worker's part of all rows, shape (num_slots, part_bytes), int8, in pinned host memory.
        staging_bytes: size of the buffer; raised to one row.
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
        """Launch device -> rows, which also zeroes the tails of the rows."""
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
        """Drop tensors and rows; idempotent. All launched copies must have ended."""
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
        index = np.stack((portion.device_blocks, places // factor, places % factor))
        blocks, staged, sub_blocks = upload(index, self._staging.device)
        return blocks, staged, sub_blocks


def upload(array: Offsets, device: torch.device) -> torch.Tensor:
    """Return the array on ``device``, valid for work launched later on the current stream.

    Args:
        array: int64; the caller may change it after the return, unless the device is the CPU.
        device: the destination.
    """
    if device.type != "cuda":
        return torch.from_numpy(array)
    staged = torch.empty(array.shape, dtype=torch.int64, pin_memory=True)
    staged.numpy()[...] = array
    return staged.to(device, non_blocking=True)


def find_batch_bindings() -> tuple[Any, str | None]:  # Any: no types where it is not installed
    """Return cuda-python's runtime, and why it cannot be used: None where it can."""
    try:
        bindings = importlib.import_module("cuda.bindings.runtime")
    except Exception as error:  # noqa: BLE001  # thread top: a broken optional library raises any type
        return None, f"cuda-python cannot be imported ({error}): pip install cuda-bindings of your CUDA"
    if not hasattr(bindings, "cudaMemcpyBatchAsync"):
        return None, "cuda-python is older than CUDA 12.8: install a later cuda-bindings"
    return bindings, None


def plan_pieces(table: Offsets) -> Iterator[Pieces]:
    """Yield the pieces grouped by alignment, the widest words first. Pure.

    Args:
        table: sources, destinations and sizes, shape (3, num_pieces), int64.
    """
    addresses = table[0] | table[1]
    is_wide = (addresses | table[2]) & 15 == 0
    is_odd = addresses & 7 != 0
    for aligned_bytes, chosen in ((16, is_wide), (8, ~is_wide & ~is_odd), (1, is_odd)):
        if chosen.any():
            # Contiguous: a kernel reads the table as plain memory, and numpy's indexing by column may transpose it.
            yield Pieces(aligned_bytes, np.ascontiguousarray(table[:, chosen]))


def find_kernel(device: torch.device) -> tuple[Any, str | None]:  # Any: Triton has no types for a kernel
    """Return the kernel, and why it cannot be used: None where it can."""
    try:
        kernel = importlib.import_module("kvtier.cpu.cuda.copy_kernel").copy_pieces
    except Exception as error:  # noqa: BLE001  # thread top: a broken optional library raises any type
        return None, f"Triton cannot be imported ({error}): install torch's build for CUDA, which includes it"
    if not _has_host_pointers(device):
        return None, "the device maps registered host memory at other addresses than the host"
    return kernel, None


def _has_host_pointers(device: torch.device) -> bool:
    """Query the driver. An error counts as no: a kernel with a wrong address would end CUDA for the process."""
    value = ctypes.c_int(0)
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
            ctypes.byref(value), HOST_POINTERS, device.index or 0
        )
    except (OSError, AttributeError):
        return False
    return code == 0 and value.value == 1


def _view_ref(
    place: PagePlace, factor: int, pages: torch.Tensor, staging: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a ref's pages on the device and in the buffer, in words of eight bytes if they are aligned."""
    device = pages[:, : place.page_size_bytes]
    end = place.offset_bytes + factor * place.page_size_bytes
    staged = staging[:, place.offset_bytes : end].view(len(staging), factor, place.page_size_bytes)
    try:
        return device.view(torch.int64), staged.view(torch.int64)
    except RuntimeError:  # a size or stride is not a multiple of eight
        return device, staged
