"""Moves blocks between rows of the primary tier and slots of packs.

Neighbouring slots are moved with one call. A store drops the blocks that leave in the journals, writes, and then
records what it has written; a load reads own and other packs alike. What is wrong with one block costs that block and
is counted with its reason; when a call of several blocks fails, each is tried by itself.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.departed import Loss
from kvtier.errors import TierError
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.fs.catalog import PackCatalog
from kvtier.tiering.fs.documents import PackPages
from kvtier.tiering.fs.keeper import Keeper
from kvtier.tiering.fs.neighbours import SLOT_BITS, SLOT_MASK, Neighbours, PackNamespace
from kvtier.tiering.fs.own_blocks import SlotPin, SlotReservation
from kvtier.tiering.fs.pack import Pack
from kvtier.tiering.fs.room import Room
from kvtier.tiering.kit.backend import BlockStore, Counters, Rows, ThreadPages, allocate_pages
from kvtier.tiering.kit.block_format import BlockFormat
from kvtier.tiering.kit.disk import checksum_ahead, plan_num_checksums_ahead
from kvtier.tiering.kit.envelope import (
    ENVELOPE_BYTES,
    FAILURE_OF_CHECK,
    FAULTS,
    HEADER_PAGE_BYTES,
    HeaderCheck,
)
from kvtier.tiering.kit.health import OutageLog
from kvtier.tiering.kit.io_pool import TransferOutcome
from kvtier.tiering.kit.page_guard import PageKeeper
from kvtier.tiering.kit.purging import BATCH_BLOCKS, Batches, Removed

logger = logging.getLogger(__name__)

COUNTER_NAMES = (
    "hits", "loaded_bytes", "absent", "damaged", "foreign", "io_error",
    "stored_blocks", "stored_bytes", "declined", "store_errors",
)  # fmt: skip
"""Counts that are there from the beginning; the first row is about loads, with the reasons of misses."""

INDEX_WAIT_S = 2.0
"""Seconds for which a lookup waits for the index at the start. Shorter misses blocks that would be known a moment
later; longer keeps a request waiting behind many packs that it could compute instead."""

PEER_WAIT_S = 1.0
"""Seconds for which a store waits for another job that writes the same block. Shorter reports a block as not stored
that soon is; longer keeps a thread behind a disk that hangs."""

MAX_CALL_BYTES = 2**20
"""Bytes of neighbouring slots that are moved with one call. Fewer make more calls; of more, the device finds those
that got their headers last in a core's cache, and waits while those that were read are checked."""


class Move(NamedTuple):
    """A block on its way.

    Attributes:
        key: the block.
        address: of its slot.
        row: its bytes in the primary tier, or encrypted in the thread's memory.
        pin: of an own slot; None in a pack of another process.
    """

    key: OffloadKey
    address: int
    row: memoryview
    pin: SlotPin | None = None


