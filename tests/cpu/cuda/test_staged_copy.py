"""Copies through a buffer, on CPU tensors, where a launch is the copy itself."""

import numpy as np
import torch
from hypothesis import given, settings

from kvtier.cpu.cuda.staged_copy import StagedCopier
from kvtier.cpu.row_layout import plan_layout, plan_moves
from kvtier.testing.handler_suite import CopyCase, copy_cases, expect_device, expect_rows


@given(case=copy_cases())
@settings(max_examples=60, deadline=None)
def test_staged_copies_move_the_same_bytes_whatever_the_size_of_the_buffer(case: CopyCase) -> None:
    caches = case.make_caches("cpu")
    layout = plan_layout(caches, case.factor)
    rows = torch.full((case.num_slots, layout.part_bytes), 7, dtype=torch.int8)
    copier = StagedCopier(layout, [cache.tensor for cache in caches.tensors], rows, 2 * layout.part_bytes)
    moves = plan_moves(layout, *case.specs(), case.num_slots)
    expected = expect_rows(case, caches, rows.numpy())

    copier.store(moves)

    np.testing.assert_array_equal(rows.numpy(), expected)
    other = np.random.default_rng(1).integers(-128, 128, tuple(rows.shape), dtype=np.int8)
    rows.copy_(torch.from_numpy(other))
    expected_device = expect_device(case, caches, other)

    copier.load(moves)

    for cache, wanted in zip(caches.tensors, expected_device, strict=True):
        np.testing.assert_array_equal(cache.tensor.numpy(), wanted)
