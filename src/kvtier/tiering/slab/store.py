"""Moves blocks between rows of the primary tier and slots of the slab.

Neighbouring slots are moved with one call. What is wrong with one block costs that block and is counted with its
reason; when a call of several blocks fails, each is tried by itself.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.kit.backend import BlockStore, Counters, Rows, ThreadPages, allocate_pages
from kvtier.tiering.kit.block_format import BlockFormat
from kvtier.tiering.kit.disk import checksum_ahead, plan_num_checksums_ahead
from kvtier.tiering.kit.envelope import FAILURE_OF_CHECK, FAULTS, HEADER_PAGE_BYTES, HeaderCheck
from kvtier.tiering.kit.health import OutageLog
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.page_guard import PageKeeper
from kvtier.tiering.kit.purging import BATCH_BLOCKS, Batches, Removed
from kvtier.tiering.slab.documents import SlabPages
from kvtier.tiering.slab.expiry import NO_TIME
from kvtier.tiering.slab.reopening import CurrentSlab, OpenSlab
from kvtier.tiering.slab.scan import write_header
from kvtier.tiering.slab.slot_table import SlabNamespace, SlotPin

logger = logging.getLogger(__name__)

COUNTER_NAMES = (
    "hits", "loaded_bytes", "absent", "damaged", "foreign", "io_error",
    "stored_blocks", "stored_bytes", "declined", "store_errors",
)  # fmt: skip
"""Counts that are there from the beginning; the first row is about loads, with the reasons of misses."""

INDEX_WAIT_S = 2.0
"""Seconds for which a lookup waits for the index at the start. Shorter misses blocks that would be known a moment
later; longer keeps a request waiting behind a large slab that it could compute instead."""

PEER_WAIT_S = 1.0
"""Seconds for which a store waits for another job that writes the same block. Shorter reports a block as not stored
that soon is; longer keeps a thread behind a disk that hangs."""

MAX_CALL_BYTES = 2**20
"""Bytes of neighbouring slots that are moved with one call. Fewer make more calls; of more, the device finds those
that got their headers last in a core's cache, and waits while those that were read are checked."""


class Move(NamedTuple):
    """A block on its way.

    Attributes:
        pin: its slot in the file.
        row: its bytes in the primary tier, or encrypted in the thread's memory.
    """

    pin: SlotPin
    row: memoryview


