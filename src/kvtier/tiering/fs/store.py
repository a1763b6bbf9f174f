"""Moves blocks between rows of the primary tier and files: envelope, room, and what becomes of failures.

It decides nothing about when; threads of the tier call it with some blocks of a job. A block that cannot be
stored or loaded costs itself only, and is counted with its reason.
"""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.aligned import allocate_pages
from kvtier.tiering.base import TierFailure
from kvtier.tiering.block_store import BlockStore, Rows
from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.envelope import ENVELOPE_BYTES, Verdict, check, pack, seal
from kvtier.tiering.failures import FAILURE_OF_VERDICT, FAULTS
from kvtier.tiering.fs.directory import Directory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.folders import make_block_folder
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.layout import namespace_path
from kvtier.tiering.fs.room import Room, StoreOutcome
from kvtier.tiering.fs.space import Space
from kvtier.tiering.fs.spares import Spares
from kvtier.tiering.fs.system import FileStatus
from kvtier.tiering.io_pool import Moved
from kvtier.tiering.sealing import plan_num_ahead, seal_ahead

logger = logging.getLogger(__name__)

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class _Sealed(NamedTuple):
    """A block that is ready to be written."""

    key: OffloadKey
    page: memoryview
    row: memoryview


CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the evicting thread is waited for. It touches no row: nothing depends on its end."""

ARRIVED = (StoreOutcome.WRITTEN, StoreOutcome.EXISTED)
NO_PLACE = (StoreOutcome.NO_ROOM, StoreOutcome.NO_SPARE)


class FSBlockStore(BlockStore[Space]):
    """Stores and loads some blocks at a time in files; keeps no state but header pages per thread.

    Args:
        directory: where to.
        rows: the primary's.
        evictor: makes room.
        spares: files of evicted blocks, to be written over.
        max_keys: blocks of a namespace that are kept in mind.
        tells_evicted: whether anybody will ask what was evicted.
    """

    def __init__(
        self,
        directory: Directory,
        rows: Rows,
        evictor: Evictor,
        spares: Spares,
        max_keys: int,
        tells_evicted: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._rows = rows
        self._files = directory.files
        self._ledger = directory.ledger
        self._counters = directory.counters
        self._evictor = evictor
        self._spares = spares
        self._max_keys = max_keys
        self._tells_evicted = tells_evicted
        self._num_ahead = plan_num_ahead(rows.row_bytes, has_direct_io=directory.has_direct_io)
        self._of_thread = threading.local()

    def open_space(self, namespace: Namespace, *, is_new: bool) -> Space:
        """Return the namespace's folder and what is known to be in it; a new one needs no scan."""
        index = KeyIndex(self._max_keys, is_complete=is_new, tells_evicted=self._tells_evicted)
        return Space(namespace, namespace_path(self._directory.root, namespace.name), index)

    def store(self, space: Space, keys: Sequence[OffloadKey], slots: Sequence[int]) -> Moved:
        """Write blocks; those that are on the disk now have arrived, held before or not.

        Thread: any of the pool's; blocks.
        """
        held = {key for key in keys if key in space.index and self._files.renew(space.block_path(key))}
        todo = [(key, slot) for key, slot in zip(keys, slots, strict=True) if key not in held]
        if not todo:
            return Moved(held)
        written = self._write(space, todo)
        return Moved([*held, *written.arrived], written.is_fault)

    def load(self, space: Space, keys: Sequence[OffloadKey], slots: Sequence[int]) -> Moved:
        """Read blocks into slots; those whose bytes are there and right have arrived.

        Thread: any of the pool's; blocks.
        """
        arrived = []
        is_fault = False
        for key, slot in zip(keys, slots, strict=True):
            failure = self._read(space, key, self._rows.row(slot))
            if failure is None:
                arrived.append(key)
                continue
            is_fault |= failure in FAULTS
            self._counters.add(**{failure.value: 1})
            if failure is not TierFailure.IO_ERROR:
                space.index.discard((key,))
        self._counters.add(hits=len(arrived), loaded_bytes=len(arrived) * self._rows.row_bytes)
        return Moved(arrived, is_fault)

    def find(self, space: Space, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return which of ``keys`` the disk has, and remember them. Thread: the lookup's; blocks."""
        # A tenth of what making a Path of each costs; what cannot be looked at cannot be loaded either.
        found = [key for key in keys if os.access(space.block_path(key), os.F_OK)]
        space.index.add(found)
        return found

    def stats(self) -> dict[str, float]:
        """Return counts of loads by outcome, of stores and of evictions."""
        return self._counters.snapshot()

    def close(self) -> None:
        """End the thread that evicts."""
        self._evictor.shutdown(CLOSE_TIMEOUT_S)

    def _write(self, space: Space, todo: Sequence[tuple[OffloadKey, int]]) -> Moved:
        room = self._take_room(space, len(todo))
        outcomes: dict[OffloadKey, StoreOutcome] = dict.fromkeys(
            (key for key, _ in todo), StoreOutcome.NO_ROOM
        )
        try:
            seal_next = partial(self._seal, space, cycle(self._header_pages()))
            for sealed in seal_ahead(todo[: room.num_blocks], seal_next, self._num_ahead):
                write = partial(self._write_block, space, sealed)
                outcome = room.use(write)
                while outcome is StoreOutcome.NO_SPARE:
                    outcome = room.use(write)
                if outcome is StoreOutcome.NO_ROOM:
                    self._evictor.make_room(self._directory.block_bytes, is_disk_full=True)
                    room.add(self._spares.take(1, space.namespace.name), 0)
                    outcome = room.use(write)
                outcomes[sealed.key] = outcome
                if outcome in NO_PLACE:
                    break
        finally:
            room.settle(self._ledger)
        reached = list(outcomes.values())
        num_written = reached.count(StoreOutcome.WRITTEN)
        num_failed = reached.count(StoreOutcome.FAILED)
        self._counters.add(
            stored_blocks=num_written,
            stored_bytes=num_written * self._rows.row_bytes,
            declined=sum(outcome in NO_PLACE for outcome in reached),
            store_errors=num_failed,
        )
        arrived = [key for key, outcome in outcomes.items() if outcome in ARRIVED]
        space.index.add(arrived)
        return Moved(arrived, is_fault=num_failed > 0)

    def _take_room(self, space: Space, num_blocks: int) -> Room:
        """Return room for as many of ``num_blocks`` as there is some for, after an eviction if need be."""
        room = Room(self._spares, self._directory.block_bytes)
        self._add_room(room, space, num_blocks)
        num_missing = num_blocks - room.num_blocks
        if num_missing > 0:
            self._evictor.make_room(num_missing * self._directory.block_bytes)
            self._add_room(room, space, num_missing)
        return room

    def _add_room(self, room: Room, space: Space, num_blocks: int) -> None:
        spares = self._spares.take(num_blocks, space.namespace.name)
        if spares:
            self._evictor.ask()
        num_missing = num_blocks - len(spares)
        num_reserved = 0
        if num_missing > 0:
            grant = self._ledger.reserve(num_missing, self._directory.block_bytes)
            num_reserved = grant.num_blocks
            self._evictor.note(grant.book)
        room.add(spares, num_reserved)

    def _seal(self, space: Space, pages: Iterator[memoryview], block: tuple[OffloadKey, int]) -> _Sealed:
        """Fill the next of ``pages`` with the header of a block, given its key and slot."""
        key, slot = block
        page, row = next(pages), self._rows.row(slot)
        page[:ENVELOPE_BYTES] = pack(seal(key, space.namespace.digest, row, codec=RAW_NUMBER))
        return _Sealed(key, page, row)

    def _write_block(self, space: Space, sealed: _Sealed, spare: str | None) -> StoreOutcome:
        path = space.block_path(sealed.key)
        try:
            if self._publish(space, path, [sealed.page, sealed.row], spare):
                return StoreOutcome.WRITTEN
            # Not renewed: should it be a file that we cannot read, it has to age until it is evicted.
            return StoreOutcome.EXISTED
        except OSError as error:
            if error.errno in NO_ROOM:
                return StoreOutcome.NO_ROOM
            if spare is not None and isinstance(error, FileNotFoundError):
                # The folder was there a moment ago, so the spare file is gone: another host has taken us for dead.
                return StoreOutcome.NO_SPARE
            logger.warning("tier fs: block %s was not stored: %s", path, error)
            return StoreOutcome.FAILED

    def _publish(self, space: Space, path: str, buffers: list[memoryview], spare: str | None) -> bool:
        try:
            return self._files.publish(path, buffers, spare)
        except FileNotFoundError:
            directory = self._directory
            make_block_folder(directory.root, space.namespace, path, directory.file_mode, directory.owner)
            return self._files.publish(path, buffers, spare)

    def _read(self, space: Space, key: OffloadKey, row: memoryview) -> TierFailure | None:
        path = space.block_path(key)
        page = self._header_pages()[0]
        try:
            status = self._files.read(path, [page, row])
        except FileNotFoundError:
            return TierFailure.ABSENT
        except OSError as error:
            logger.warning("tier fs: block %s was not loaded: %s", path, error)
            return TierFailure.IO_ERROR
        if status.num_bytes < self._directory.block_bytes:
            verdict = Verdict.DAMAGED
        else:
            verdict = check(page, row, key, space.namespace.digest, codec=RAW_NUMBER)
        if verdict is Verdict.OK:
            return None
        if not self._files.is_still(path, status):
            return TierFailure.ABSENT  # evicted, and its file written over, while it was read
        failure = FAILURE_OF_VERDICT[verdict]
        logger.warning("tier fs: block %s is %s (%s)", path, failure.value, verdict.value)
        if failure is TierFailure.DAMAGED:
            self._remove_damaged(space, key, status)
        return failure

    def _remove_damaged(self, space: Space, key: OffloadKey, status: FileStatus) -> None:
        path = space.block_path(key)
        try:
            self._ledger.remove(self._files.remove(path, status))
            space.index.evict((key,))
        except OSError as error:
            logger.warning("tier fs: damaged block %s cannot be removed: %s", path, error)

    def _header_pages(self) -> list[memoryview]:
        """Return pages of the calling thread, one for each block that is sealed and not yet written."""
        pages: list[memoryview] | None = getattr(self._of_thread, "pages", None)
        if pages is None:
            pages = self._of_thread.pages = allocate_pages(self._num_ahead + 1)
        return pages
