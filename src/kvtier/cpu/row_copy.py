"""Copies between CPU tensors and rows, with several threads per transfer.

A transfer is cut into pieces that the threads take in turn. With the compiled module the pieces of a ref are moved with
one call per thread; without it numpy copies runs of blocks, or gathers scattered pages.

The threads of one transfer move apart when they find themselves on the same core (``CoreSpread``). The kernel of a
virtual machine takes a core that its host has put to sleep for a busy one and wakes a second thread beside the first,
which then waits for time slices of 4 ms while the other core sleeps. No thread is tied to a core: the system may move
it again. A moved thread keeps the set of cores allowed at that time; only threads that were never moved follow a later
change of their control group.
"""

import ctypes
import importlib.util
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
from kvtier.cpu.row_layout import GroupMoves, GroupRows, PagePlace, RowLayout, Run, locate, plan_runs
from kvtier.limits import count_usable_cores

logger = logging.getLogger(__name__)

REMEDY = (
    "where there are a C compiler and Python's headers, pip install --force-reinstall --no-cache-dir . in kvtier's "
    "checkout"
)
"""How to compile the module again."""


def report_import_error(module: str, error: ImportError) -> None:
    """Log why a compiled module cannot be loaded, if it exists: it costs processor time at every block, unnoticed.

    Args:
        module: its dotted name.
        error: the error of its import.
    """
    found = importlib.util.find_spec(module)
    if found is not None:
        logger.warning(
            "%s cannot be loaded (%s): it is damaged or was made for another machine. Python does the same with more "
            "processor time; %s",
            found.origin,
            error,
            REMEDY,
        )


try:
    from kvtier.cpu import _page_copy
except ImportError as error:  # usually installed without a compiler
    _page_copy = None  # type: ignore[assignment]  # mypy knows modules, not their absence
    report_import_error("kvtier.cpu._page_copy", error)

Bytes = npt.NDArray[np.int8]
Piece = Callable[[], None]
Share = tuple[Bytes, Bytes, npt.NDArray[np.int64], bool]
"""The pages of one ref to move: pages, shape (num_blocks, page_bytes); its part of the rows, shape (num_slots,
num_sub_blocks * page_bytes); block, slot and sub-block of each page, shape (num_pages, 3), contiguous; whether writes
bypass the cache."""

MAX_COPY_THREADS = 8
"""Threads of one transfer. One core moves about 12 GB/s; about eight saturate a socket's memory, more would only take
cores from the engine. 1 leaves half of a two-core machine's bandwidth unused."""

PIECE_BYTES = 1 << 20
"""Most bytes of a piece. Smaller ones pay more for Python (some 3 us each), larger ones leave a core idle at the end of
a transfer. With the compiled module a transfer has one thread per piece of this size: waking one takes 50 us."""

PART_BYTES = 256 << 10
"""Bytes that a thread takes at a time in a compiled call. Smaller ones make threads contend for the counter, larger
ones leave a core idle at the end of a transfer."""

GATHER_BELOW_BYTES = 8 << 10
"""Mean bytes of a run below which pages are gathered by index instead of copied run by run. Gathering costs a second
copy through the cache, a run 1 us of interpreter lock: with two threads they break even near 8 KiB."""

GATHER_PIECE_BYTES = 256 << 10
"""Bytes gathered at a time: the intermediate copy must fit into a core's own cache (512 KiB and more)."""

PAST_CACHE_FROM_BYTES = 4 << 10
"""Pages of at least this size may bypass the cache when written. The first and the last line of a page are written as
usual; for smaller pages these are too large a part."""

LOADED_PAST_CACHE_FROM_BYTES = 32 << 20
"""Bytes of one ``load`` from which on its writes bypass the cache. The model reads them at once, so small loads, such
as one layer, should be in the cache; larger ones would evict their own beginning. A store is read by tiers only."""


def _find_get_core() -> Callable[[], int] | None:
    # Called with the interpreter's lock held: releasing it is what wakes threads.
    get_core: Callable[[], int] | None = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
    return get_core


@dataclass(frozen=True, slots=True)
class CoreCalls:
    """System calls about the calling thread.

    Attributes:
        get_core: returns its current core; negative when unknown. None where the system has no such call.
        get_allowed: returns the cores that it may run on.
        set_allowed: limits it to these cores.
    """

    get_core: Callable[[], int] | None
    get_allowed: Callable[[], AbstractSet[int]]
    set_allowed: Callable[[AbstractSet[int]], None]


REAL_CALLS = CoreCalls(
    _find_get_core(), lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)
)


class CoreSpread:
    """The cores on which the threads of one transfer started.

    Thread: any; ``join`` is called by each of them, with the interpreter's lock held throughout.

    Args:
        calls: system calls.
    """

    def __init__(self, calls: CoreCalls = REAL_CALLS) -> None:
        self._calls = calls
        self._taken: set[int] = set()

    def join(self) -> None:
        """Reserve the calling thread's core; if it is taken and another one is free, move the thread there first."""
        if self._calls.get_core is None:
            return
        with suppress(OSError):  # a sandbox forbids it; the thread is not moved
            if self._calls.get_core() in self._taken:
                self._move()
            self._taken.add(self._calls.get_core())

    def _move(self) -> None:
        allowed = self._calls.get_allowed()
        free = allowed - self._taken
        if free:
            self._calls.set_allowed(free)
            self._calls.set_allowed(allowed)


