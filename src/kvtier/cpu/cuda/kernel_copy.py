"""Carries out spans with a kernel that reads and writes pinned host memory by its address.

It plans no transfer. A kernel's launch costs the same however many spans there are, but its copies occupy
processors of the device. Triton is optional and imported when it is looked for.

The kernel runs in Triton's interpreter in the tests, on CPU tensors; on a device it has not been confirmed.
"""

import ctypes
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from kvtier.cpu.cuda.descriptors import Offsets, Spans, cut_spans
from kvtier.cpu.cuda.span_copier import Memories
from kvtier.cpu.cuda.upload import upload

PIECE_BYTES = 32 << 10
"""Most bytes that a program copies before it takes the next piece. Smaller pieces make a longer table, larger ones
leave programs idle at the end."""

MAX_PROGRAMS = 64
"""Programs of a launch. A link's latency is covered by some 100 KiB under way; more programs would only take processors
from the model, fewer may not fill the link."""

LANES = 512
"""Words that a program copies at a time: 4 KiB."""

HOST_POINTERS = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: registered memory has one address on host and device."""


class Pieces(NamedTuple):
    """Pieces that are copied in words of one size.

    Attributes:
        aligned_bytes: 16 divides every address and size; 8 divides every address; or 1.
        table: sources, destinations and sizes, shape (3, num_pieces), int64, contiguous.
    """

    aligned_bytes: int
    table: Offsets


class KernelLauncher:
    """Launches one kernel for all spans, one more for each lesser alignment among them.

    Args:
        memories: both ends of the spans; the rows must be pinned.
        kernel: ``copy_kernel.copy_pieces``.
    """

    def __init__(self, memories: Memories, kernel: Any) -> None:  # noqa: ANN401  # Triton has no types for a kernel
        self._memories = memories
        self._kernel = kernel
        self._device = memories.device[0].device

    def launch(self, spans: Spans, *, is_store: bool) -> None:
        """Launch every span; they may be carried out in any order."""
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


def plan_pieces(table: Offsets) -> Iterator[Pieces]:
    """Yield the pieces by what divides them, the widest words first. Pure.

    Args:
        table: sources, destinations and sizes, shape (3, num_pieces), int64.
    """
    addresses = table[0] | table[1]
    is_wide = (addresses | table[2]) & 15 == 0
    is_odd = addresses & 7 != 0
    for aligned_bytes, chosen in ((16, is_wide), (8, ~is_wide & ~is_odd), (1, is_odd)):
        if chosen.any():
            # Contiguous: a kernel reads the table by memory, and numpy may turn what it picks by column.
            yield Pieces(aligned_bytes, np.ascontiguousarray(table[:, chosen]))


def find_kernel(device: torch.device) -> tuple[Any, str | None]:  # Any: Triton has no types for a kernel
    """Return the kernel, and why it cannot be used: None where it can."""
    try:
        kernel = importlib.import_module("kvtier.cpu.cuda.copy_kernel").copy_pieces
    except Exception as error:  # noqa: BLE001  # thread top: a broken optional library raises what it likes
        return None, f"Triton cannot be imported ({error}): install the torch build for CUDA, it brings it"
    if not _has_host_pointers(device):
        return None, "the device reaches registered host memory under other addresses than the host"
    return kernel, None


def _has_host_pointers(device: torch.device) -> bool:
    """Ask the driver; no answer is a no: a kernel that used a wrong address would end CUDA for the process."""
    value = ctypes.c_int(0)
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
            ctypes.byref(value), HOST_POINTERS, device.index or 0
        )
    except (OSError, AttributeError):
        return False
    return code == 0 and value.value == 1
