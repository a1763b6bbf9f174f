"""The copier moves the right bytes in every mode and with any number of threads; errors stop everybody."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.base import GPULoadStoreSpec
from kvtier.cpu import row_copy
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.row_copy import COMPILED_CALLS, GATHER_BELOW_BYTES, PIECE_BYTES, PageCalls, RowCopier
from kvtier.cpu.row_layout import GroupRows, PagePlace, RowLayout, plan_moves

Bytes = npt.NDArray[np.int8]
NUM_BLOCKS = 40
HANG_GUARD_S = 60


def layout_of(page_sizes: list[int], factor: int) -> RowLayout:
    """Return the layout of one group whose refs have these page sizes."""
    places, offset = [], 0
    for tensor, size in enumerate(page_sizes):
        places.append(PagePlace(tensor, size, offset))
        offset += size * factor
    group = GroupRows(tuple(places), offset, offset // factor, NUM_BLOCKS)
    return RowLayout((group,), factor, offset)


def random_bytes(*shape: int) -> Bytes:
    """Return bytes that differ from block to block."""
    return np.random.default_rng(3).integers(-128, 128, shape, dtype=np.int8)


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> int:
    """Return how many threads copy."""
    return int(request.param)


@pytest.fixture(params=["compiled", "numpy"])
def calls(request: pytest.FixtureRequest) -> PageCalls | None:
    """Return what moves pages."""
    if request.param == "compiled" and COMPILED_CALLS is None:
        pytest.skip(
            "nothing was compiled when kvtier was installed: apt-get install gcc python3-dev, make clean venv"
        )
    return COMPILED_CALLS if request.param == "compiled" else None


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("page_size", [16, GATHER_BELOW_BYTES, PIECE_BYTES // 4 + 8])
@pytest.mark.parametrize("factor", [1, 2])
def test_what_was_stored_comes_back(
    *,
    num_threads: int,
    calls: PageCalls | None,
    page_size: int,
    factor: int,
    is_scattered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_scattered:  # half of the cases will do
        monkeypatch.setattr(row_copy, "LOADED_PAST_CACHE_FROM_BYTES", 0)
    num_pages = 10 * factor
    layout = layout_of([page_size, page_size, 24], factor)
    device = [random_bytes(NUM_BLOCKS, size) for size in (page_size, page_size, 24)]
    rows = np.zeros((12, layout.part_bytes), np.int8)
    order = np.random.default_rng(1)
    blocks = order.permutation(NUM_BLOCKS)[:num_pages] if is_scattered else np.arange(num_pages)
    slots = order.permutation(12)[:10] if is_scattered else np.arange(10)
    moves = plan_moves(layout, GPULoadStoreSpec(blocks, [num_pages], [0]), CPULoadStoreSpec(slots), 12)
    copier = RowCopier(layout, device, rows, num_threads, calls)

    copier.store(moves)

    for place, pages in zip(layout.groups[0].places, device, strict=True):
        part = rows[slots, place.offset_bytes : place.offset_bytes + factor * place.page_size_bytes]
        np.testing.assert_array_equal(part.reshape(num_pages, -1), pages[blocks])
    wanted = [pages.copy() for pages in device]
    for pages in device:
        pages[blocks] = 0

    copier.load(moves)

    for pages, before in zip(device, wanted, strict=True):
        np.testing.assert_array_equal(pages, before)
    copier.release()


def test_when_a_piece_fails_the_error_is_raised_and_the_rest_is_dropped(
    num_threads: int, calls: PageCalls | None
) -> None:
    layout = layout_of([PIECE_BYTES], 1)
    device = random_bytes(NUM_BLOCKS, PIECE_BYTES)
    device_that_cannot_be_written = device.view()
    device_that_cannot_be_written.flags.writeable = False
    rows = np.zeros((NUM_BLOCKS, PIECE_BYTES), np.int8)
    copier = RowCopier(layout, [device_that_cannot_be_written], rows, num_threads, calls)
    spec = GPULoadStoreSpec(range(NUM_BLOCKS), [NUM_BLOCKS], [0])

    with pytest.raises(ValueError, match="read-only"):
        copier.load(plan_moves(layout, spec, CPULoadStoreSpec(range(NUM_BLOCKS)), NUM_BLOCKS))

    copier.release()


def test_an_error_is_raised_only_when_no_other_thread_copies_any_more() -> None:
    copier = RowCopier(layout_of([16], 1), [random_bytes(NUM_BLOCKS, 16)], np.zeros((4, 16), np.int8), 2)
    both_have_begun, has_failed = threading.Barrier(2), threading.Event()
    ended = []

    def copy_slowly_or_fail() -> None:
        both_have_begun.wait(HANG_GUARD_S)
        if threading.current_thread() is threading.main_thread():
            has_failed.set()
            raise OSError("no such memory")
        assert has_failed.wait(HANG_GUARD_S)
        np.zeros(64 << 20, np.int8).fill(1)
        ended.append("copy")

    with pytest.raises(OSError, match="no such memory"):
        copier._run([copy_slowly_or_fail, copy_slowly_or_fail])

    assert ended == ["copy"]
    copier.release()


class ExhaustedPool(ThreadPoolExecutor):
    """A pool whose second thread cannot be started; the item stays queued, as in the real one."""

    def __init__(self) -> None:
        super().__init__(2)
        self.num_submitted = 0

    def submit(self, *arguments: Any, **options: Any) -> Future[Any]:  # noqa: ANN401  # passed on as it is
        self.num_submitted += 1
        future = super().submit(*arguments, **options)
        if self.num_submitted == 2:
            raise RuntimeError("can't start new thread")
        return future


def test_without_threads_to_be_had_one_copies_alone_and_nothing_is_left_queued() -> None:
    copier = RowCopier(layout_of([16], 1), [random_bytes(NUM_BLOCKS, 16)], np.zeros((4, 16), np.int8), 3)
    copier._helpers.shutdown()
    copier._helpers = ExhaustedPool()
    copied: list[int] = []
    copier._run([partial(copied.append, number) for number in range(6)])
    assert copied == list(range(6))
    copier.release()


def test_after_release_the_copier_holds_no_array() -> None:
    layout = layout_of([16], 1)
    rows = np.zeros((4, 16), np.int8)
    copier = RowCopier(layout, [random_bytes(NUM_BLOCKS, 16)], rows)

    copier.release()
    copier.release()

    assert copier._rows.base is not rows
    assert copier._refs == []
