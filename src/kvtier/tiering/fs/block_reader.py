"""Reads blocks from files into rows of the primary tier, and says what is wrong with which.

It knows no job and no room. Small blocks are read some at a time, as they are written. A file that is damaged is
removed; one of another namespace or version is somebody's, and left alone.
"""

import logging
from collections.abc import Sequence

from kvtier.base import OffloadKey
from kvtier.tiering.aligned import ThreadPages
from kvtier.tiering.base import TierFailure
from kvtier.tiering.block_store import Rows
from kvtier.tiering.codecs.raw import RAW_NUMBER
from kvtier.tiering.envelope import Verdict, check
from kvtier.tiering.failures import FAILURE_OF_VERDICT
from kvtier.tiering.fs.block_file import OldFile, plan_batch_files
from kvtier.tiering.fs.directory import Directory
from kvtier.tiering.fs.space import Space
from kvtier.tiering.fs.system import FileStatus

logger = logging.getLogger(__name__)


class BlockReader:
    """Reads some blocks at a time; keeps no state but header pages per thread.

    Args:
        directory: where from.
        rows: the primary's.
    """

    def __init__(self, directory: Directory, rows: Rows) -> None:
        self._block_bytes = directory.block_bytes
        self._rows = rows
        self._files = directory.files
        self._ledger = directory.ledger
        self._batch_blocks = plan_batch_files(rows.row_bytes)
        self._pages = ThreadPages(self._batch_blocks)

    def read(
        self, space: Space, keys: Sequence[OffloadKey], slots: Sequence[int]
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
        self, space: Space, key: OffloadKey, file: OldFile, status: FileStatus | OSError
    ) -> TierFailure | None:
        """Return what is wrong with a block, None if nothing is; what cannot be loaded again leaves the index."""
        path, (page, row) = file
        if isinstance(status, FileStatus):
            if status.num_bytes < self._block_bytes:
                verdict = Verdict.DAMAGED
            else:
                verdict = check(page, row, key, space.namespace.digest, codec=RAW_NUMBER)
            if verdict is Verdict.OK:
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
        self, space: Space, key: OffloadKey, path: str, status: FileStatus, verdict: Verdict
    ) -> TierFailure:
        if not self._files.is_still(path, status):
            return TierFailure.ABSENT  # evicted, and its file written over, while it was read
        failure = FAILURE_OF_VERDICT[verdict]
        logger.warning("tier fs: block %s is %s (%s)", path, failure.value, verdict.value)
        if failure is TierFailure.DAMAGED:
            self._remove_damaged(space, key, path, status)
        return failure

    def _remove_damaged(self, space: Space, key: OffloadKey, path: str, status: FileStatus) -> None:
        try:
            self._ledger.remove(self._files.remove(path, status))
            space.index.evict((key,))
        except OSError as error:
            logger.warning("tier fs: damaged block %s cannot be removed: %s", path, error)
