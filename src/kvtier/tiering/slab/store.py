"""Moves blocks between rows of the primary tier and slots: headers, runs, and what becomes of failures.

It decides nothing about room, the book does; threads of the tier call it with some blocks of a job. A block that
cannot be stored or loaded costs itself only, and is counted with its reason.
"""

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice

from kvtier.base import OffloadKey
from kvtier.errors import TierError, UnknownNameError
from kvtier.namespace import Namespace
from kvtier.tiering.aligned import allocate_pages
from kvtier.tiering.base import TierFailure
from kvtier.tiering.block_store import BlockStore, Rows
from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.counters import Counters
from kvtier.tiering.envelope import HEADER_PAGE_BYTES, Verdict, check
from kvtier.tiering.failures import FAILURE_OF_VERDICT, FAULTS
from kvtier.tiering.io_pool import Moved
from kvtier.tiering.sealing import plan_num_ahead, seal_ahead
from kvtier.tiering.slab.book import SlotBook
from kvtier.tiering.slab.era import Hold
from kvtier.tiering.slab.indexer import Indexer
from kvtier.tiering.slab.runs import Move, join_runs
from kvtier.tiering.slab.slab_file import SlabFile
from kvtier.tiering.slab.slot_header import write_header
from kvtier.tiering.slab.space import Space

logger = logging.getLogger(__name__)

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


class SlabBlockStore(BlockStore[Space]):
    """Stores and loads some blocks at a time in slots; keeps no state but header pages per thread.

    Args:
        file: the slab.
        rows: the primary's.
        book: which block is where.
        max_part_blocks: blocks in a call of ``store`` or ``load``.
    """

    def __init__(self, file: SlabFile, rows: Rows, book: SlotBook, max_part_blocks: int) -> None:
        self.book = book
        self.indexer = Indexer(file, book)
        self._file = file
        self._rows = rows
        self._max_part_blocks = max_part_blocks
        self._max_call_blocks = max(1, MAX_CALL_BYTES // rows.row_bytes)
        self._counters = Counters(*COUNTER_NAMES)
        self._of_thread = threading.local()

    def open_space(self, namespace: Namespace, *, is_new: bool) -> Space:
        """Return the namespace as jobs carry it; the blocks of the one before are the first to leave."""
        space = Space(namespace)
        self.book.open_space(space)
        return space

    def check_reachable(self) -> None:
        """See whether the eviction policy that was asked for exists; the file is open already.

        Raises:
            TierError: it does not.
        """
        try:
            self.book.require_policy()
        except UnknownNameError as error:
            raise TierError("slab", str(error)) from error

    def find(self, space: Space, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        """Return which of ``keys`` are there; waits a little for the index at the start."""
        self.indexer.wait_complete(INDEX_WAIT_S)
        return [key for key in keys if self.book.is_held(space, key)]

    def touch(self, space: Space, keys: Collection[OffloadKey]) -> None:
        """Mark ``keys`` as recently used."""
        self.book.touch(space, keys)

    def store(self, space: Space, keys: Sequence[OffloadKey], slots: Sequence[int]) -> Moved:
        """Write blocks; those that are there now have arrived, held before or not.

        Thread: any of the pool's; blocks.
        """
        slot_of = dict(zip(keys, slots, strict=True))
        plan = self.book.begin_store(space, tuple(slot_of))
        written: set[OffloadKey] = set()
        try:
            moves = (Move(hold, self._rows.row(slot_of[hold.key])) for hold in plan.holds)
            runs = join_runs(moves, self._max_call_blocks)
            pages = iter(self._header_pages(len(plan.holds), is_write=True))
            seal = partial(_seal, pages, space.namespace.digest, plan.oldest_generation)
            for run_pages, run in seal_ahead(runs, seal, self._plan_num_ahead(runs)):
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
        return Moved(arrived, is_fault=num_failed > 0)

    def load(self, space: Space, keys: Sequence[OffloadKey], slots: Sequence[int]) -> Moved:
        """Read blocks into rows; those whose bytes are there and right have arrived.

        Thread: any of the pool's; blocks.
        """
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
        return Moved(arrived, is_fault=not FAULTS.isdisjoint(failures.values()))

    def stats(self) -> dict[str, float]:
        """Return counts of loads by outcome and of stores, and what the slots hold."""
        return self._counters.snapshot() | self.book.stats()

    def close(self) -> None:
        """End the thread that reads headers, then give the file and its lock back."""
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
        return plan_num_ahead(bytes_a_call, has_direct_io=self._file.has_direct_io)

    def _read(self, space: Space, run: Sequence[Move]) -> dict[OffloadKey, TierFailure]:
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
                check(page, row, hold.key, space.namespace.digest, codec=RAW_NUMBER)
                if is_whole
                else Verdict.DAMAGED
            )
            if verdict is not Verdict.OK:
                failures[hold.key] = FAILURE_OF_VERDICT[verdict]
                logger.warning("tier slab: slot %d is %s", hold.slot, verdict.value)
        return failures

    def _erase(self, holds: Sequence[Hold]) -> None:
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