class PageCalls(Protocol):
    """Moves many pages with one call."""

    def move_pages(
        self, shares: Sequence[Share], turn: npt.NDArray[np.int64], task_bytes: int, to_rows: bool, /
    ) -> None:
        """Copy pages to their places in rows, or back; returns when all tasks have been taken by a thread.

        Args:
            shares: what to copy; must not change meanwhile.
            turn: number of the next task, shape (1,), zero at first; threads that share it share the work.
            task_bytes: bytes that a thread takes at a time.
            to_rows: the direction.

        Raises:
            IndexError: a place does not exist; this call has copied nothing.
            ValueError: shapes do not fit, or a target is read-only; this call has copied nothing.
        """


COMPILED_CALLS: PageCalls | None = _page_copy


class RowCopier:
    """Copies in both directions between one set of device tensors and one set of rows.

    Thread: any number of threads may copy at a time, as long as their blocks differ.

    Args:
        layout: the bytes within a row.
        device_pages: the canonical tensors, each shape (num_blocks, page_bytes), int8; rows may be strided.
        rows: the worker's part of all rows, shape (num_slots, part_bytes), int8; rows may be strided.
        num_threads: threads of one transfer, including the caller's; None: as many as the process may use.
        calls: moves pages; None: numpy does.
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
        # Stores and loads share the helpers; the lock makes one of them start the threads.
        self._has_started = False
        self._starting = threading.Lock()
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), "kvtier-copy-helper")

    def store(self, moves: Sequence[GroupMoves]) -> None:
        """Copy device -> rows and zero the tails. Returns when all bytes are copied."""
        pieces = self._plan_pieces(moves, is_store=True)
        pieces += [tail for move in moves if (tail := self._plan_tail(move)) is not None]
        self._run(pieces)

    def load(self, moves: Sequence[GroupMoves]) -> None:
        """Copy rows -> device. Returns when all bytes are copied."""
        self._run(self._plan_pieces(moves, is_store=False))

    def release(self) -> None:
        """End the helpers and drop tensors and rows; idempotent. No copy may be in flight."""
        self._helpers.shutdown()
        self._refs = []
        self._rows = self._rows[:0].copy()

    def _plan_pieces(self, moves: Sequence[GroupMoves], *, is_store: bool) -> list[Piece]:
        if self._calls is None:
            return [piece for move in moves for piece in self._plan_with_numpy(move, is_store=is_store)]
        by_page = [(_places_of_pages(move, self._layout.block_size_factor), move.group_idx) for move in moves]
        num_bytes = sum(
            len(pages) * ref.page_size_bytes for pages, group in by_page for ref in self._refs[group]
        )
        is_past_cache = is_store or num_bytes >= LOADED_PAST_CACHE_FROM_BYTES
        shares = [
            ref.share(pages, is_past_cache=is_past_cache)
            for pages, group in by_page
            for ref in self._refs[group]
        ]
        turn = np.zeros(1, np.int64)
        num_threads = min(1 + self._num_helpers, -(-num_bytes // PIECE_BYTES))
        return [partial(self._calls.move_pages, shares, turn, PART_BYTES, is_store)] * num_threads

    def _plan_with_numpy(self, move: GroupMoves, *, is_store: bool) -> Iterator[Piece]:
        factor = self._layout.block_size_factor
        runs = plan_runs(move, factor)
        for size_bytes, refs in groupby(self._refs[move.group_idx], lambda ref: ref.page_size_bytes):
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
        """Start every helper's thread before any of them gets work, or continue without helpers.

        If a thread failed to start in the middle of a transfer, its share would stay queued: a helper could run it
        after the transfer was reported, and overwrite slots that hold other blocks by then.
        """
        self._has_started = True
        may_go = threading.Event()
        started: list[Future[bool]] = []
        try:
            started = [self._helpers.submit(may_go.wait) for _ in range(self._num_helpers)]
        except RuntimeError as error:
            logger.warning("copies use one thread, because no other can be started: %s", error)
            self._num_helpers = 0
        finally:
            may_go.set()
        wait(started)

    def _run(self, pieces: Sequence[Piece]) -> None:
        """Run ``pieces``; when one fails, raise its error after all others have ended."""
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
            _run_pieces(todo)
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()


class _PageCopier:
    """Both sides of one ref, as arrays over all device blocks and all slots."""

    def __init__(self, place: PagePlace, factor: int, device_pages: Bytes, rows: Bytes) -> None:
        size_bytes = place.page_size_bytes
        self.page_size_bytes = size_bytes
        self._device = device_pages[:, :size_bytes]
        part = rows[:, place.offset_bytes : place.offset_bytes + factor * size_bytes]
        self._rows = part.reshape(len(rows), factor, size_bytes)
        self._parts = part
        # One element per page: numpy then moves an indexed page with one memcpy instead of byte by byte.
        page = np.dtype((np.void, size_bytes))
        self._device_by_page = self._device.view(page)[:, 0]
        self._rows_by_page = self._rows.view(page)[:, :, 0]

    def share(self, places: npt.NDArray[np.int64], *, is_past_cache: bool) -> Share:
        """Return the share that moves these pages, given by block, slot and sub-block."""
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
    """A run as indices into a ref's arrays; the device's blocks are reshaped to ``shape``."""

    device_index: int | slice
    rows_index: tuple[int | slice, int | slice]
    shape: tuple[int, int] | None


class _Scattered(NamedTuple):
    """Device blocks that have the same sub-block number in their slots."""

    device_blocks: BlockIds
    slots: BlockIds
    sub_block: int


def _help(todo: deque[Piece], spread: CoreSpread) -> None:
    spread.join()
    _run_pieces(todo)


def _run_pieces(todo: deque[Piece]) -> None:
    """Run pieces until none is left; after an error no thread takes another piece."""
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
    """Split long runs and join short ones, so that each batch is the work of one piece."""
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
    """Index with integers where one is enough: numpy takes half as long for them as for slices."""
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
