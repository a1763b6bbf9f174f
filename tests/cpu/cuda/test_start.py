"""The start of handlers: scratch memory is made, pinned like the rows, and given back; the rows are not touched."""

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.cpu.cuda.fakes import FakePinning
from tests.cpu.cuda.test_descriptors import layout_of

from kvtier.config import CudaCopier
from kvtier.cpu import gpu_worker
from kvtier.cpu.cuda.pinned_region import PinnedRows, pin_rows
from kvtier.cpu.cuda.start import TRIAL_CHUNKS, choose_copiers, map_rows
from kvtier.cpu.row_layout import RowLayout
from kvtier.errors import ConfigError

LAYOUT: RowLayout = layout_of([4096, 8192])


def time_of(copy: Callable[[], None]) -> float:
    copy()
    return 1.0


def choose(pinning: FakePinning, *, is_pinned: bool = True) -> tuple[CudaCopier, CudaCopier, PinnedRows]:
    """Choose for pages and rows of ones, which must stay ones."""
    pages = [torch.ones((4, size), dtype=torch.int8) for size in (4096, 8192)]
    rows = map_rows(4, LAYOUT.part_bytes).fill_(1)
    pinned = pin_rows(rows.data_ptr(), 4, LAYOUT.part_bytes, runtime=pinning)
    if not is_pinned:
        pinned.unpin()
    choice = choose_copiers(LAYOUT, pages, rows, pinned, CudaCopier.AUTO, timer=time_of)
    assert all(bool((memory == 1).all()) for memory in [*pages, rows])
    return choice.store.name, choice.load.name, pinned


def test_a_trial_is_pinned_in_several_chunks_and_given_back() -> None:
    pinning = FakePinning()

    store, load, pinned = choose(pinning)

    assert store is load is CudaCopier.RUNS
    assert len(pinning.calls) >= 1 + TRIAL_CHUNKS
    assert list(pinning.registered) == [pinned.address]


def test_where_the_rows_are_not_pinned_the_trial_is_not_and_no_kernel_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    pinning = FakePinning()

    choose(pinning, is_pinned=False)

    assert len(pinning.calls) == 1
    assert "copies with 'kernel' are skipped: the rows are not pinned" in caplog.text


def test_scratch_rows_that_cannot_be_pinned_leave_the_choice_unproven(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pinning = FakePinning(refused=2)

    store, load, pinned = choose(pinning)

    assert store is load is CudaCopier.RUNS
    assert "unproven" in caplog.text
    assert list(pinning.registered) == [pinned.address]


def test_when_no_copier_can_be_chosen_the_rows_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pinning = FakePinning()
    pages = [torch.ones((4, size), dtype=torch.int8) for size in (4096, 8192)]
    rows = map_rows(4, LAYOUT.part_bytes)
    monkeypatch.setattr(gpu_worker, "pin_rows", partial(pin_rows, runtime=pinning))
    monkeypatch.setattr(gpu_worker, "choose_copiers", partial(choose_copiers, timer=time_of))

    with pytest.raises(ConfigError, match="cuda_copier='batch'"):
        gpu_worker._start_cuda(LAYOUT, pages, rows, None, CudaCopier.BATCH)

    assert pinning.registered == {}


def test_private_rows_begin_at_a_page_and_are_zero() -> None:
    rows = map_rows(3, 5000)

    assert rows.data_ptr() % 4096 == 0
    assert rows.shape == (3, 5000)
    assert not rows.any()
