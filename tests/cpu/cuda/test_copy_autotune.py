"""Scratch memory is bounded, laid out like the engine's, and a proof covers every group, runs and scattered blocks."""

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cpu.cuda.test_descriptors import layout_of

from kvtier.cpu.cuda.copy_autotune import (
    MAX_SLOTS,
    MIN_SLOTS,
    PROOF_SHARE,
    TRIAL_BYTES,
    plan_proof,
    plan_timing,
    plan_trial,
)
from kvtier.cpu.cuda.descriptors import Geometry, plan_spans
from kvtier.cpu.cuda.pinned_region import plan_slots_per_chunk
from kvtier.cpu.cuda.start import TRIAL_CHUNKS

PAGE = mmap.PAGESIZE


@given(
    sizes=st.lists(st.integers(1, 1 << 22), min_size=1, max_size=4),
    factor=st.integers(1, 4),
    part_offset=st.integers(0, 1 << 24),
    gap=st.integers(1, 1 << 24),
)
def test_scratch_memory_is_bounded_and_rows_keep_their_alignment(
    sizes: list[int], factor: int, part_offset: int, gap: int
) -> None:
    layout = layout_of(sizes, factor=factor)
    row_stride = part_offset + layout.part_bytes + gap

    plan = plan_trial(layout, sizes, row_stride, part_offset)

    assert MIN_SLOTS <= plan.num_slots <= MAX_SLOTS
    assert plan.num_slots == MIN_SLOTS or plan.num_slots * plan.row_stride <= TRIAL_BYTES
    assert plan.num_slots == MIN_SLOTS or plan.num_device_blocks * sum(sizes) <= TRIAL_BYTES
    assert plan.row_stride <= layout.part_bytes + 2 * PAGE
    assert plan.row_stride > plan.part_offset + layout.part_bytes
    assert (plan.row_stride - row_stride) % PAGE == (plan.part_offset - part_offset) % PAGE == 0


def test_rows_without_gaps_stay_without_gaps() -> None:
    layout = layout_of([100])

    assert plan_trial(layout, [100], 100, 0).row_stride == 100


def test_tensors_that_take_turns_in_one_allocation_cost_scratch_memory_for_their_own_bytes() -> None:
    layout = layout_of([4096] * 60)

    plan = plan_trial(layout, [60 * 4096] * 60, layout.part_bytes, 0)

    assert plan.num_slots * sum(plan.page_strides) <= TRIAL_BYTES
    assert set(plan.page_strides) == {2 * PAGE}


def test_a_proof_reaches_over_the_end_of_a_registration() -> None:
    plan = plan_trial(layout_of([1 << 16]), [1 << 16], 1 << 16, 0)
    geometry = Geometry(plan.page_strides, plan.row_stride, None, 0)
    chunk = plan_slots_per_chunk(plan.row_stride, plan.num_slots * plan.row_stride // TRIAL_CHUNKS)

    counts = [
        len(
            plan_spans(
                plan.layout,
                geometry._replace(slots_per_chunk=slots),
                [plan_proof(plan, 0)],
                is_store=True,
            ).sizes
        )
        for slots in (None, chunk)
    ]

    assert counts[0] < counts[1]


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_proof_enters_a_block_in_its_middle_and_names_each_block_and_slot_once(factor: int) -> None:
    row_bytes = 64 * factor
    plan = plan_trial(layout_of([64], factor=factor), [64], row_bytes, 0, row_bytes * 10 * PROOF_SHARE)

    moves = plan_proof(plan, 0)

    assert moves.first_sub_block == factor // 2
    assert sorted(moves.device_blocks) == list(range(factor // 2, 10 * factor))
    assert sorted(moves.slots) == list(range(10))
    assert len(moves.device_blocks) + moves.first_sub_block == len(moves.slots) * factor
    in_order = np.diff(moves.device_blocks) == 1
    assert in_order[: 5 * factor - factor // 2 - 1].all()
    assert not in_order.all()


def test_what_is_timed_is_whole_blocks_of_the_group_with_the_largest_ones() -> None:
    plan = plan_trial(layout_of([8], [64], [16], factor=2), [8, 64, 16], 128, 0, 128 * 20)

    moves = plan_timing(plan)

    assert (moves.group_idx, moves.first_sub_block) == (1, 0)
    assert sorted(moves.device_blocks) == list(range(plan.num_device_blocks))
    assert sorted(moves.slots) == list(range(plan.num_slots))
