"""A copier that plans spans and gives them to a launcher; there is no buffer between device and rows.

The launchers are in ``copy_methods``.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from kvtier.cpu.cuda.descriptors import Geometry, Offsets, Spans, plan_spans
from kvtier.cpu.row_layout import GroupMoves, RowLayout

ZEROS_BYTES = 1 << 20
"""Most device memory for the zeros of tails. Longer tails take several copies; those of a model whose groups have
similar sizes are far shorter."""


class DeviceCopier(Protocol):
    """Launches the copies of one direction's transfers; a call returns before they end."""

    def store(self, moves: Sequence[GroupMoves]) -> None:
        """Launch device -> rows."""

    def load(self, moves: Sequence[GroupMoves]) -> None:
        """Launch rows -> device."""

    def release(self) -> None:
        """Drop tensors and rows; idempotent. All launched copies must have ended."""


Build = Callable[[RowLayout, Sequence[torch.Tensor], torch.Tensor, int | None], DeviceCopier]
"""Makes a copier from a layout, pages, rows and the number of rows registered together."""


class Memories:
    """Both sides of all spans.

    Args:
        device: the canonical tensors and the zeros, each of bytes, rows of equal distance.
        rows: the worker's part of all rows.

    Attributes:
        device: as flat bytes, gaps included.
        rows: as flat bytes, gaps included.
    """

    def __init__(self, device: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        self.device = [_flatten(memory) for memory in device]
        self.rows = _flatten(rows)
        self._device_starts = np.array([memory.data_ptr() for memory in self.device], dtype=np.int64)
        self._rows_start = self.rows.data_ptr()

    def addresses(self, spans: Spans) -> tuple[Offsets, Offsets]:
        """Return the start addresses of the spans on the device and in the rows."""
        return self._device_starts[
            spans.memories
        ] + spans.device_offsets, self._rows_start + spans.row_offsets


class SpanLauncher(Protocol):
    """Copies spans on the stream that is current at the call."""

    def launch(self, spans: Spans, *, is_store: bool) -> None:
        """Launch every span; after an error some may have been launched."""


class SpanCopier:
    """Copies each span directly from one memory into the other.

    Args:
        layout: the bytes within a row.
        pages: the canonical tensors, each shape (num_blocks, page_bytes), int8, on the device.
        rows: the worker's part of all rows, shape (num_slots, part_bytes), int8.
        slots_per_chunk: rows registered together; None: all rows are one piece.
        make_launcher: builds the launcher.
    """

    def __init__(
        self,
        layout: RowLayout,
        pages: Sequence[torch.Tensor],
        rows: torch.Tensor,
        slots_per_chunk: int | None,
        make_launcher: Callable[[Memories], SpanLauncher],
    ) -> None:
        longest_tail = max(layout.part_bytes - group.used_bytes for group in layout.groups)
        zeros = torch.zeros(min(longest_tail, ZEROS_BYTES), dtype=torch.int8, device=pages[0].device)
        self._layout = layout
        self._geometry = Geometry(
            tuple(page.stride(0) for page in pages), rows.stride(0), slots_per_chunk, len(zeros)
        )
        self._launcher: SpanLauncher | None = make_launcher(Memories([*pages, zeros], rows))

    def store(self, moves: Sequence[GroupMoves]) -> None:
        """Launch device -> rows, which also zeroes the tails of the rows."""
        self._launch(moves, is_store=True)

    def load(self, moves: Sequence[GroupMoves]) -> None:
        """Launch rows -> device."""
        self._launch(moves, is_store=False)

    def release(self) -> None:
        """Drop tensors and rows; idempotent. All launched copies must have ended."""
        self._launcher = None

    def _launch(self, moves: Sequence[GroupMoves], *, is_store: bool) -> None:
        assert self._launcher is not None, "the copier was released"
        spans = plan_spans(self._layout, self._geometry, moves, is_store=is_store)
        if len(spans.sizes):
            self._launcher.launch(spans, is_store=is_store)


def _flatten(memory: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the first to the last of ``memory``, including the gaps between its rows."""
    if memory.dim() == 1 or len(memory) == 0:
        return memory.reshape(-1)
    return memory.as_strided(((len(memory) - 1) * memory.stride(0) + memory.shape[1],), (1,))
