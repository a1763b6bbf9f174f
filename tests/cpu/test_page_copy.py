"""The compiled copy moves exactly the pages it is given, wherever they lie, and refuses places that there are not."""

import sys
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cpu.row_copy import COMPILED_CALLS, PageCalls

Bytes = npt.NDArray[np.int8]
NUM_BLOCKS, NUM_SLOTS = 5, 4
HANG_GUARD_S = 60.0

STRANDS_BYTES = 16_384
"""From which on the compiled copy reads from four places in turn."""


@pytest.fixture(scope="module")
def calls() -> PageCalls:
    """Return the compiled calls."""
    if COMPILED_CALLS is None:
        pytest.skip(
            "nothing was compiled when kvtier was installed: apt-get install gcc python3-dev, make clean venv"
        )
    return COMPILED_CALLS


@dataclass(frozen=True)
class Matrix:
    """A matrix within memory: rows that begin where told within a line, with gaps between them."""

    memory: Bytes
    offset_bytes: int
    stride_bytes: int
    row_bytes: int

    @property
    def view(self) -> Bytes:
        """The matrix alone."""
        return self.memory[self.offset_bytes :].reshape(-1, self.stride_bytes)[:, : self.row_bytes]

    def copy(self) -> "Matrix":
        """Return an equal one elsewhere."""
        return replace(self, memory=self.memory.copy())


def random_matrix(num_rows: int, row_bytes: int, gap_bytes: int = 0, offset_bytes: int = 0) -> Matrix:
    """Return random bytes."""
    stride_bytes = row_bytes + gap_bytes
    num_bytes = offset_bytes + num_rows * stride_bytes
    memory = np.random.default_rng(num_rows).integers(-128, 128, num_bytes, dtype=np.int8)
    return Matrix(memory, offset_bytes, stride_bytes, row_bytes)


def moves_of(*places: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    """Return moves."""
    return np.array(places, np.int64).reshape(-1, 3)


def new_turn(part: int = 0) -> npt.NDArray[np.int64]:
    """Return the number of the next part."""
    return np.array([part], np.int64)


@given(
    page_bytes=st.integers(1, 300) | st.integers(STRANDS_BYTES - 70, 2 * STRANDS_BYTES + 130),
    num_sub_blocks=st.integers(1, 3),
    gaps=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    offsets=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    places=st.lists(
        st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_SLOTS - 1), st.integers(0, 2)),
        max_size=8,
    ),
    to_rows=st.booleans(),
    is_past_cache=st.booleans(),
)
@settings(deadline=None)
def test_the_pages_that_are_named_move_and_no_other_byte(
    calls: PageCalls,
    page_bytes: int,
    num_sub_blocks: int,
    gaps: tuple[int, int],
    offsets: tuple[int, int],
    places: list[tuple[int, int, int]],
    *,
    to_rows: bool,
    is_past_cache: bool,
) -> None:
    pages = random_matrix(NUM_BLOCKS, page_bytes, gaps[0], offsets[0])
    rows = random_matrix(NUM_SLOTS, num_sub_blocks * page_bytes, gaps[1], offsets[1])
    wanted_pages, wanted_rows = pages.copy(), rows.copy()
    named = [(block, slot, part % num_sub_blocks) for block, slot, part in places]
    for block, slot, part in named:
        in_row = wanted_rows.view[slot, part * page_bytes : (part + 1) * page_bytes]
        if to_rows:
            in_row[:] = wanted_pages.view[block]
        else:
            wanted_pages.view[block] = in_row

    share = (pages.view, rows.view, moves_of(*named), is_past_cache)
    calls.move_pages([share], new_turn(), page_bytes, to_rows)

    np.testing.assert_array_equal(pages.memory, wanted_pages.memory)
    np.testing.assert_array_equal(rows.memory, wanted_rows.memory)


@pytest.mark.parametrize("to_rows", [True, False])
@pytest.mark.parametrize(
    "place",
    [(NUM_BLOCKS, 0, 0), (-1, 0, 0), (0, NUM_SLOTS, 0), (0, -1, 0), (0, 0, 2), (0, 0, -1), (2**62, 0, 0)],
)
def test_a_place_that_there_is_not_is_refused_before_anything_moves(
    calls: PageCalls, place: tuple[int, int, int], *, to_rows: bool
) -> None:
    pages, rows = random_matrix(NUM_BLOCKS, 64), random_matrix(NUM_SLOTS, 128)
    before = pages.copy(), rows.copy()
    with pytest.raises(IndexError, match="outside"):
        calls.move_pages(
            [(pages.view, rows.view, moves_of((1, 1, 1), place), False)], new_turn(), 64, to_rows
        )
    np.testing.assert_array_equal(pages.memory, before[0].memory)
    np.testing.assert_array_equal(rows.memory, before[1].memory)