class PackBlockStore(BlockStore[PackNamespace], PageKeeper[PackNamespace]):
    """Stores and loads some blocks at a time in slots; keeps no state but header pages per thread.

    Args:
        catalog: the packs and what they hold.
        room: makes packs where slots are missing.
        keeper: tells other processes, and knows whether the directory is there.
        rows: the primary's.
        max_task_blocks: blocks in a call of ``store`` or ``load``.
        make_neighbours: makes an empty table of other processes' blocks.
        has_direct_io: whether slots bypass the page cache.
    """

    def __init__(
        self,
        catalog: PackCatalog,
        room: Room,
        keeper: Keeper,
        rows: Rows,
        max_task_blocks: int,
        make_neighbours: Callable[[], Neighbours],
        *,
        has_direct_io: bool,
    ) -> None:
        self._catalog = catalog
        self._table = catalog.table
        self._room = room
        self._keeper = keeper
        self._pages = PackPages(catalog.directory)
        self._rows = rows
        self._has_direct_io = has_direct_io
        self._make_neighbours = make_neighbours
        self._max_task_blocks = max_task_blocks
        self._max_call_blocks = max(1, MAX_CALL_BYTES // rows.row_bytes)
        self._slot_bytes = HEADER_PAGE_BYTES + rows.row_bytes
        self._counters = Counters(*COUNTER_NAMES)
        self._of_thread = threading.local()
        self._scratch = ThreadPages(max_task_blocks, rows.row_bytes)
        self._outage = OutageLog(f"tier {catalog.tier} at {catalog.directory.root}")

    def open_namespace(self, identity: Namespace, *, is_new: bool) -> PackNamespace:
        namespace = PackNamespace(identity, self._make_neighbours())
        self._catalog.open_namespace(namespace, is_new=is_new)
        self._keeper.wake()
        return namespace

    def contains_batch(self, namespace: PackNamespace, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        self._catalog.wait_indexed(INDEX_WAIT_S)
        held = [key for key in keys if self._catalog.is_held(namespace, key)]
        if len(held) < len(keys):  # no caller is in a hurry: others may have stored them since the last look
            self._catalog.poll()
            held = [key for key in keys if self._catalog.is_held(namespace, key)]
        return held

    def store(
        self, namespace: PackNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        row_of = dict(zip(keys, slots, strict=True))
        self._keeper.require_there()
        elsewhere = [key for key in row_of if namespace.neighbours.find(key) is not None]
        missing = [key for key in row_of if key not in set(elsewhere)] if elsewhere else list(row_of)
        plan = self._prepare_store(namespace, missing)
        written: set[OffloadKey] = set()
        undropped: Collection[int] = ()
        recorded: set[OffloadKey] = set()
        try:
            undropped = self._catalog.drop_slots(plan)
            pins = [pin for pin in plan.pins if pin.address not in undropped] if undropped else plan.pins
            with self._catalog.packs.use({pin.address >> SLOT_BITS for pin in pins}) as packs:
                moves = [Move(pin.key, pin.address, self._rows.row(row_of[pin.key]), pin) for pin in pins]
                written.update(self._write_all(namespace, packs, moves))
                stored = [pin for pin in pins if pin.key in written]
                recorded = self._catalog.record(namespace, packs, stored)
        finally:
            # Where an append has failed it is not known what the journal says.
            undropped = {*undropped, *(pin.address for pin in plan.pins if pin.key in written - recorded)}
            kept = self._table.complete_store(plan.pins, recorded, undropped)
        others = self._table.wait_written(namespace, plan.awaited, PEER_WAIT_S) if plan.awaited else []
        failed = [pin.key for pin in plan.pins if pin.key not in recorded]
        succeeded = {*elsewhere, *plan.held, *kept, *others}
        self._counters.add(
            stored_blocks=len(kept),
            stored_bytes=len(kept) * self._rows.row_bytes,
            declined=len(row_of) - len(succeeded) - len(failed),
            store_errors=len(failed),
        )
        return TransferOutcome(succeeded, is_fault=bool(failed), faults=failed)

    def load(
        self, namespace: PackNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> TransferOutcome:
        pins = self._table.prepare_load(namespace, keys)
        find = namespace.neighbours.find
        moves: list[Move] = []
        failures: dict[OffloadKey, TierFailure] = {}
        try:
            if None in (
                find(key) if pin is None else pin.address for key, pin in zip(keys, pins, strict=True)
            ):
                self._keeper.look_again()  # no lookup came before: others may have stored them since the last look
            for key, slot, pin in zip(keys, slots, pins, strict=True):
                address = find(key) if pin is None else pin.address
                if address is not None:
                    moves.append(Move(key, address, self._rows.row(slot), pin))
            with self._catalog.packs.use({move.address >> SLOT_BITS for move in moves}) as packs:
                for run in join_runs(moves, self._max_call_blocks):
                    failures |= self._read(namespace, packs, run)
                self._answer_failures(namespace, moves, failures)
        finally:
            # A foreign block stays: an engine whose ring of keys is newer reads it.
            damaged = [key for key, failure in failures.items() if failure is TierFailure.DAMAGED]
            self._table.complete_load([pin for pin in pins if pin is not None], damaged)
        self._table.report_foreign(
            [key for key, failure in failures.items() if failure is TierFailure.FOREIGN]
        )
        if failures:
            self._catalog.drop_slots(self._table.take_undropped())
        succeeded = [move.key for move in moves if move.key not in failures]
        self._count_loads(len(succeeded), len(keys) - len(moves), failures.values())
        faults = [key for key, failure in failures.items() if failure in FAULTS]
        return TransferOutcome(succeeded, is_fault=bool(faults), faults=faults)

    def drop(self, namespace: PackNamespace, keys: Sequence[OffloadKey]) -> None:
        pins = [pin for pin in self._table.prepare_load(namespace, keys) if pin is not None]
        own = {pin.key for pin in pins}
        self._table.complete_load(pins, own)
        self._catalog.drop_slots(self._table.take_undropped(), erases=True)
        for key in keys:
            address = None if key in own else namespace.neighbours.find(key)
            if address is not None:
                self._report_damaged(namespace, key, address)

    def remove_all(self, namespace_name: str, tenant: int | None = None) -> Batches:
        """Empty every own slot of a namespace that is not pinned, some at a time; no later start finds what was in it.

        Packs without an owner become own ones before; of neighbours' packs the owners are asked.

        Args:
            namespace_name: the namespace.
            tenant: number of the tenant whose blocks are to go; None: all.

        Raises:
            TierError: some slots could not be dropped: their blocks are not found now, but may be after a restart.
        """
        while not self._catalog.wait_indexed(INDEX_WAIT_S):
            self._keeper.require_there()
            yield Removed(0, [])
        self._catalog.adopt_all()
        yield from self.remove_own(namespace_name, tenant)
        yield from self._keeper.request_purge(namespace_name, tenant)

    def remove_own(self, namespace_name: str, tenant: int | None) -> Batches:
        """Empty the own slots of a namespace, or of one tenant in it, as ``remove_all``. Raises likewise."""
        while taken := self._table.take_blocks(namespace_name, BATCH_BLOCKS, tenant):
            failed = self._catalog.drop_slots(self._table.take_undropped(), erases=True)
            if failed:
                raise TierError(
                    self._catalog.tier,
                    f"{len(failed)} slots below {self._catalog.directory.root} could not be dropped: see the log",
                )
            yield Removed(len(taken), [])

    def read_page(self, namespace: PackNamespace) -> bytes | None:
        return self._pages.read(namespace.name)

    def create_page(self, namespace: PackNamespace, data: bytes) -> None:
        self._pages.create(namespace.identity, data)

    def remove_page(self, namespace: PackNamespace) -> None:
        self._counters.add(damaged=1)
        self._pages.remove(namespace.name)

    def check_reachable(self) -> None:
        self._keeper.require_there()

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot() | self._catalog.stats()

    def close(self) -> None:
        self._keeper.stop()
        self._catalog.close()

    def on_forked(self) -> None:
        self._catalog.packs.close_in_child()
        self._catalog.directory.close_in_child()
        self._keeper.close_in_child()

    def _prepare_store(self, namespace: PackNamespace, missing: Sequence[OffloadKey]) -> SlotReservation:
        """Pin slots for blocks; none is evicted while there is room, though another job takes a new pack's slots."""
        while True:
            self._room.make_room(len(missing))
            plan = self._table.prepare_store(namespace, missing, evicts=self._room.is_full)
            if not plan.lacks_room:
                return plan

    def is_whole(self, namespace: PackNamespace, pin: SlotPin) -> bool:
        """Read an own block that a neighbour calls damaged; return whether it is not. Thread: the keeper's."""
        scratch = self._scratch.of_this_thread()[0]
        with self._catalog.packs.use({pin.address >> SLOT_BITS}) as packs:
            return not self._read(namespace, packs, [Move(pin.key, pin.address, scratch, pin)])

    def _write_all(
        self, namespace: PackNamespace, packs: Mapping[int, Pack], moves: Sequence[Move]
    ) -> Iterator[OffloadKey]:
        """Write blocks with their headers; yield those that were."""
        runs = join_runs(
            (move for move in moves if move.address >> SLOT_BITS in packs), self._max_call_blocks
        )
        pages = iter(self._header_pages(len(moves), is_write=True))
        add_headers = partial(_add_headers, pages, self._scratch_rows(namespace), namespace.format)
        for run_pages, run in checksum_ahead(runs, add_headers, self._plan_num_ahead(runs)):
            yield from self._write(packs[run[0].address >> SLOT_BITS], run_pages, run)

    def _write(self, pack: Pack, pages: Sequence[memoryview], run: Sequence[Move]) -> list[OffloadKey]:
        """Write neighbouring slots behind their headers; when that fails, each by itself."""
        try:
            pack.write(run[0].address & SLOT_MASK, _interleave(pages, run))
        except OSError as error:
            if len(run) > 1:
                return [
                    key
                    for page, move in zip(pages, run, strict=True)
                    for key in self._write(pack, [page], [move])
                ]
            self._outage.on_failure("store", f"a block was not written: {error}")
            return []
        self._outage.on_success("store")
        return [move.key for move in run]

    def _plan_num_ahead(self, runs: Sequence[Sequence[Move]]) -> int:
        """Return how many calls get their headers ahead, more of them where slots are no neighbours."""
        num_blocks = sum(map(len, runs))
        if not num_blocks:
            return 0
        bytes_a_call = num_blocks * self._rows.row_bytes // len(runs)
        return plan_num_checksums_ahead(bytes_a_call, has_direct_io=self._has_direct_io)

    def _read(
        self, namespace: PackNamespace, packs: Mapping[int, Pack], run: Sequence[Move]
    ) -> dict[OffloadKey, TierFailure]:
        """Read neighbouring slots, and say what is wrong with which; when that fails, each by itself."""
        pack = packs.get(run[0].address >> SLOT_BITS)
        if pack is None:  # given away or lost since it was looked up
            return {move.key: TierFailure.ABSENT for move in run}
        pages = self._header_pages(len(run), is_write=False)
        try:
            num_whole = pack.read(run[0].address & SLOT_MASK, _interleave(pages, run)) // self._slot_bytes
        except OSError as error:
            if len(run) > 1:
                return {
                    key: failure
                    for move in run
                    for key, failure in self._read(namespace, packs, [move]).items()
                }
            self._outage.on_failure("load", f"a block was not read: {error}")
            return {run[0].key: TierFailure.IO_ERROR}
        self._outage.on_success("load")
        failures = {}
        for number, (page, move) in enumerate(zip(pages, run, strict=True)):
            is_whole = number < num_whole
            found = (
                namespace.format.open(page, move.row, move.key, move.row) if is_whole else HeaderCheck.DAMAGED
            )
            if found is not HeaderCheck.OK:
                failures[move.key] = FAILURE_OF_CHECK[found]
        return failures

    def _answer_failures(
        self, namespace: PackNamespace, moves: Sequence[Move], failures: dict[OffloadKey, TierFailure]
    ) -> None:
        """Tell blocks that were damaged from those that left meanwhile, which are absent and no fault."""
        for move in moves:
            failure = failures.get(move.key)
            if failure is None or failure is TierFailure.IO_ERROR:
                continue
            if move.pin is None and self._catalog.has_left(namespace, move.key, move.address):
                failures[move.key] = TierFailure.ABSENT
                continue
            where = self._catalog.describe(move.address)
            logger.warning("tier %s: the block in %s is %s", self._catalog.tier, where, failure.value)
            if move.pin is None:
                self._report_damaged(namespace, move.key, move.address)

    def _report_damaged(self, namespace: PackNamespace, key: OffloadKey, address: int) -> None:
        """Leave a neighbour's block alone, and have its owner look at it."""
        if namespace.neighbours.forget(key, address):
            self._table.count_neighbours((), (key,), Loss.DAMAGED)
            self._keeper.report_damaged(address)

    def _count_loads(self, num_arrived: int, num_absent: int, failures: Iterable[TierFailure]) -> None:
        self._counters.add(
            hits=num_arrived, loaded_bytes=num_arrived * self._rows.row_bytes, absent=num_absent
        )
        for failure in failures:
            self._counters.add(**{failure.value: 1})

    def _scratch_rows(self, namespace: PackNamespace) -> Iterator[memoryview | None]:
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
    run: Sequence[Move],
) -> tuple[list[memoryview], Sequence[Move]]:
    """Fill the next of ``pages`` with the headers of a run; return them and what is to be written behind them."""
    taken = list(islice(pages, len(run)))
    sealed = []
    for page, move in zip(taken, run, strict=True):
        header, payload = block_format.seal(move.key, move.row, next(scratch_rows))
        page[:ENVELOPE_BYTES] = header
        sealed.append(move._replace(row=payload))
    return taken, sealed


def _interleave(pages: Sequence[memoryview], run: Sequence[Move]) -> list[memoryview]:
    buffers: list[memoryview] = []
    for page, move in zip(pages, run, strict=True):
        buffers += (page, move.row)
    return buffers


def join_runs(moves: Iterable[Move], max_blocks: int) -> list[Sequence[Move]]:
    """Return the moves ordered by slot, cut wherever a slot does not follow the one before. Pure.

    Args:
        moves: of slots that differ.
        max_blocks: moves in a run.
    """
    runs: list[list[Move]] = []
    for move in sorted(moves, key=lambda move: move.address):
        if runs and len(runs[-1]) < max_blocks and runs[-1][-1].address + 1 == move.address:
            runs[-1].append(move)
        else:
            runs.append([move])
    return list(runs)
