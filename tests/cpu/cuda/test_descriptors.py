"""Spans are as few as the memory allows; that they move the right bytes is shown by the copiers."""

import numpy as np
import torch

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.cpu.cuda.descriptors import Geometry, Spans, cut_spans, plan_spans
from kvtier.cpu.row_layout import GroupMoves, RowLayout, plan_layout


def layout_of(*groups: list[int], factor: int = 1) -> RowLayout:
    """Return a layout whose groups have pages of these sizes, a tensor each."""
    sizes = [size for group in groups for size in group]
    numbers = iter(range(len(sizes)))
    tensors = [
        CanonicalKVCacheTensor(torch.empty((99, size), dtype=torch.int8, device="meta"), size)
        for size in sizes
    ]
    refs = [[CanonicalKVCacheRef(next(numbers), size) for size in group] for group in groups]
    return plan_layout(CanonicalKVCaches(tensors, refs), factor)


def moves_of(blocks: list[int], slots: list[int], group_idx: int = 0) -> GroupMoves:
    return GroupMoves(group_idx, np.array(blocks), np.array(slots), 0)


def geometry_of(
    layout: RowLayout, row_stride: int | None = None, chunk: int | None = None, zeros_bytes: int = 100
) -> Geometry:
    strides = [0] * (1 + max(place.tensor_idx for group in layout.groups for place in group.places))
    for group in layout.groups:
        for place in group.places:
            strides[place.tensor_idx] = place.page_size_bytes
    return Geometry(tuple(strides), row_stride or layout.part_bytes, chunk, zeros_bytes)


def listed(spans: Spans) -> list[tuple[int, ...]]:
    """Return (memory, device offset, row offset, bytes) of each span."""
    return list(zip(*(column.tolist() for column in spans), strict=True))


def test_a_run_whose_pages_fill_the_rows_is_one_span() -> None:
    layout = layout_of([8])

    spans = plan_spans(layout, geometry_of(layout), [moves_of([3, 4, 5], [6, 7, 8])], is_store=True)

    assert listed(spans) == [(0, 24, 48, 24)]


def test_a_span_ends_where_registered_rows_do() -> None:
    layout = layout_of([8])
    geometry = geometry_of(layout, chunk=2)

    spans = plan_spans(layout, geometry, [moves_of([3, 4, 5, 6], [1, 2, 3, 4])], is_store=False)

    assert listed(spans) == [(0, 24, 8, 8), (0, 32, 16, 16), (0, 48, 32, 8)]


def test_rows_that_stand_apart_are_a_span_each_with_their_sub_blocks_joined() -> None:
    layout = layout_of([8, 4], factor=2)
    geometry = geometry_of(layout, row_stride=100)

    spans = plan_spans(layout, geometry, [moves_of([0, 1, 2, 3], [5, 6])], is_store=False)

    assert listed(spans) == [(0, 0, 500, 16), (0, 16, 600, 16), (1, 0, 516, 8), (1, 8, 616, 8)]


def test_blocks_that_go_backwards_are_not_joined() -> None:
    layout = layout_of([8])

    spans = plan_spans(layout, geometry_of(layout), [moves_of([5, 4], [1, 0])], is_store=False)

    assert listed(spans) == [(0, 40, 8, 8), (0, 32, 0, 8)]


def test_a_tail_comes_from_the_zeros_cut_to_their_length() -> None:
    layout = layout_of([4, 4], [20])
    geometry = geometry_of(layout, zeros_bytes=8)
    moves = [moves_of([2], [1])]

    whole = plan_spans(layout, geometry, moves, is_store=True)

    tail = [(3, 0, 28, 8), (3, 0, 36, 4)]
    assert listed(whole) == [(0, 8, 20, 4), (1, 8, 24, 4), *tail]


def test_nothing_to_move_is_no_span() -> None:
    layout = layout_of([8])

    assert listed(plan_spans(layout, geometry_of(layout), [], is_store=True)) == []


def test_cut_spans_cover_the_same_bytes_in_order() -> None:
    spans = Spans(*(np.array(column) for column in ([0, 1], [100, 200], [10, 20], [9, 4])))

    assert listed(cut_spans(spans, 4)) == [
        (0, 100, 10, 4),
        (0, 104, 14, 4),
        (0, 108, 18, 1),
        (1, 200, 20, 4),
    ]
