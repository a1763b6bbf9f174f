"""Registers the rows with CUDA, so that the link reads and writes them without a copy in between.

It maps no memory; ``shared_offload_region`` and ``gpu_worker`` do. Rows are registered in chunks, because one call
over hundreds of GiB fails on some drivers. A copy must not reach from one registration into another, CUDA refuses
it, so a chunk ends where a row ends, and a copy that spans rows is cut there (``descriptors``).

The calls have not been confirmed on a device.
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
"""Bytes registered by a call, about. One call over 512 GiB fails on drivers from r580 on; smaller chunks cost calls,
and a cut in each copy that would have spanned two of them."""

REGISTER_FLAGS = 1 | 2
"""cudaHostRegisterPortable | cudaHostRegisterMapped: pinned for every context, and readable by kernels."""


class PinRuntime(Protocol):
    """What pins host memory; codes are CUDA's, 0 is success."""

    def register(self, address: int, num_bytes: int) -> int:
        """Pin memory."""

    def unregister(self, address: int) -> int:
        """Undo it."""

    def forget_error(self) -> None:
        """Let no later call meet the error that was returned."""


class TorchPinRuntime:
    """CUDA's runtime as torch has loaded it."""

    def __init__(self) -> None:
        self._runtime = cuda.cudart()

    def register(self, address: int, num_bytes: int) -> int:
        """Pin memory for every context, and for kernels."""
        return int(self._runtime.cudaHostRegister(address, num_bytes, REGISTER_FLAGS))

    def unregister(self, address: int) -> int:
        """Undo it."""
        return int(self._runtime.cudaHostUnregister(address))

    def forget_error(self) -> None:
        """Let a launch of torch's meet the error that the runtime keeps, so that no launch of the engine's does."""
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes that one call registers."""

    address: int
    num_bytes: int


class PinnedRows:
    """Rows that were offered to CUDA.

    Args:
        address: of the first row.
        row_stride: bytes from one to the next.
        slots_per_chunk: no copy may reach from one multiple of so many slots over the next.
        chunks: what is registered: every row, or nothing.
        runtime: who registered it.

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
        """Whether every row is registered; none is otherwise."""
        return bool(self._chunks)

    def unpin(self) -> None:
        """Undo the registration; idempotent. The rows must still be mapped, and no copy under way."""
        chunks, self._chunks = self._chunks, []
        _unregister(chunks, self.runtime)


def plan_slots_per_chunk(row_stride: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return how many rows a chunk has: it ends at the end of a row and of a page of memory. Pure.

    Two chunks must not share a page either. Rows that are no multiple of a page may need larger chunks for that.
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
    """Register rows, all or none of them: copies to rows that are not pinned are right, but slow.

    Args:
        address: of the first row, at the start of a page of memory.
        num_slots: rows.
        row_stride: bytes from one to the next.
        chunk_bytes: bytes registered by a call, about.
        runtime: who pins; None takes CUDA's as torch has loaded it.
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
            runtime.forget_error()
            _unregister(registered, runtime)
            return PinnedRows(address, row_stride, slots_per_chunk, [], runtime)
        registered.append(chunk)
    return PinnedRows(address, row_stride, slots_per_chunk, registered, runtime)


def _unregister(chunks: Sequence[Chunk], runtime: PinRuntime) -> None:
    for chunk in reversed(chunks):
        code = runtime.unregister(chunk.address)
        if code != 0:
            runtime.forget_error()
            logger.warning(
                "%d bytes at %#x stay pinned (CUDA error %d)", chunk.num_bytes, chunk.address, code
            )
