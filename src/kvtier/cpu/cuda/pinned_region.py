"""Registers rows with CUDA as pinned memory, so that the device reads and writes them without an extra copy.

Rows are registered in chunks, because one call over hundreds of GiB fails on some drivers. CUDA refuses a copy that
crosses from one registration into another, so a chunk ends where a row ends, and ``descriptors`` cuts copies there.

Not yet confirmed on a device.
"""

import logging
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

cuda: Any = torch.cuda  # Any: torch does not annotate its CUDA interface

CHUNK_BYTES = 1 << 30
"""Approximate bytes per call. One call over 512 GiB fails on drivers from r580 on; smaller chunks cost calls, and split
each copy that spans two of them."""

REGISTER_FLAGS = 1 | 2
"""cudaHostRegisterPortable | cudaHostRegisterMapped: pinned for every context, and readable by kernels."""


class PinRuntime(Protocol):
    """Pins host memory; status codes are CUDA's, 0 is success."""

    def register(self, address: int, num_bytes: int) -> int:
        """Pin memory."""

    def unregister(self, address: int) -> int:
        """Unpin memory."""

    def clear_error(self) -> None:
        """Clear the returned error, so that no later call reports it."""


class TorchPinRuntime:
    """CUDA's runtime as loaded by torch."""

    def __init__(self) -> None:
        self._runtime = cuda.cudart()

    def register(self, address: int, num_bytes: int) -> int:
        """Pin memory for every context, and for kernels."""
        return int(self._runtime.cudaHostRegister(address, num_bytes, REGISTER_FLAGS))

    def unregister(self, address: int) -> int:
        """Unpin memory."""
        return int(self._runtime.cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Launch something with torch, which reports and clears the runtime's error before the engine launches."""
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes that one call registers."""

    address: int
    num_bytes: int


class PinnedRows:
    """Rows after their registration was tried.

    Args:
        address: of the first row.
        row_stride: bytes from one row to the next.
        slots_per_chunk: no copy may cross a multiple of this number of slots.
        chunks: what is registered: every row, or nothing.
        runtime: unregisters it.

    Attributes:
        address: as given.
        row_stride: as given.
        slots_per_chunk: as given.
        runtime: as given.
    """

    def __init__(
        self, address: int, row_stride: int, slots_per_chunk: int, chunks: list[Chunk], runtime: PinRuntime
    ) -> None:
        self.address = address
        self.row_stride = row_stride
        self.slots_per_chunk = slots_per_chunk
        self._chunks = chunks
        self.runtime = runtime

    @property
    def is_pinned(self) -> bool:
        """Whether every row is registered; otherwise none is."""
        return bool(self._chunks)

    def unpin(self) -> None:
        """Unregister the rows; idempotent. They must still be mapped, and no copy may be in flight."""
        chunks, self._chunks = self._chunks, []
        _unregister(chunks, self.runtime)


def plan_slots_per_chunk(row_stride: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the rows of a chunk, which ends at the end of a row and of a page of memory. Pure.

    Two chunks must not share a page. Rows that are not a multiple of a page may need larger chunks for that.
    """
    slots_per_page_end = math.lcm(row_stride, mmap.PAGESIZE) // row_stride
    wanted = max(1, chunk_bytes // row_stride)
    return max(1, wanted // slots_per_page_end) * slots_per_page_end


def plan_chunks(address: int, num_slots: int, row_stride: int, slots_per_chunk: int) -> list[Chunk]:
    """Return the chunks that cover the rows, in order. Pure."""
    return [
        Chunk(address + first * row_stride, min(slots_per_chunk, num_slots - first) * row_stride)
        for first in range(0, num_slots, slots_per_chunk)
    ]


def pin_rows(
    address: int,
    num_slots: int,
    row_stride: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    runtime: PinRuntime | None = None,
) -> PinnedRows:
    """Register all rows or none: copies to rows that are not pinned are correct, but slow.

    Args:
        address: of the first row, at the start of a page of memory.
        num_slots: rows.
        row_stride: bytes from one row to the next.
        chunk_bytes: approximate bytes per call.
        runtime: pins memory; None: CUDA's as loaded by torch.
    """
    slots_per_chunk = plan_slots_per_chunk(row_stride, chunk_bytes)
    runtime = TorchPinRuntime() if runtime is None else runtime
    registered: list[Chunk] = []
    for chunk in plan_chunks(address, num_slots, row_stride, slots_per_chunk):
        code = runtime.register(chunk.address, chunk.num_bytes)
        if code != 0:
            logger.warning(
                "%d bytes of rows cannot be pinned (CUDA error %d after %d of them): copies will be slow; "
                "raise the limit of locked memory, or lower cpu_bytes_to_use",
                num_slots * row_stride,
                code,
                chunk.address - address,
            )
            runtime.clear_error()
            _unregister(registered, runtime)
            return PinnedRows(address, row_stride, slots_per_chunk, [], runtime)
        registered.append(chunk)
    return PinnedRows(address, row_stride, slots_per_chunk, registered, runtime)


def _unregister(chunks: Sequence[Chunk], runtime: PinRuntime) -> None:
    for chunk in reversed(chunks):
        code = runtime.unregister(chunk.address)
        if code != 0:
            runtime.clear_error()
            logger.warning(
                "%d bytes at %#x stay pinned (CUDA error %d)", chunk.num_bytes, chunk.address, code
            )
