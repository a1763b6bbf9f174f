"""Neighbouring slots, to be moved with one call. Pure."""

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.errors import TierError, UnknownNameError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore, Rows
from kvtier.tiering.kit.disk import allocate_pages, checksum_ahead, plan_num_checksums_ahead
from kvtier.tiering.kit.envelope import (
    FAILURE_OF_CHECK,
    FAULTS,
    HEADER_PAGE_BYTES,
    RAW_CODEC,
    HeaderCheck,
    check,
)
from kvtier.tiering.kit.health import Counters
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.slab.scan import scan, write_header
from kvtier.tiering.slab.slab_file import SlabFile
from kvtier.tiering.slab.slot_table import SlabNamespace, SlotPin, SlotTable


class Move(NamedTuple):
    """A block's two places.

    Attributes:
        hold: its slot in the file.
        row: its bytes in the primary tier.
    """

    hold: SlotPin
    row: memoryview


def join_runs(moves: Iterable[Move], max_blocks: int) -> list[Sequence[Move]]:
    """Return the moves ordered by slot, cut wherever a slot does not follow the one before. Pure.

    Args:
        moves: of slots that differ.
        max_blocks: moves in a run.
    """
    runs: list[list[Move]] = []
    for move in sorted(moves, key=lambda move: move.hold.slot):
        if runs and len(runs[-1]) < max_blocks and runs[-1][-1].hold.slot + 1 == move.hold.slot:
            runs[-1].append(move)
        else:
            runs.append([move])
    return list(runs)


logger = logging.getLogger(__name__)


