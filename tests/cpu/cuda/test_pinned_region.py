"""Rows are registered in chunks that end with a row and a page, all of them or none."""

import math
import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cpu.cuda.fakes import SUCCESS, FakePinning

from kvtier.cpu.cuda.pinned_region import PinnedRows, pin_rows, plan_chunks, plan_slots_per_chunk

PAGE = mmap.PAGESIZE
START = 10 * PAGE


def pin(pinning: FakePinning) -> PinnedRows:
    return pin_rows(START, 10, PAGE, chunk_bytes=4 * PAGE, runtime=pinning)


@given(st.integers(1, 10 * PAGE), st.integers(1, 300), st.integers(1, 100 * PAGE))
def test_chunks_cover_the_rows_and_end_with_a_row_and_a_page(
    row_stride: int, num_slots: int, chunk_bytes: int
) -> None:
    slots_per_chunk = plan_slots_per_chunk(row_stride, chunk_bytes)
    chunks = plan_chunks(START, num_slots, row_stride, slots_per_chunk)

    assert chunks[0].address == START
    assert [chunk.address + chunk.num_bytes for chunk in chunks[:-1]] == [
        chunk.address for chunk in chunks[1:]
    ]
    assert sum(chunk.num_bytes for chunk in chunks) == num_slots * row_stride
    for chunk in chunks[1:]:
        assert chunk.address % PAGE == 0
        assert (chunk.address - START) % row_stride == 0
    # No larger than asked for, but where the rows' own size needs it.
    assert chunks[0].num_bytes <= max(chunk_bytes, math.lcm(row_stride, PAGE))


def test_a_terabyte_is_registered_a_gibibyte_at_a_time() -> None:
    assert plan_slots_per_chunk(2 << 20) == 512
    assert len(plan_chunks(START, 1 << 19, 2 << 20, 512)) == 1024


def test_every_chunk_is_registered_and_undone_once() -> None:
    pinning = FakePinning()

    rows = pin(pinning)

    assert rows.is_pinned
    assert rows.slots_per_chunk == 4
    assert pinning.calls == [
        (START, 4 * PAGE),
        (START + 4 * PAGE, 4 * PAGE),
        (START + 8 * PAGE, 2 * PAGE),
    ]
    rows.unpin()
    rows.unpin()
    assert pinning.registered == {}
    assert pinning.undone == [START + 8 * PAGE, START + 4 * PAGE, START]
    assert not rows.is_pinned


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_refusal_undoes_what_was_registered_and_is_forgotten_by_the_runtime(
    refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    pinning = FakePinning(refused)

    rows = pin(pinning)

    assert not rows.is_pinned
    assert pinning.registered == {}
    assert pinning.error == SUCCESS
    assert "copies will be slow" in caplog.text
    rows.unpin()
    assert len(pinning.undone) == refused


def test_a_registration_that_cannot_be_undone_is_logged_and_the_others_are_undone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pinning = FakePinning()
    rows = pin(pinning)
    del pinning.registered[START + 4 * PAGE]

    rows.unpin()

    assert pinning.registered == {}
    assert "stay pinned" in caplog.text
