"""Threads that work on one transfer move apart when they find themselves on the same core.

It knows no transfer and ties nobody to a core: the system may move a thread again at once. The kernel of a virtual
machine takes a core that its host has put to sleep for a busy one, and wakes a second thread beside the first; there
it waits for time slices of 4 ms, as a rule, while the other core sleeps on.

A thread that was moved may afterwards run on the cores that it could run on just then: of cores that its control group
is given later it learns only if it has never been moved.
"""

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.base import BlockIds
from kvtier.compiled import report_import_error
from kvtier.cpu.row_layout import GroupMoves, GroupRows, PagePlace, RowLayout, Run, locate, plan_runs
from kvtier.limits import count_usable_cores


def _find_get_core() -> Callable[[], int] | None:
    # Called with the interpreter's lock held: letting go of it is what wakes threads.
    get_core: Callable[[], int] | None = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
    return get_core


@dataclass(frozen=True, slots=True)
class CoreCalls:
    """What the system is asked, of the calling thread.

    Attributes:
        get_core: the core that it runs on; negative when the system cannot tell, None where nobody can.
        get_allowed: the cores that it may run on.
        set_allowed: lets it run on these cores only.
    """

    get_core: Callable[[], int] | None
    get_allowed: Callable[[], AbstractSet[int]]
    set_allowed: Callable[[AbstractSet[int]], None]


REAL_CALLS = CoreCalls(
    _find_get_core(), lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)
)


class CoreSpread:
    """The cores that the threads of one transfer began on.

    Thread: any; ``join`` is called by each of them, with the interpreter's lock held throughout.

    Args:
        calls: the system.
    """

    def __init__(self, calls: CoreCalls = REAL_CALLS) -> None:
        self._calls = calls
        self._taken: set[int] = set()

    def join(self) -> None:
        """Take the calling thread's core; move it to another one first if that is taken and others are not."""
        if self._calls.get_core is None:
            return
        with suppress(OSError):  # a sandbox that forbids it; the thread stays where it is
            if self._calls.get_core() in self._taken:
                self._move()
            self._taken.add(self._calls.get_core())

    def _move(self) -> None:
        allowed = self._calls.get_allowed()
        free = allowed - self._taken
        if free:
            self._calls.set_allowed(free)
            self._calls.set_allowed(allowed)


try:
    from kvtier.cpu import _page_copy
except ImportError as error:  # installed where nothing could be compiled, as a rule
    _page_copy = None  # type: ignore[assignment]  # mypy knows modules, not their absence
    report_import_error("kvtier.cpu._page_copy", error)

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.int8]
Piece = Callable[[], None]
Share = tuple[Bytes, Bytes, npt.NDArray[np.int64], bool]
"""What moves of one ref: its pages, shape (num_blocks, page_bytes); its part of the rows, shape (num_slots,
num_sub_blocks * page_bytes); block, slot and sub-block of each page, shape (num_pages, 3), contiguous; and whether
writes bypass the cache."""

MAX_COPY_THREADS = 8
"""Threads that copy one transfer. One core moves about 12 GB/s, a socket's memory is busy with about eight; more would
only take cores from the engine. 1 leaves half of a two-core machine's bandwidth unused."""

PIECE_BYTES = 1 << 20
"""Most bytes of a piece. Smaller ones pay more for Python (some 3 us each), larger ones leave a core idle at the
end of a transfer. Compiled, a transfer has as many threads as pieces of this size: waking one takes 50 us."""

PART_BYTES = 256 << 10
"""Bytes that a thread takes at a time of what compiled calls share. Smaller ones let threads meet at the counter more
often, larger ones leave a core idle at the end of a transfer."""

GATHER_BELOW_BYTES = 8 << 10
"""Mean bytes of a run below which pages are gathered by index instead of copied run by run. Gathering costs a second
copy through the cache, a run costs 1 us of interpreter lock: with two threads they break even near 8 KiB."""

GATHER_PIECE_BYTES = 256 << 10
"""Bytes gathered at a time: the intermediate copy must stay in a core's own cache (512 KiB and more)."""

