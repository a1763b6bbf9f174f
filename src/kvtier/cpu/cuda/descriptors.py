"""Plans the fewest copies that move a transfer's bytes between device memory and rows.

A span is contiguous in both memories. Neighbours of one ref become one span, so that a run of blocks whose pages fill
the rows is a single copy. Planning uses arrays, because a transfer has as many pages as blocks times layers.

On a store the bytes of a row that a block's group does not use, the tail, are spans too: from a memory of zeros.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.cpu.row_layout import GroupMoves, PagePlace, RowLayout, locate

Offsets = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Byte ranges in two memories, one pair each; shapes (num_spans,), int64.

    Attributes:
        memories: index of the device memory: of a canonical tensor, or the number of tensors for the zeros.
        device_offsets: from the start of that memory.
        row_offsets: from the start of the worker's part of the first row.
        sizes: bytes.
    """

    memories: Offsets
    device_offsets: Offsets
    row_offsets: Offsets
    sizes: Offsets


class Geometry(NamedTuple):
    """Strides and sizes of the memories, in bytes.

    Attributes:
        page_strides: for each canonical tensor, from one device block to the next.
        row_stride: from one row to the next.
        slots_per_chunk: rows registered together; a span ends there. None: all rows are one piece.
        zeros_bytes: length of the memory of zeros.
    """

    page_strides: tuple[int, ...]
    row_stride: int
    slots_per_chunk: int | None
    zeros_bytes: int


def plan_spans(
    layout: RowLayout,
    geometry: Geometry,
    moves: Sequence[GroupMoves],
    *,
    is_store: bool,
) -> Spans:
    """Return the spans of a transfer. Pure.

    Args:
        layout: the bytes within a row.
        geometry: strides and sizes of the memories.
        moves: what to move.
        is_store: whether to zero tails.
    """
    parts = [part for move in moves for part in _plan_group(layout, geometry, move, is_store=is_store)]
    if not parts:
        nothing = np.zeros(0, dtype=np.int64)
        return Spans(nothing, nothing, nothing, nothing)
    return Spans(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def cut_spans(spans: Spans, max_bytes: int) -> Spans:
    """Return the same bytes in spans of at most ``max_bytes``. Pure."""
    counts = -(-spans.sizes // max_bytes)
    which = np.repeat(np.arange(len(counts)), counts)
    firsts = np.concatenate(([0], np.cumsum(counts)[:-1])) if len(counts) else counts
    done = (np.arange(len(which)) - firsts[which]) * max_bytes
    return Spans(
        spans.memories[which],
        spans.device_offsets[which] + done,
        spans.row_offsets[which] + done,
        np.minimum(spans.sizes[which] - done, max_bytes),
    )


def _plan_group(
    layout: RowLayout, geometry: Geometry, move: GroupMoves, *, is_store: bool
) -> Iterator[Spans]:
    """Plan refs of equal size and stride together: their spans differ only by an offset."""
    group = layout.groups[move.group_idx]
    slots, sub_blocks = locate(move, layout.block_size_factor)

    def shape(place: PagePlace) -> tuple[int, int]:
        return place.page_size_bytes, geometry.page_strides[place.tensor_idx]

    for (size_bytes, page_stride), alike in groupby(group.places, shape):
        device_offsets = move.device_blocks * page_stride
        row_offsets = slots * geometry.row_stride + sub_blocks * size_bytes
        merged = _merge(device_offsets, row_offsets, slots, size_bytes, geometry.slots_per_chunk)
        yield _repeat(merged, list(alike))
    if is_store:
        yield _plan_tails(layout, geometry, move)


def _merge(
    device_offsets: Offsets,
    row_offsets: Offsets,
    slots: Offsets,
    size_bytes: int,
    slots_per_chunk: int | None,
) -> tuple[Offsets, Offsets, Offsets]:
    """Return device offsets, row offsets and sizes with neighbours joined."""
    is_break = (np.diff(device_offsets) != size_bytes) | (np.diff(row_offsets) != size_bytes)
    if slots_per_chunk is not None:
        is_break |= np.diff(slots // slots_per_chunk) != 0
    starts = np.concatenate(([0], np.flatnonzero(is_break) + 1))
    counts = np.diff(starts, append=len(device_offsets))
    return device_offsets[starts], row_offsets[starts], counts * size_bytes


def _repeat(merged: tuple[Offsets, Offsets, Offsets], places: Sequence[PagePlace]) -> Spans:
    """Return the spans of one ref for each of ``places``."""
    device_offsets, row_offsets, sizes = merged
    tensors = np.array([place.tensor_idx for place in places], dtype=np.int64)
    starts = np.array([place.offset_bytes for place in places], dtype=np.int64)
    return Spans(
        np.repeat(tensors, len(sizes)),
        np.tile(device_offsets, len(places)),
        (starts[:, None] + row_offsets).reshape(-1),
        np.tile(sizes, len(places)),
    )


def _plan_tails(layout: RowLayout, geometry: Geometry, move: GroupMoves) -> Spans:
    used_bytes = layout.groups[move.group_idx].used_bytes
    zeros = np.zeros(len(move.slots), dtype=np.int64)
    tails = Spans(
        zeros + len(geometry.page_strides),
        zeros,
        move.slots * geometry.row_stride + used_bytes,
        zeros + (layout.part_bytes - used_bytes),
    )
    # Every part of a cut tail reads the same zeros.
    cut = cut_spans(tails, max(1, geometry.zeros_bytes))
    return cut._replace(device_offsets=np.zeros_like(cut.device_offsets))
