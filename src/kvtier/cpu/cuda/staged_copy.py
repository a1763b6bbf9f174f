"""Copies between device tensors and rows through a buffer on the device.

It plans no transfer and owns no stream. Pages are gathered into the buffer, so that the link sees one large copy a
row and not one a page.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.cpu.cuda.descriptors import EVERY_PLACE
from kvtier.cpu.cuda.upload import upload
from kvtier.cpu.row_layout import GroupMoves, PagePlace, RowLayout, plan_slot_ranges, split_moves

STAGING_BYTES = 16 << 20
"""Device memory of one direction's staging buffer, at least one row. Filling 16 MiB takes some 20 us, sending it 300 us
or more; a larger buffer gains little and is memory that the model does not get."""


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

    def store(self, moves: Sequence[GroupMoves], places: slice | None = None) -> None:
        """Launch device -> rows; the tails of the rows are zeroed by it."""
        places = places or EVERY_PLACE
        for portion in self._portions(moves):
            blocks, staged, sub_blocks = self._index(portion)
            for device_pages, staged_pages in self._refs[portion.group_idx][places]:
                staged_pages[staged, sub_blocks] = device_pages.index_select(0, blocks)
            self._staging[:, self._layout.groups[portion.group_idx].used_bytes :] = 0
            for staged_row, slot, start, end in plan_slot_ranges(
                self._layout, portion, has_tail=True, places=places
            ):
                self._rows[slot, start:end].copy_(self._staging[staged_row, start:end], non_blocking=True)

    def load(self, moves: Sequence[GroupMoves], places: slice | None = None) -> None:
        """Launch rows -> device."""
        places = places or EVERY_PLACE
        for portion in self._portions(moves):
            for staged_row, slot, start, end in plan_slot_ranges(
                self._layout, portion, has_tail=False, places=places
            ):
                self._staging[staged_row, start:end].copy_(self._rows[slot, start:end], non_blocking=True)
            blocks, staged, sub_blocks = self._index(portion)
            for device_pages, staged_pages in self._refs[portion.group_idx][places]:
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
        index = np.stack((portion.device_blocks, places // factor, places % factor))
        blocks, staged, sub_blocks = upload(index, self._staging.device)
        return blocks, staged, sub_blocks


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
