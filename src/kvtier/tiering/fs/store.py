"""Reads blocks from files into rows of the primary tier, and says what is wrong with which.

It knows no job and no room. Small blocks are read some at a time, as they are written. A file that is damaged is
removed; one of another namespace or version is somebody's, and left alone.
"""

import logging
import os
from collections.abc import Callable, Sequence

from kvtier.base import OffloadKey
from kvtier.namespace import Namespace
from kvtier.tiering.base import TierFailure
from kvtier.tiering.fs.block_file import OldFile, plan_batch_files
from kvtier.tiering.fs.block_writer import NO_PLACE, BlockWriter, StoreOutcome
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.folders import FSNamespace, namespace_path, prefix_of
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.recycled_files import RecycledFiles
from kvtier.tiering.fs.system import FileStatus
from kvtier.tiering.kit.backend import BlockStore, Rows
from kvtier.tiering.kit.disk import ThreadPages
from kvtier.tiering.kit.envelope import FAILURE_OF_CHECK, FAULTS, RAW_CODEC, HeaderCheck, check
from kvtier.tiering.kit.io_pool import TransferOutcome

logger = logging.getLogger(__name__)


class BlockReader:
    """Reads some blocks at a time; keeps no state but header pages per thread.

    Args:
        directory: where from.
        rows: the primary's.
    """

    def __init__(self, directory: FSDirectory, rows: Rows) -> None:
        self._block_bytes = directory.block_bytes
        self._rows = rows
        self._files = directory.files
        self._ledger = directory.ledger
        self._batch_blocks = plan_batch_files(rows.row_bytes)
        self._pages = ThreadPages(self._batch_blocks)

    def read(
        self, space: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> dict[OffloadKey, TierFailure]:
        """Read blocks into slots; return what kept those from arriving that have not.

        Thread: any of the pool's; blocks.
        """
        failures: dict[OffloadKey, TierFailure] = {}
        pages = self._pages.of_this_thread()
        for start in range(0, len(keys), self._batch_blocks):
            batch = keys[start : start + self._batch_blocks]
            files = []
            for key, slot, page in zip(batch, slots[start:], pages, strict=False):
                files.append((space.block_path(key), (page, self._rows.row(slot))))
            for key, file, status in zip(batch, files, self._files.read(files), strict=True):
                failure = self._judge(space, key, file, status)
                if failure is not None:
                    failures[key] = failure
        return failures

    def _judge(
        self, space: FSNamespace, key: OffloadKey, file: OldFile, status: FileStatus | OSError
    ) -> TierFailure | None:
        """Return what is wrong with a block, None if nothing is; what cannot be loaded again leaves the index."""
        path, (page, row) = file
        if isinstance(status, FileStatus):
            if status.num_bytes < self._block_bytes:
                verdict = HeaderCheck.DAMAGED
            else:
                verdict = check(page, row, key, space.namespace.digest, codec=RAW_CODEC)
            if verdict is HeaderCheck.OK:
                return None
            failure = self._explain(space, key, path, status, verdict)
        elif isinstance(status, FileNotFoundError):
            failure = TierFailure.ABSENT
        else:
            logger.warning("tier fs: block %s was not loaded: %s", path, status)
            return TierFailure.IO_ERROR
        space.index.discard((key,))
        return failure

    def _explain(
        self, space: FSNamespace, key: OffloadKey, path: str, status: FileStatus, verdict: HeaderCheck
    ) -> TierFailure:
        if not self._files.is_still(path, status):
            return TierFailure.ABSENT  # evicted, and its file written over, while it was read
        failure = FAILURE_OF_CHECK[verdict]
        logger.warning("tier fs: block %s is %s (%s)", path, failure.value, verdict.value)
        if failure is TierFailure.DAMAGED:
            self._remove_damaged(space, key, path, status)
        return failure

    def _remove_damaged(self, space: FSNamespace, key: OffloadKey, path: str, status: FileStatus) -> None:
        try:
            self._ledger.remove(self._files.remove(path, status))
            space.index.evict((key,))
        except OSError as error:
            logger.warning("tier fs: damaged block %s cannot be removed: %s", path, error)


CLOSE_TIMEOUT_S = 1.0
"""Seconds for which the evicting thread is waited for. It touches no row: nothing depends on its end."""

ARRIVED = (StoreOutcome.WRITTEN, StoreOutcome.EXISTED)


class FSBlockStore(BlockStore[FSNamespace]):
    """Stores and loads some blocks at a time in files; keeps no state of its own.

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
        directory: FSDirectory,
        rows: Rows,
        evictor: Evictor,
        spares: RecycledFiles,
        max_keys: int,
        tells_evicted: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._row_bytes = rows.row_bytes
        self._files = directory.files
        self._counters = directory.counters
        self._evictor = evictor
        self._writer = BlockWriter(directory, rows, evictor, spares)
        self._reader = BlockReader(directory, rows)
        self._max_keys = max_keys
        self._tells_evicted = tells_evicted

    def open_space(self, namespace: Namespace, *, is_new: bool) -> FSNamespace:
        index = KeyIndex(self._max_keys, is_complete=is_new, tells_evicted=self._tells_evicted)
        return FSNamespace(namespace, namespace_path(self._directory.root, namespace.name), index)

    def store(self, space: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        held = {key for key in keys if key in space.index and self._files.renew(space.block_path(key))}
        todo = [(key, slot) for key, slot in zip(keys, slots, strict=True) if key not in held]
        if not todo:
            return TransferOutcome(held)
        outcomes = self._writer.write(space, todo)
        arrived = [key for key, outcome in outcomes.items() if outcome in ARRIVED]
        space.index.add(arrived)
        reached = list(outcomes.values())
        num_written = reached.count(StoreOutcome.WRITTEN)
        num_failed = reached.count(StoreOutcome.FAILED)
        self._counters.add(
            stored_blocks=num_written,
            stored_bytes=num_written * self._row_bytes,
            declined=sum(outcome in NO_PLACE for outcome in reached),
            store_errors=num_failed,
        )
        return TransferOutcome([*held, *arrived], is_fault=num_failed > 0)

    def load(self, space: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        failures = self._reader.read(space, keys, slots)
        arrived = [key for key in keys if key not in failures]
        for failure in failures.values():
            self._counters.add(**{failure.value: 1})
        self._note_missing_folders(
            space, [key for key, failure in failures.items() if failure is TierFailure.ABSENT]
        )
        self._counters.add(hits=len(arrived), loaded_bytes=len(arrived) * self._row_bytes)
        return TransferOutcome(arrived, is_fault=not FAULTS.isdisjoint(failures.values()))

    def _note_missing_folders(self, space: FSNamespace, absent: Sequence[OffloadKey]) -> None:
        """Forget all blocks of the folders of ``absent`` that are gone: eviction leaves folders."""
        for folder, key in {space.block_path(key).rpartition("/")[0]: key for key in absent}.items():
            if not os.access(folder, os.F_OK) and space.index.lose(prefix_of(key)):
                self._evictor.removals.note(folder)

    def find(self, space: FSNamespace, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        # A tenth of what making a Path of each costs; what cannot be looked at cannot be loaded either.
        found = [key for key in keys if os.access(space.block_path(key), os.F_OK)]
        space.index.add(found)
        return found

    def stats(self) -> dict[str, float]:
        return self._counters.snapshot()

    def close(self) -> None:
        self._evictor.shutdown(CLOSE_TIMEOUT_S)