class SlabBlockStore(BlockStore[SlabNamespace], PageKeeper[SlabNamespace]):
    """Stores and loads some blocks at a time in slots; keeps no state but header pages per thread.

    Args:
        current: the slab.
        rows: the primary's.
        max_task_blocks: blocks in a call of ``store`` or ``load``.
        now_s: tells the time of stores, seconds since 1970; None: no block has one.
    """

    def __init__(
        self,
        current: CurrentSlab,
        rows: Rows,
        max_task_blocks: int,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self._now_s = now_s
        self._current = current
        self._rows = rows
        self._max_task_blocks = max_task_blocks
        self._max_call_blocks = max(1, MAX_CALL_BYTES // rows.row_bytes)
        self._counters = Counters(*COUNTER_NAMES)
        self._of_thread = threading.local()
        self._scratch = ThreadPages(max_task_blocks, rows.row_bytes)
        self._pages = SlabPages(Path(current.opened.file.path))
        if current.opened.file.is_new:
            self._pages.remove()  # of a slab that was here before
        self._outage = OutageLog(f"tier slab at {current.opened.file.path}")

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> SlabNamespace:
        namespace = SlabNamespace(identity)
        self._current.open_namespace(namespace)
        return namespace

    def contains_batch(self, namespace: SlabNamespace, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        opened = self._current.opened
        opened.indexer.wait_complete(INDEX_WAIT_S)
        return [key for key in keys if opened.slots.is_held(namespace, key)]

    def store(
        self, namespace: SlabNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        with self._current.use() as opened:
            return self._store(opened, namespace, keys, slots)

    def load(
        self, namespace: SlabNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        with self._current.use() as opened:
            return self._load(opened, namespace, keys, slots)

    def read_page(self, namespace: SlabNamespace) -> bytes | None:
        return self._pages.read(namespace.identity.name)

    def create_page(self, namespace: SlabNamespace, data: bytes) -> None:
        self._pages.create(namespace.identity.name, data)

    def remove_page(self, namespace: SlabNamespace) -> None:
        self._counters.add(damaged=1)
        self._pages.remove([namespace.identity.name])

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot() | self._current.opened.slots.stats()

    def close(self) -> None:
        self._current.close()

    def on_forked(self) -> None:
        self._current.close_in_child()

    def _store(
        self,
        opened: OpenSlab,
        namespace: SlabNamespace,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
    ) -> TransferOutcome:
        slot_of = dict(zip(keys, slots, strict=True))
        plan = opened.slots.prepare_store(namespace, tuple(slot_of))
        written: set[OffloadKey] = set()
        stored_s = None if self._now_s is None else self._now_s()
        try:
            moves = (Move(pin, self._rows.row(slot_of[pin.key])) for pin in plan.pins)
            runs = join_runs(moves, self._max_call_blocks)
            pages = iter(self._header_pages(len(plan.pins), is_write=True))
            add_headers = partial(
                _add_headers,
                pages,
                self._scratch_rows(namespace),
                namespace.format,
                plan.oldest_generation,
                stored_s,
            )
            for run_pages, run in checksum_ahead(runs, add_headers, self._plan_num_ahead(opened, runs)):
                written.update(self._write(opened, run_pages, run))
        finally:
            opened.slots.complete_store(plan.pins, written, stored_s or NO_TIME)
        others = opened.slots.wait_written(namespace, plan.awaited, PEER_WAIT_S) if plan.awaited else []
        failed = [pin.key for pin in plan.pins if pin.key not in written]
        succeeded = {*plan.held, *written, *others}
        self._counters.add(
            stored_blocks=len(written),
            stored_bytes=len(written) * self._rows.row_bytes,
            declined=len(slot_of) - len(succeeded) - len(failed),
            store_errors=len(failed),
        )
        return TransferOutcome(succeeded, is_fault=bool(failed), faults=failed)

    def _load(
        self,
        opened: OpenSlab,
        namespace: SlabNamespace,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
    ) -> TransferOutcome:
        pins = opened.slots.prepare_load(namespace, keys)
        moves = [
            Move(pin, self._rows.row(slot)) for pin, slot in zip(pins, slots, strict=True) if pin is not None
        ]
        failures: dict[OffloadKey, TierFailure] = {}
        try:
            for run in join_runs(moves, self._max_call_blocks):
                failures |= self._read(opened, namespace, run)
            self._erase(
                opened, [move.pin for move in moves if failures.get(move.pin.key) is TierFailure.DAMAGED]
            )
        finally:
            lost = [key for key, failure in failures.items() if failure is not TierFailure.IO_ERROR]
            opened.slots.complete_load([move.pin for move in moves], lost)
        succeeded = [move.pin.key for move in moves if move.pin.key not in failures]
        self._count_loads(len(succeeded), len(keys) - len(moves), failures.values())
        faults = [key for key, failure in failures.items() if failure in FAULTS]
        return TransferOutcome(succeeded, is_fault=bool(faults), faults=faults)

    def drop(self, namespace: SlabNamespace, keys: Sequence[OffloadKey]) -> None:
        with self._current.use() as opened:
            pins = [pin for pin in opened.slots.prepare_load(namespace, keys) if pin is not None]
            try:
                self._erase(opened, pins)
            finally:
                opened.slots.complete_load(pins, [pin.key for pin in pins])

    def remove_all(self, namespace_name: str, tenant: int | None = None) -> Batches:
        """Empty every slot of a namespace that is not pinned, some at a time; no later start finds what was in it.

        Args:
            namespace_name: the namespace.
            tenant: number of the tenant whose blocks are to go; None: all.

        Raises:
            TierError: some slots could not be emptied: their blocks are not found now, but may be after a restart.
        """
        opened = self._current.opened
        while not opened.indexer.wait_complete(INDEX_WAIT_S):
            yield Removed(0, [])
        num_failed = 0
        while taken := opened.slots.take_blocks(namespace_name, BATCH_BLOCKS, tenant):
            for begin in range(0, len(taken), BATCH_BLOCKS):
                slots = taken[begin : begin + BATCH_BLOCKS]
                failed = [slot for slot in slots if not self._erase_slot(opened, slot)]
                opened.slots.give_back([slot for slot in slots if slot not in failed], failed)
                num_failed += len(failed)
                yield Removed(len(slots) - len(failed), [])
        if num_failed:
            raise TierError(
                "slab", f"{num_failed} slots of {opened.file.path} could not be emptied: see the log"
            )

    def _write(self, opened: OpenSlab, pages: Sequence[memoryview], run: Sequence[Move]) -> list[OffloadKey]:
        """Write neighbouring slots behind their headers; when that fails, each by itself."""
        try:
            opened.file.write(run[0].pin.slot, _interleave(pages, run))
        except OSError as error:
            if len(run) > 1:
                return [
                    key
                    for page, move in zip(pages, run, strict=True)
                    for key in self._write(opened, [page], [move])
                ]
            self._current.require_there(opened)
            self._outage.on_failure("store", f"a block was not written: {error}")
            self._erase(opened, [run[0].pin])
            return []
        self._outage.on_success("store")
        return [move.pin.key for move in run]

    def _plan_num_ahead(self, opened: OpenSlab, runs: Sequence[Sequence[Move]]) -> int:
        """Return how many calls get their headers ahead, more of them where slots are no neighbours."""
        num_blocks = sum(map(len, runs))
        if not num_blocks:
            return 0
        bytes_a_call = num_blocks * self._rows.row_bytes // len(runs)
        return plan_num_checksums_ahead(bytes_a_call, has_direct_io=opened.file.has_direct_io)

    def _read(
        self, opened: OpenSlab, namespace: SlabNamespace, run: Sequence[Move]
    ) -> dict[OffloadKey, TierFailure]:
        """Read neighbouring slots, and say what is wrong with which; when that fails, each by itself."""
        pages = self._header_pages(len(run), is_write=False)
        try:
            num_bytes = opened.file.read(run[0].pin.slot, _interleave(pages, run))
        except OSError as error:
            if len(run) > 1:
                return {
                    key: failure
                    for move in run
                    for key, failure in self._read(opened, namespace, [move]).items()
                }
            self._current.require_there(opened)
            self._outage.on_failure("load", f"a block was not read: {error}")
            return {run[0].pin.key: TierFailure.IO_ERROR}
        self._outage.on_success("load")
        if num_bytes < len(run) * (HEADER_PAGE_BYTES + self._rows.row_bytes):
            self._current.require_there(opened)
        num_whole = num_bytes // (HEADER_PAGE_BYTES + self._rows.row_bytes)
        failures = {}
        for number, (page, (pin, row)) in enumerate(zip(pages, run, strict=True)):
            is_whole = number < num_whole
            header_check = namespace.format.open(page, row, pin.key, row) if is_whole else HeaderCheck.DAMAGED
            if header_check is not HeaderCheck.OK:
                failures[pin.key] = FAILURE_OF_CHECK[header_check]
                logger.warning("tier slab: slot %d is %s", pin.slot, header_check.value)
        return failures

    def _erase(self, opened: OpenSlab, pins: Sequence[SlotPin]) -> None:
        """Make slots empty that only this call has pinned, so that no later start finds what is in them."""
        for pin in pins:
            self._erase_slot(opened, pin.slot)

    def _erase_slot(self, opened: OpenSlab, slot: int) -> bool:
        """Make a slot empty; False when the system refuses."""
        try:
            opened.file.erase(slot)
        except OSError as error:
            self._outage.on_failure("store", f"slot {slot} cannot be erased: {error}")
            return False
        return True

    def _count_loads(self, num_arrived: int, num_absent: int, failures: Collection[TierFailure]) -> None:
        self._counters.add(
            hits=num_arrived, loaded_bytes=num_arrived * self._rows.row_bytes, absent=num_absent
        )
        for failure in failures:
            self._counters.add(**{failure.value: 1})

    def _scratch_rows(self, namespace: SlabNamespace) -> Iterator[memoryview | None]:
        """Return the thread's memory for encrypted rows; None for plain ones."""
        return iter(self._scratch.of_this_thread()) if namespace.format.is_encrypted else repeat(None)

    def _header_pages(self, num: int, *, is_write: bool) -> list[memoryview]:
        """Return pages of the calling thread: what was read is never written into another slot."""
        name = "write_pages" if is_write else "read_pages"
        pages: list[memoryview] | None = getattr(self._of_thread, name, None)
        if pages is None:
            pages = allocate_pages(self._max_task_blocks)
            setattr(self._of_thread, name, pages)
        return pages[:num]


def _add_headers(
    pages: Iterator[memoryview],
    scratch_rows: Iterator[memoryview | None],
    block_format: BlockFormat,
    oldest_generation: int,
    stored_s: float | None,
    run: Sequence[Move],
) -> tuple[list[memoryview], Sequence[Move]]:
    """Fill the next of ``pages`` with the headers of a run; return them and what is to be written behind them."""
    taken = list(islice(pages, len(run)))
    sealed = []
    for page, (pin, row) in zip(taken, run, strict=True):
        header, payload = block_format.seal(pin.key, row, next(scratch_rows), generation=pin.generation)
        write_header(page, header, oldest_generation, stored_s)
        sealed.append(Move(pin, payload))
    return taken, sealed


def _interleave(pages: Sequence[memoryview], run: Sequence[Move]) -> list[memoryview]:
    buffers: list[memoryview] = []
    for page, (_, row) in zip(pages, run, strict=True):
        buffers += (page, row)
    return buffers


def join_runs(moves: Iterable[Move], max_blocks: int) -> list[Sequence[Move]]:
    """Return the moves ordered by slot, cut wherever a slot does not follow the one before. Pure.

    Args:
        moves: of slots that differ.
        max_blocks: moves in a run.
    """
    runs: list[list[Move]] = []
    for move in sorted(moves, key=lambda move: move.pin.slot):
        if runs and len(runs[-1]) < max_blocks and runs[-1][-1].pin.slot + 1 == move.pin.slot:
            runs[-1].append(move)
        else:
            runs.append([move])
    return list(runs)
