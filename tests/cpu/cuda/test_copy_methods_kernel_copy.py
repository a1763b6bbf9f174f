"""How pieces are sorted by what divides them, and launches bounded; the copies themselves are in test_copiers."""

import sys

import numpy as np
import pytest
import torch
from tests.cpu.cuda.fakes import PlainKernel

from kvtier.cpu.cuda.copy_methods import (
    MAX_PROGRAMS,
    PIECE_BYTES,
    KernelLauncher,
    find_kernel,
    plan_pieces,
    upload,
)
from kvtier.cpu.cuda.descriptors import Spans
from kvtier.cpu.cuda.span_copier import Memories


def test_pieces_are_sorted_by_what_divides_addresses_and_sizes() -> None:
    pieces = [(32, 64, 48), (32, 64, 40), (32, 72, 32), (33, 64, 32), (40, 8, 5), (32, 68, 16)]

    planned = {found.aligned_bytes: found.table for found in plan_pieces(np.array(pieces).T)}

    assert {aligned: table.T.tolist() for aligned, table in planned.items()} == {
        16: [[32, 64, 48]],
        8: [[32, 64, 40], [32, 72, 32], [40, 8, 5]],
        1: [[33, 64, 32], [32, 68, 16]],
    }
    assert all(table.flags.c_contiguous for table in planned.values())


def test_long_spans_are_cut_and_programs_bounded() -> None:
    num_bytes = 2 * MAX_PROGRAMS * PIECE_BYTES
    pages = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)
    rows = torch.zeros_like(pages)
    kernel = PlainKernel()
    spans = Spans(*(np.array([number]) for number in (0, 0, 0, num_bytes)))

    KernelLauncher(Memories([pages], rows), kernel).launch(spans, is_store=True)

    assert torch.equal(rows, pages)
    assert kernel.launches == [(2 * MAX_PROGRAMS, 16)]
    assert kernel.num_programs == MAX_PROGRAMS


def test_without_triton_the_kernel_is_objected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvtier.cpu.cuda.copy_kernel", raising=False)

    _, unusable_reason = find_kernel(torch.device("cpu"))

    assert "Triton cannot be imported" in str(unusable_reason)


def test_an_array_arrives_on_the_device() -> None:
    array = np.arange(6).reshape(2, 3)

    assert upload(array, torch.device("cpu")).tolist() == [[0, 1, 2], [3, 4, 5]]
