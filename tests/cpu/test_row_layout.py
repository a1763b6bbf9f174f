"""Where bytes go, as tables of cases: layouts, moves, runs, ranges, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.row_layout import (
    GroupMoves,
    PagePlace,
    RowLayout,
    Run,
    count_bytes,
    is_whole,
    join_moves,
    locate,
    part_moves,
    plan_layout,
    plan_moves,
    plan_runs,
    plan_slot_ranges,
    split_moves,
)
from kvtier.errors import KVCacheLayoutError


def caches_of(*groups: list[int], padding: int = 0, num_blocks: int = 8) -> CanonicalKVCaches:
    """Return caches with one tensor per ref, given the page sizes of each group."""
    tensors: list[CanonicalKVCacheTensor] = []
    refs: list[list[CanonicalKVCacheRef]] = []
    for group in groups:
        refs.append([CanonicalKVCacheRef(len(tensors) + at, size) for at, size in enumerate(group)])
        sizes = [size + padding for size in group]
        tensors += [
            CanonicalKVCacheTensor(torch.zeros((num_blocks, size), dtype=torch.int8), size) for size in sizes
        ]
    return CanonicalKVCaches(tensors, refs)


def moves_of(blocks: list[int], slots: list[int], first_sub_block: int = 0, group_idx: int = 0) -> GroupMoves:
    """Return the moves of one group."""
    return GroupMoves(group_idx, np.array(blocks), np.array(slots), first_sub_block)


def test_refs_lie_one_after_another_each_with_its_sub_blocks_and_without_padding() -> None:
    layout = plan_layout(caches_of([10, 6], [5], padding=3), block_size_factor=4)

    assert layout.groups[0].places == (PagePlace(0, 10, 0), PagePlace(1, 6, 40))
    assert layout.groups[1].places == (PagePlace(2, 5, 0),)
    assert [(group.used_bytes, group.page_size_bytes) for group in layout.groups] == [(64, 16), (20, 5)]
    assert layout.part_bytes == 64


@pytest.mark.parametrize(
    ("caches", "factor", "message"),
    [
        (caches_of([4]), 0, "block_size_factor=0"),
        (CanonicalKVCaches([], []), 1, "no KV cache tensors"),
        (caches_of([4], []), 1, "group 1 has no refs"),
        (CanonicalKVCaches(caches_of([4]).tensors, [[CanonicalKVCacheRef(1, 4)]]), 1, "names tensor 1"),
        (CanonicalKVCaches(caches_of([4]).tensors, [[CanonicalKVCacheRef(-1, 4)]]), 1, "names tensor -1"),
        (CanonicalKVCaches(caches_of([4]).tensors, [[CanonicalKVCacheRef(0, 5)]]), 1, "does not fit"),
        (CanonicalKVCaches(caches_of([4]).tensors, [[CanonicalKVCacheRef(0, 0)]]), 1, "does not fit"),
    ],
)
def test_caches_that_cannot_be_placed_are_refused(
    caches: CanonicalKVCaches, factor: int, message: str
) -> None:
    with pytest.raises(KVCacheLayoutError, match=message):
        plan_layout(caches, factor)


def test_each_group_gets_its_blocks_and_as_many_slots_as_they_reach_into() -> None:
    layout = plan_layout(caches_of([4], [4], [4]), block_size_factor=4)
    device = GPULoadStoreSpec([0, 1, 2, 3, 4, 5], [5, 0, 1], [6, 9, 3])

    moves = plan_moves(layout, device, CPULoadStoreSpec([7, 3, 5]), num_slots=8)

    assert [(move.group_idx, move.device_blocks.tolist(), move.slots.tolist()) for move in moves] == [
        (0, [0, 1, 2, 3, 4], [7, 3]),
        (2, [5], [5]),
    ]
    assert [move.first_sub_block for move in moves] == [2, 3]
    assert count_bytes(layout, moves) == 6 * 4


def test_a_plan_keeps_its_numbers_when_the_caller_reuses_the_arrays() -> None:
    blocks, slots = np.array([1, 2]), np.array([3, 4])
    layout = plan_layout(caches_of([4]), 1)

    (move,) = plan_moves(layout, GPULoadStoreSpec(blocks, [2], [0]), CPULoadStoreSpec(slots), num_slots=8)
    blocks[:] = slots[:] = 0

    assert (move.device_blocks.tolist(), move.slots.tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("device", "slots", "message"),
    [
        (GPULoadStoreSpec([0], [1], [0]), [0], "1 groups, the cache has 2"),
        (GPULoadStoreSpec([0, 1, 2], [3, 0], [1, 0]), [0], "extend over 2 slots"),
        (GPULoadStoreSpec([0, 1], [1, 1], [0, 0]), [0, 1, 2], "extend over 2 slots"),
        (GPULoadStoreSpec([8], [1, 0], [0, 0]), [0], "device block 8 does not exist"),
        (GPULoadStoreSpec([-1], [1, 0], [0, 0]), [0], "device block -1 does not exist"),
        (GPULoadStoreSpec([0], [1, 0], [0, 0]), [8], "slot 8 does not exist"),
        (GPULoadStoreSpec([0], [1, 0], [0, 0]), [-1], "slot -1 does not exist"),
        (GPULoadStoreSpec([0], [1, 0], [-1, 0]), [0], "must not be negative"),
        (GPULoadStoreSpec([0], [2, -1], [0, 0]), [0], "must not be negative"),
    ],
)
def test_ends_that_disagree_are_refused(device: GPULoadStoreSpec, slots: list[int], message: str) -> None:
    layout = plan_layout(caches_of([4], [4]), block_size_factor=2)

    with pytest.raises(KVCacheLayoutError, match=message):
        plan_moves(layout, device, CPULoadStoreSpec(slots), num_slots=8)


@pytest.mark.parametrize(
    ("moves", "factor", "runs"),
    [
        (moves_of([3, 4, 5], [6, 7, 8]), 1, [Run(3, 6, 3, 0, 1)]),
        (moves_of([3, 4, 6], [6, 7, 8]), 1, [Run(3, 6, 2, 0, 1), Run(6, 8, 1, 0, 1)]),
        (moves_of([3, 4, 5], [6, 8, 9]), 1, [Run(3, 6, 1, 0, 1), Run(4, 8, 2, 0, 1)]),
        (moves_of([5, 4, 3], [6, 7, 8]), 1, [Run(5, 6, 1, 0, 1), Run(4, 7, 1, 0, 1), Run(3, 8, 1, 0, 1)]),
        (moves_of([0, 1, 2, 3], [6, 7]), 2, [Run(0, 6, 2, 0, 2)]),
        (moves_of([0, 1, 2, 3], [7, 6]), 2, [Run(0, 7, 1, 0, 2), Run(2, 6, 1, 0, 2)]),
        (
            moves_of([0, 1, 2, 3, 4], [6, 7, 8], 2),
            3,
            [Run(0, 6, 1, 2, 1), Run(1, 7, 1, 0, 3), Run(4, 8, 1, 0, 1)],
        ),
        (moves_of([0, 1], [6], 1), 4, [Run(0, 6, 1, 1, 2)]),
        (moves_of([0, 5], [6], 1), 4, [Run(0, 6, 1, 1, 1), Run(5, 6, 1, 2, 1)]),
    ],
)
def test_what_is_adjacent_on_both_sides_becomes_one_rectangle(
    moves: GroupMoves, factor: int, runs: list[Run]
) -> None:
    assert plan_runs(moves, factor) == runs


@st.composite
def any_moves(draw: st.DrawFn) -> tuple[GroupMoves, int]:
    """Draw moves and their factor."""
    factor = draw(st.integers(1, 4))
    blocks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=20))
    first = draw(st.integers(0, factor - 1))
    num_slots = -(-(first + len(blocks)) // factor)
    slots = draw(st.lists(st.integers(0, 9), min_size=num_slots, max_size=num_slots))
    return moves_of(blocks, slots, first), factor


def places_of(moves: GroupMoves, factor: int) -> list[tuple[int, int, int]]:
    """Return (device block, slot, sub-block) of every device block."""
    slots, sub_blocks = locate(moves, factor)
    return list(zip(moves.device_blocks.tolist(), slots.tolist(), sub_blocks.tolist(), strict=True))


@given(drawn=any_moves())
def test_runs_cover_every_device_block_once_in_order(drawn: tuple[GroupMoves, int]) -> None:
    moves, factor = drawn

    covered = [
        (
            run.first_device_block + slot * run.num_sub_blocks + sub,
            run.first_slot + slot,
            run.first_sub_block + sub,
        )
        for run in plan_runs(moves, factor)
        for slot in range(run.num_slots)
        for sub in range(run.num_sub_blocks)
    ]

    assert covered == places_of(moves, factor)


@given(drawn=any_moves(), max_slots=st.integers(1, 4))
def test_portions_cover_every_device_block_once_in_order(
    drawn: tuple[GroupMoves, int], max_slots: int
) -> None:
    moves, factor = drawn

    portions = list(split_moves(moves, factor, max_slots))

    assert [place for portion in portions for place in places_of(portion, factor)] == places_of(moves, factor)
    assert all(len(portion.slots) <= max_slots for portion in portions)


def test_a_whole_slot_is_one_range_and_a_partial_one_a_range_for_each_ref() -> None:
    layout = RowLayout(plan_layout(caches_of([4, 2], [8]), 2).groups, 2, part_bytes=16)
    moves = moves_of([0, 1, 2, 3], [5, 6, 7], first_sub_block=1)

    stored = list(plan_slot_ranges(layout, moves, has_tail=True))
    loaded = list(plan_slot_ranges(layout, moves, has_tail=False))

    assert stored == [
        (0, 5, 4, 8),
        (0, 5, 10, 12),
        (0, 5, 12, 16),
        (1, 6, 0, 16),
        (2, 7, 0, 4),
        (2, 7, 8, 10),
        (2, 7, 12, 16),
    ]
    assert loaded == [(0, 5, 4, 8), (0, 5, 10, 12), (1, 6, 0, 12), (2, 7, 0, 4), (2, 7, 8, 10)]


def test_joined_moves_are_those_of_each_transfer_one_after_the_other() -> None:
    layout = plan_layout(caches_of([8], [4, 4], num_blocks=16), 2)
    transfers = [
        (GPULoadStoreSpec([4, 1, 0, 7, 3, 2], [2, 4], [2, 0]), CPULoadStoreSpec([2, 0, 5])),
        (GPULoadStoreSpec([10, 11], [0, 2], [0, 4]), CPULoadStoreSpec([7])),
        (GPULoadStoreSpec([5, 6, 9, 8], [4, 0], [0, 0]), CPULoadStoreSpec([1, 6])),
    ]

    joined = join_moves(layout, transfers, 8)

    assert all(is_whole(layout, *transfer) for transfer in transfers)
    assert [_as_lists(moves) for moves, _ in joined] == [
        (0, [4, 1, 5, 6, 9, 8], [2, 1, 6], 0),
        (1, [0, 7, 3, 2, 10, 11], [0, 5, 7], 0),
    ]
    for number, transfer in enumerate(transfers):
        parts, alone = part_moves(joined, number, 2), plan_moves(layout, *transfer, 8)
        assert list(map(_as_lists, parts)) == list(map(_as_lists, alone))


def test_joined_moves_do_not_change_with_the_callers_arrays() -> None:
    layout = plan_layout(caches_of([8], num_blocks=8), 1)
    device, rows = GPULoadStoreSpec([4, 1], [2], [0]), CPULoadStoreSpec([2, 3])

    (joined,) = join_moves(layout, [(device, rows)], 8)
    device.block_ids[:] = 0
    rows.block_ids[:] = 0

    assert _as_lists(joined.moves) == (0, [4, 1], [2, 3], 0)


@pytest.mark.parametrize(
    ("device", "slots"),
    [
        (GPULoadStoreSpec([0, 1], [2, 0], [1, 0]), [0]),
        (GPULoadStoreSpec([0, 1], [1, 1], [0, 0]), [0]),
        (GPULoadStoreSpec([0, 1], [2], [0]), [0]),
        (GPULoadStoreSpec([0, 1], [2, 0], [0, 0]), [0, 1]),
        (GPULoadStoreSpec([0, 1], [2, 0], [0, 0]), []),
        (GPULoadStoreSpec([0, 1], [2, 0], [-2, 0]), [0]),
        (GPULoadStoreSpec([0, 1], [4, -2], [0, 0]), [0]),
    ],
)
def test_a_transfer_of_parts_of_blocks_or_with_other_slots_is_not_whole(
    device: GPULoadStoreSpec, slots: list[int]
) -> None:
    assert not is_whole(plan_layout(caches_of([8], [4]), 2), device, CPULoadStoreSpec(slots))


def _as_lists(moves: GroupMoves) -> tuple[int, list[int], list[int], int]:
    return moves.group_idx, moves.device_blocks.tolist(), moves.slots.tolist(), moves.first_sub_block