def test_what_does_not_fit_is_refused_and_held_no_longer(calls: PageCalls) -> None:
    pages, rows = random_matrix(NUM_BLOCKS, 64).view, random_matrix(NUM_SLOTS, 128).view
    moves = moves_of((0, 0, 0))
    read_only = rows.view()
    read_only.flags.writeable = False
    held_before = [sys.getrefcount(array) for array in (pages, rows, moves)]
    refused: list[tuple[Any, Any, Any]] = [  # Any: things of other types and shapes
        (pages[0], rows, moves),
        (pages, rows[:, ::2], moves),
        (pages.view(np.int16), rows, moves),
        (pages, rows[:, :100], moves),
        (pages[:, :0], rows, moves),
        (pages, read_only, moves),
        (pages, 3, moves),
        (pages, rows, moves.astype(np.int32)),
        (pages, rows, moves.astype(np.float64)),
        (pages, rows, moves.ravel()[:2]),
        (pages, rows, moves_of((0, 0, 0), (1, 1, 1))[:, ::-1]),
    ]
    for bad_pages, bad_rows, bad_moves in refused:
        with pytest.raises((ValueError, TypeError, BufferError)):
            calls.move_pages(
                [(pages, rows, moves, False), (bad_pages, bad_rows, bad_moves, False)], new_turn(), 64, True
            )
    del refused, bad_pages, bad_rows, bad_moves
    assert [sys.getrefcount(array) for array in (pages, rows, moves)] == held_before


@given(
    page_bytes=st.lists(st.sampled_from([1, 8, 24, 64]), max_size=4),
    nums_pages=st.lists(st.integers(0, NUM_BLOCKS), min_size=4, max_size=4),
    part_bytes=st.integers(-3, 200) | st.sampled_from([2**62, 2**63 - 1]),
    first_part=st.integers(-3, 24),
)
@settings(deadline=None)
def test_a_call_takes_the_parts_that_nobody_has_taken(
    calls: PageCalls, page_bytes: list[int], nums_pages: list[int], part_bytes: int, first_part: int
) -> None:
    shares, numbers_of_parts = [], []
    num_parts = 0
    for size, num_pages in zip(page_bytes, nums_pages, strict=False):
        pages, rows = np.full((NUM_BLOCKS, size), 7, np.int8), np.zeros((NUM_BLOCKS, size), np.int8)
        shares.append((pages, rows, moves_of(*((n, n, 0) for n in range(num_pages))), False))
        pages_a_part = max(1, part_bytes // size)
        numbers_of_parts.append([num_parts + n // pages_a_part for n in range(num_pages)])
        num_parts += -(-num_pages // pages_a_part)
    turn = new_turn(first_part)

    calls.move_pages(shares, turn, part_bytes, True)

    for (_, rows, _, _), numbers in zip(shares, numbers_of_parts, strict=True):
        moved = [0 <= first_part <= number for number in numbers]
        assert rows.any(axis=1).tolist() == moved + [False] * (NUM_BLOCKS - len(numbers))
    assert turn[0] > first_part


@pytest.mark.parametrize("to_rows", [True, False])
def test_threads_with_one_counter_move_everything_once(calls: PageCalls, *, to_rows: bool) -> None:
    num_blocks, page_bytes, num_threads = 512, 4096, 4
    pages = [
        np.random.default_rng(n).integers(-128, 128, (num_blocks, page_bytes), np.int8) for n in range(3)
    ]
    rows = np.random.default_rng(9).integers(-128, 128, (num_blocks, 3 * page_bytes), np.int8)
    wanted = np.concatenate(pages, axis=1) if to_rows else rows.copy()
    moves = moves_of(*((n, n, 0) for n in range(num_blocks)))
    shares = [
        (one, rows[:, n * page_bytes : (n + 1) * page_bytes], moves, n == 1) for n, one in enumerate(pages)
    ]
    turn, has_begun = new_turn(), threading.Barrier(num_threads)

    def share_the_work() -> None:
        has_begun.wait(HANG_GUARD_S)
        calls.move_pages(shares, turn, 2 * page_bytes, to_rows)

    threads = [threading.Thread(target=share_the_work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)

    np.testing.assert_array_equal(rows if to_rows else np.concatenate(pages, axis=1), wanted)
    assert turn[0] == 3 * num_blocks // 2 + num_threads, (
        "each part was taken once, and each thread saw the end"
    )


@pytest.mark.parametrize(
    ("shares", "turn"),
    [
        (3, new_turn()),
        ([3], new_turn()),
        ([(1, 2, 3)], new_turn()),
        ([], np.zeros(2, np.int64)),
        ([], np.zeros(1, np.int32)),
        ([], bytes(8)),
        ([], None),
    ],
)
def test_what_is_no_share_or_no_counter_is_refused(calls: PageCalls, shares: object, turn: object) -> None:
    with pytest.raises((ValueError, TypeError, BufferError)):
        calls.move_pages(shares, turn, 64, True)  # type: ignore[arg-type]  # what no type allows