class Indexer:
    """Scans a slab once, in the background.

    Mutable are two events and the thread; events guard themselves, and only the scheduler's thread starts and stops.

    Args:
        file: the slab; a new one holds nothing and is not scanned.
        book: takes over what is found.
    """

    def __init__(self, file: SlabFile, book: SlotTable) -> None:
        self._file = file
        self._book = book
        self._ended = threading.Event()
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if file.is_new:
            self._ended.set()

    def start(self, space: SlabNamespace) -> None:
        """Begin to look for the blocks of ``space``; a new slab has none."""
        if self._ended.is_set() or self._thread is not None:
            return
        self._thread = threading.Thread(
            target=self._work, args=(space,), name="kvtier-slab-index", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("tier slab: no thread to read %s, it is not used: %s", self._file.path, error)
            self._thread = None
            self._ended.set()

    @property
    def is_complete(self) -> bool:
        """Whether everything that can be found has been found."""
        return self._ended.is_set()

    def wait_complete(self, timeout_s: float) -> bool:
        """Block until everything has been found, or nobody looks any more; False when ``timeout_s`` passed first."""
        return self._ended.wait(timeout_s)

    def stop(self) -> None:
        """End the scan before its time; does not wait. Lookups that wait for it go on."""
        self._is_stopped.set()
        self._ended.set()

    def join(self, timeout_s: float) -> bool:
        """Block until the thread has ended; False when ``timeout_s`` passed first."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self, space: SlabNamespace) -> None:
        try:
            contents = scan(self._file, space.namespace.digest, self._is_stopped.is_set)
            if not self._is_stopped.is_set():
                self._book.adopt(space, contents)
        except Exception:  # thread top
            logger.exception("tier slab: reading %s failed, it is not used", self._file.path)
        finally:
            self._ended.set()


COUNTER_NAMES = (
    "hits", "loaded_bytes", "absent", "damaged", "foreign", "io_error",
    "stored_blocks", "stored_bytes", "declined", "store_errors",
)  # fmt: skip
"""Counts that are there from the beginning; the first row is about loads, with the reasons of misses."""

INDEX_WAIT_S = 2.0
"""Seconds for which a question waits for the index at the start. Shorter misses blocks that would be known a moment
later; longer keeps a request waiting behind a large slab that it could compute instead."""

PEER_WAIT_S = 1.0
"""Seconds for which a store waits for another job that writes the same block. Shorter reports a block as not stored
that soon is; longer keeps a thread behind a disk that hangs."""

MAX_CALL_BYTES = 2**20
"""Bytes of neighbouring slots that are moved with one call. Fewer make more calls; of more, the device finds those
that were sealed last in a core's cache, and waits while those that were read are checked."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the thread that reads headers is waited for; it stops at its next slot."""


class SlabBlockStore(BlockStore[SlabNamespace]):
    """Stores and loads some blocks at a time in slots; keeps no state but header pages per thread.

    Args:
        file: the slab.
        rows: the primary's.
        book: which block is where.
        max_part_blocks: blocks in a call of ``store`` or ``load``.
    """

    def __init__(self, file: SlabFile, rows: Rows, book: SlotTable, max_part_blocks: int) -> None:
        self.book = book
        self.indexer = Indexer(file, book)
        self._file = file
        self._rows = rows
        self._max_part_blocks = max_part_blocks
        self._max_call_blocks = max(1, MAX_CALL_BYTES // rows.row_bytes)
        self._counters = Counters(*COUNTER_NAMES)
        self._of_thread = threading.local()

    def open_space(self, namespace: Namespace, *, is_new: bool) -> SlabNamespace:
        space = SlabNamespace(namespace)
        self.book.open_space(space)
        return space

    def check_reachable(self) -> None:
        try:
            self.book.require_policy()
        except UnknownNameError as error:
            raise TierError("slab", str(error)) from error

    def find(self, space: SlabNamespace, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        self.indexer.wait_complete(INDEX_WAIT_S)
        return [key for key in keys if self.book.is_held(space, key)]

    def touch(self, space: SlabNamespace, keys: Collection[OffloadKey]) -> None:
        self.book.touch(space, keys)

    def store(
        self, space: SlabNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        slot_of = dict(zip(keys, slots, strict=True))
        plan = self.book.begin_store(space, tuple(slot_of))
        written: set[OffloadKey] = set()
        try:
            moves = (Move(hold, self._rows.row(slot_of[hold.key])) for hold in plan.holds)
            runs = join_runs(moves, self._max_call_blocks)
            pages = iter(self._header_pages(len(plan.holds), is_write=True))
            seal = partial(_seal, pages, space.namespace.digest, plan.oldest_generation)
            for run_pages, run in checksum_ahead(runs, seal, self._plan_num_ahead(runs)):
                written.update(self._write(run_pages, run))
        finally:
            self.book.end_store(plan.holds, written)
        others = self.book.wait_written(space, plan.awaited, PEER_WAIT_S) if plan.awaited else []
        num_failed = len(plan.holds) - len(written)
        arrived = {*plan.held, *written, *others}
        self._counters.add(
            stored_blocks=len(written),
            stored_bytes=len(written) * self._rows.row_bytes,
            declined=len(slot_of) - len(arrived) - num_failed,
            store_errors=num_failed,
        )
        return TransferOutcome(arrived, is_fault=num_failed > 0)

    def load(self, space: SlabNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        held = self.book.begin_load(space, keys)
        moves = [
            Move(hold, self._rows.row(slot))
            for hold, slot in zip(held, slots, strict=True)
            if hold is not None
        ]
        failures: dict[OffloadKey, TierFailure] = {}
        try:
            for run in join_runs(moves, self._max_call_blocks):
                failures |= self._read(space, run)
            self._erase([move.hold for move in moves if failures.get(move.hold.key) is TierFailure.DAMAGED])
        finally:
            lost = [key for key, failure in failures.items() if failure is not TierFailure.IO_ERROR]
            self.book.end_load([move.hold for move in moves], lost)
        arrived = [move.hold.key for move in moves if move.hold.key not in failures]
        self._count_loads(len(arrived), len(keys) - len(moves), failures.values())
        return TransferOutcome(arrived, is_fault=not FAULTS.isdisjoint(failures.values()))

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot() | self.book.stats()

    def close(self) -> None:
        self.indexer.stop()
        if self.indexer.join(CLOSE_TIMEOUT_S):
            self._file.close()
        else:
            # Its number must not become another file's while that thread may still read from it.
            logger.warning("tier slab: %s hangs; it stays locked until this process ends", self._file.path)

    def _write(self, pages: Sequence[memoryview], run: Sequence[Move]) -> list[OffloadKey]:
        """Write neighbouring slots behind their headers; when that fails, each by itself."""
        try:
            self._file.write(run[0].hold.slot, _interleave(pages, run))
        except OSError as error:
            if len(run) > 1:
                return [
                    key for page, move in zip(pages, run, strict=True) for key in self._write([page], [move])
                ]
            logger.warning("tier slab: slot %d was not written: %s", run[0].hold.slot, error)
            self._erase([run[0].hold])
            return []
        return [move.hold.key for move in run]

    def _plan_num_ahead(self, runs: Sequence[Sequence[Move]]) -> int:
        """Return how many calls are sealed ahead, more of them where slots are no neighbours."""
        num_blocks = sum(map(len, runs))
        if not num_blocks:
            return 0
        bytes_a_call = num_blocks * self._rows.row_bytes // len(runs)
        return plan_num_checksums_ahead(bytes_a_call, has_direct_io=self._file.has_direct_io)

    def _read(self, space: SlabNamespace, run: Sequence[Move]) -> dict[OffloadKey, TierFailure]:
        """Read neighbouring slots, and say what is wrong with which; when that fails, each by itself."""
        pages = self._header_pages(len(run), is_write=False)
        try:
            num_bytes = self._file.read(run[0].hold.slot, _interleave(pages, run))
        except OSError as error:
            if len(run) > 1:
                return {key: failure for move in run for key, failure in self._read(space, [move]).items()}
            logger.warning("tier slab: slot %d was not read: %s", run[0].hold.slot, error)
            return {run[0].hold.key: TierFailure.IO_ERROR}
        num_whole = num_bytes // (HEADER_PAGE_BYTES + self._rows.row_bytes)
        failures = {}
        for number, (page, (hold, row)) in enumerate(zip(pages, run, strict=True)):
            is_whole = number < num_whole
            verdict = (
                check(page, row, hold.key, space.namespace.digest, codec=RAW_CODEC)
                if is_whole
                else HeaderCheck.DAMAGED
            )
            if verdict is not HeaderCheck.OK:
                failures[hold.key] = FAILURE_OF_CHECK[verdict]
                logger.warning("tier slab: slot %d is %s", hold.slot, verdict.value)
        return failures

    def _erase(self, holds: Sequence[SlotPin]) -> None:
        """Make slots empty that nobody else uses now, so that no later start finds what is in them."""
        for hold in holds:
            try:
                self._file.erase(hold.slot)
            except OSError as error:
                logger.warning("tier slab: slot %d cannot be erased: %s", hold.slot, error)

    def _count_loads(self, num_arrived: int, num_absent: int, failures: Collection[TierFailure]) -> None:
        self._counters.add(
            hits=num_arrived, loaded_bytes=num_arrived * self._rows.row_bytes, absent=num_absent
        )
        for failure in failures:
            self._counters.add(**{failure.value: 1})

    def _header_pages(self, num: int, *, is_write: bool) -> list[memoryview]:
        """Return pages of the calling thread: what was read is never written into another slot."""
        name = "write_pages" if is_write else "read_pages"
        pages: list[memoryview] | None = getattr(self._of_thread, name, None)
        if pages is None:
            pages = allocate_pages(self._max_part_blocks)
            setattr(self._of_thread, name, pages)
        return pages[:num]


def _seal(
    pages: Iterator[memoryview], namespace_digest: bytes, oldest_generation: int, run: Sequence[Move]
) -> tuple[list[memoryview], Sequence[Move]]:
    """Fill the next of ``pages`` with the headers of a run."""
    taken = list(islice(pages, len(run)))
    for page, (hold, row) in zip(taken, run, strict=True):
        write_header(page, hold.key, namespace_digest, row, hold.generation, oldest_generation)
    return taken, run


def _interleave(pages: Sequence[memoryview], run: Sequence[Move]) -> list[memoryview]:
    buffers: list[memoryview] = []
    for page, (_, row) in zip(pages, run, strict=True):
        buffers += (page, row)
    return buffers