PAST_CACHE_FROM_BYTES = 4 << 10
"""Pages of at least this size are written past the cache, where that is wanted at all. The first and the last line of a
page are written as usual; of a smaller page they are too large a part."""

LOADED_PAST_CACHE_FROM_BYTES = 32 << 20
"""Bytes of one call of ``load`` from which on it is written past the cache. The model reads them at once, so a few, or
a layer by itself, should be in the cache; more would push out their own beginning. A store is read by tiers only."""


class PageCalls(Protocol):
    """Many pages moved with one call."""

    def move_pages(
        self, shares: Sequence[Share], turn: npt.NDArray[np.int64], part_bytes: int, to_rows: bool, /
    ) -> None:
        """Copy pages to their places in rows, or back; returns when no part is left that nobody has taken.

        Args:
            shares: what to copy; must not change meanwhile.
            turn: the number of the next part, shape (1,), zero at first; threads with the same one share the work.
            part_bytes: how much a thread takes at a time.
            to_rows: the direction.

        Raises:
            IndexError: a place that there is not; this call has copied nothing.
            ValueError: shapes that do not fit, or a target that is read-only; this call has copied nothing.
        """


COMPILED_CALLS: PageCalls | None = _page_copy


class RowCopier:
    """Copies in both directions between one set of device tensors and one set of rows.

    Thread: any number of threads may copy at a time, as long as their blocks differ.

    Args:
        layout: where bytes are within a row.
        device_pages: the canonical tensors, each shape (num_blocks, page_bytes), int8; rows may be strided.
        rows: the worker's part of all rows, shape (num_slots, part_bytes), int8; rows may be strided.
        num_threads: threads that copy one transfer, the caller's included; None takes what the process may use.
        calls: moves pages; None leaves it to numpy.
    """

    def __init__(
        self,
        layout: RowLayout,
        device_pages: Sequence[Bytes],
        rows: Bytes,
        num_threads: int | None = None,
        calls: PageCalls | None = COMPILED_CALLS,
    ) -> None:
        self._layout = layout
        self._calls = calls
        self._rows = rows
        self._refs = [
            [
                _PageCopier(place, layout.block_size_factor, device_pages[place.tensor_idx], rows)
                for place in g.places
            ]
            for g in layout.groups
        ]
        self._num_helpers = (num_threads or min(MAX_COPY_THREADS, count_usable_cores())) - 1
        # Stores and loads share the helpers; the lock lets one of them start the threads.
        self._has_started = False
        self._starting = threading.Lock()
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), "kvtier-copy-helper")

    def store(self, moves: Sequence[GroupMoves]) -> None:
        """Copy device -> rows and zero the tails. Returns when the bytes are there."""
        pieces = self._plan_pieces(moves, slice(None), is_store=True)
        pieces += [tail for move in moves if (tail := self._plan_tail(move)) is not None]
        self._run(pieces)

    def load(self, moves: Sequence[GroupMoves], places: slice | None = None) -> None:
        """Copy rows -> device. Returns when the bytes are there.

        Args:
            moves: what to copy.
            places: which refs of each group; None means all of them.
        """
        self._run(self._plan_pieces(moves, places or slice(None), is_store=False))

    def release(self) -> None:
        """End the helpers and let go of tensors and rows; idempotent. There must be no copy any more."""
        self._helpers.shutdown()
        self._refs = []
        self._rows = self._rows[:0].copy()

    def _plan_pieces(self, moves: Sequence[GroupMoves], places: slice, *, is_store: bool) -> list[Piece]:
        if self._calls is None:
            return [
                piece for move in moves for piece in self._plan_with_numpy(move, places, is_store=is_store)
            ]
        by_page = [(_places_of_pages(move, self._layout.block_size_factor), move.group_idx) for move in moves]
        num_bytes = sum(
            len(pages) * ref.page_size_bytes for pages, group in by_page for ref in self._refs[group][places]
        )
        is_past_cache = is_store or num_bytes >= LOADED_PAST_CACHE_FROM_BYTES
        shares = [
            ref.share(pages, is_past_cache=is_past_cache)
            for pages, group in by_page
            for ref in self._refs[group][places]
        ]
        turn = np.zeros(1, np.int64)
        num_threads = min(1 + self._num_helpers, -(-num_bytes // PIECE_BYTES))
        return [partial(self._calls.move_pages, shares, turn, PART_BYTES, is_store)] * num_threads

    def _plan_with_numpy(self, move: GroupMoves, places: slice, *, is_store: bool) -> Iterator[Piece]:
        factor = self._layout.block_size_factor
        runs = plan_runs(move, factor)
        for size_bytes, refs in groupby(self._refs[move.group_idx][places], lambda ref: ref.page_size_bytes):
            if len(move.device_blocks) * size_bytes >= len(runs) * GATHER_BELOW_BYTES:
                batches = list(_batch_rectangles(runs, factor, max(1, PIECE_BYTES // size_bytes)))
                yield from (partial(ref.copy, batch, is_store=is_store) for ref in refs for batch in batches)
            else:
                parts = list(_split_scattered(move, factor, max(1, GATHER_PIECE_BYTES // size_bytes)))
                yield from (partial(ref.gather, part, is_store=is_store) for ref in refs for part in parts)

    def _plan_tail(self, move: GroupMoves) -> Piece | None:
        group: GroupRows = self._layout.groups[move.group_idx]
        if group.used_bytes == self._layout.part_bytes:
            return None

        def zero_tail() -> None:
            self._rows[move.slots, group.used_bytes :] = 0

        return zero_tail

    def _start_helpers(self) -> None:
        """Start every helper's thread before any of them gets work, or do without them.

        A thread that cannot be started in the middle of a transfer would leave its share queued: a helper could
        take it up after the transfer was reported, and write into slots that belong to others by then.
        """
        self._has_started = True
        may_go = threading.Event()
        started: list[Future[bool]] = []
        try:
            started = [self._helpers.submit(may_go.wait) for _ in range(self._num_helpers)]
        except RuntimeError as error:
            logger.warning("copies are made by one thread, since no other can be started: %s", error)
            self._num_helpers = 0
        finally:
            may_go.set()
        wait(started)

    def _run(self, pieces: Sequence[Piece]) -> None:
        """Carry out ``pieces``; when one fails, none is running any more by the time the error is raised."""
        todo = deque(pieces)
        with self._starting:
            if not self._has_started:
                self._start_helpers()
        num_helpers = min(self._num_helpers, len(todo) - 1)
        spread = CoreSpread()
        if num_helpers > 0:
            spread.join()
        helpers = [self._helpers.submit(_help, todo, spread) for _ in range(num_helpers)]
        try:
            _work_off(todo)
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()


class _PageCopier:
    """The two ends of one ref, as arrays over all device blocks and all slots."""

    def __init__(self, place: PagePlace, factor: int, device_pages: Bytes, rows: Bytes) -> None:
        size_bytes = place.page_size_bytes
        self.page_size_bytes = size_bytes
        self._device = device_pages[:, :size_bytes]
        part = rows[:, place.offset_bytes : place.offset_bytes + factor * size_bytes]
        self._rows = part.reshape(len(rows), factor, size_bytes)
        self._parts = part
        # One element a page: numpy then moves an index's page with one memcpy instead of byte by byte.
        page = np.dtype((np.void, size_bytes))
        self._device_by_page = self._device.view(page)[:, 0]
        self._rows_by_page = self._rows.view(page)[:, :, 0]

    def share(self, places: npt.NDArray[np.int64], *, is_past_cache: bool) -> Share:
        """Return pages that move, given block, slot and sub-block of each."""
        is_past_cache &= self.page_size_bytes >= PAST_CACHE_FROM_BYTES
        return self._device, self._parts, places, is_past_cache

    def copy(self, batch: Sequence["_Rectangle"], *, is_store: bool) -> None:
        """Copy rectangles."""
        for device_index, rows_index, shape in batch:
            device = self._device[device_index]
            if shape is not None:
                device = device.reshape(*shape, self.page_size_bytes)
            if is_store:
                self._rows[rows_index] = device
            else:
                device[...] = self._rows[rows_index]

    def gather(self, part: "_Scattered", *, is_store: bool) -> None:
        """Copy scattered pages."""
        rows = self._rows_by_page[:, part.sub_block]
        if is_store:
            rows[part.slots] = self._device_by_page[part.device_blocks]
        else:
            self._device_by_page[part.device_blocks] = rows[part.slots]


class _Rectangle(NamedTuple):
    """A run as indices into a ref's arrays; ``shape`` is what the device's blocks must be folded into."""

    device_index: int | slice
    rows_index: tuple[int | slice, int | slice]
    shape: tuple[int, int] | None


class _Scattered(NamedTuple):
    """Device blocks that are the same sub-block of their slots."""

    device_blocks: BlockIds
    slots: BlockIds
    sub_block: int


def _help(todo: deque[Piece], spread: CoreSpread) -> None:
    spread.join()
    _work_off(todo)


def _work_off(todo: deque[Piece]) -> None:
    """Carry out pieces until none is left; an error takes the rest away from everybody."""
    try:
        while True:
            try:
                piece = todo.popleft()
            except IndexError:
                return
            piece()
    except BaseException:
        todo.clear()
        raise


def _places_of_pages(move: GroupMoves, factor: int) -> npt.NDArray[np.int64]:
    """Return block, slot and sub-block of each page, shape (num_pages, 3). Pure."""
    return np.stack([move.device_blocks, *locate(move, factor)], axis=1).astype(np.int64, copy=False)


def _batch_rectangles(runs: Sequence[Run], factor: int, max_device_blocks: int) -> Iterator[list[_Rectangle]]:
    """Split long runs and join short ones, so that each batch is one piece's worth."""
    batch: list[_Rectangle] = []
    num_batched = 0
    for run in runs:
        for short in _split_run(run, max_device_blocks):
            if batch and num_batched + short.num_device_blocks > max_device_blocks:
                yield batch
                batch, num_batched = [], 0
            batch.append(_make_rectangle(short, factor))
            num_batched += short.num_device_blocks
    if batch:
        yield batch


def _split_run(run: Run, max_device_blocks: int) -> Iterator[Run]:
    step = max(1, max_device_blocks // run.num_sub_blocks)
    if run.num_slots <= step:
        yield run
        return
    for at in range(0, run.num_slots, step):
        yield Run(
            run.first_device_block + at * run.num_sub_blocks,
            run.first_slot + at,
            min(step, run.num_slots - at),
            run.first_sub_block,
            run.num_sub_blocks,
        )


def _make_rectangle(run: Run, factor: int) -> _Rectangle:
    """Index with integers where one will do: numpy takes half as long to follow them as slices."""
    device_block, slot, num_slots, sub_block, num_sub_blocks = run
    if num_slots == num_sub_blocks == 1:
        return _Rectangle(device_block, (slot, sub_block), None)
    device = slice(device_block, device_block + num_slots * num_sub_blocks)
    if factor == 1:
        return _Rectangle(device, (slice(slot, slot + num_slots), 0), None)
    if num_slots == 1:
        return _Rectangle(device, (slot, slice(sub_block, sub_block + num_sub_blocks)), None)
    return _Rectangle(device, (slice(slot, slot + num_slots), slice(None)), (num_slots, factor))


def _split_scattered(move: GroupMoves, factor: int, max_device_blocks: int) -> Iterator[_Scattered]:
    """Sort by sub-block: numpy follows one index array about twice as fast as two."""
    slots, sub_blocks = locate(move, factor)
    for sub_block in range(factor):
        chosen = np.flatnonzero(sub_blocks == sub_block)
        for at in range(0, len(chosen), max_device_blocks):
            part = chosen[at : at + max_device_blocks]
            yield _Scattered(move.device_blocks[part], slots[part], sub_block)
