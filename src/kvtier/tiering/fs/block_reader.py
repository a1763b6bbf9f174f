"""Reads blocks into rows, and deals with those that were not read as they should be.

A damaged or expired file is removed, one of another namespace or version is left alone, and what is no regular file
goes too.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.departed import Loss
from kvtier.tiering.base import TierFailure
from kvtier.tiering.fs.block_file import plan_batch_files
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.folders import FSNamespace
from kvtier.tiering.fs.system import FileStatus
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.disk import ThreadPages
from kvtier.tiering.kit.envelope import FAILURE_OF_CHECK, HeaderCheck, check_block

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
        self._expiry = directory.expiry
        self._failed = FailedReads(directory)
        self._batch_blocks = plan_batch_files(rows.row_bytes)
        self._pages = ThreadPages(self._batch_blocks)
        self._outage = directory.outage

    def read(
        self, namespace: FSNamespace, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> dict[OffloadKey, TierFailure]:
        """Read blocks into slots; return what is wrong with those that failed.

        Thread: any of the pool's; blocks.
        """
        failures: dict[OffloadKey, TierFailure] = {}
        pages = self._pages.of_this_thread()
        digest, block_format = namespace.identity.digest, namespace.format
        for start in range(0, len(keys), self._batch_blocks):
            batch = keys[start : start + self._batch_blocks]
            files = []
            for key, slot, page in zip(batch, slots[start:], pages, strict=False):
                files.append((namespace.block_path(key), (page, self._rows.row(slot))))
            for key, (path, (page, row)), status in zip(batch, files, self._files.read(files), strict=True):
                found = HeaderCheck.DAMAGED
                if isinstance(status, FileStatus) and status.num_bytes >= self._block_bytes:
                    found = (
                        block_format.open(page, row, key, row)
                        if block_format.is_encrypted
                        else check_block(page, row, key, digest)
                    )
                if (
                    self._expiry is not None
                    and isinstance(status, FileStatus)
                    and self._expiry.is_over(status.modified_s)
                ):
                    self._failed.remove(namespace, key, path, status, Loss.EXPIRED)
                    failures[key] = TierFailure.ABSENT
                elif found is not HeaderCheck.OK:
                    failures[key] = self._failed.explain(namespace, key, path, status, found)
        if self._outage.is_out and TierFailure.IO_ERROR not in failures.values():
            self._outage.on_success("load")
        return failures


class FailedReads:
    """Deals with blocks that could not be read; keeps no state.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: FSDirectory) -> None:
        self._directory = directory
        self._files = directory.files
        self._outage = directory.outage

    def explain(
        self,
        namespace: FSNamespace,
        key: OffloadKey,
        path: str,
        status: FileStatus | OSError,
        found: HeaderCheck,
    ) -> TierFailure:
        """Return why a block was not loaded; one that cannot be loaded again leaves the index."""
        if isinstance(status, FileStatus) and self._files.is_still(path, status):
            failure = FAILURE_OF_CHECK[found]
            logger.warning("tier fs: block %s is %s (%s)", path, failure.value, found.value)
            if failure is TierFailure.DAMAGED:
                self.remove(namespace, key, path, status, Loss.DAMAGED)
        elif isinstance(status, FileStatus | FileNotFoundError):
            failure = TierFailure.ABSENT  # or evicted, and its file written over, while it was read
        elif self._files.is_irregular(path):
            logger.warning("tier fs: %s is no regular file, as a block is one: it is removed", path)
            failure = TierFailure.DAMAGED
            self._remove_irregular(path)
        else:
            self._outage.on_failure("load", f"a block was not loaded: {status}")
            return TierFailure.IO_ERROR
        namespace.index.discard((key,), Loss.FOREIGN if failure is TierFailure.FOREIGN else None)
        return failure

    def remove(
        self, namespace: FSNamespace, key: OffloadKey, path: str, status: FileStatus, why: Loss
    ) -> None:
        """Remove a block that was read, unless its file was replaced since, and remember ``why``."""
        try:
            self._directory.remove_block(key, path, status)
            namespace.index.evict((key,), why)
        except OSError as error:
            logger.warning("tier fs: block %s (%s) cannot be removed: %s", path, why.name.lower(), error)

    def _remove_irregular(self, path: str) -> None:
        """Remove what is not counted; a folder only when it is empty."""
        try:
            if Path(path).is_dir() and not Path(path).is_symlink():
                Path(path).rmdir()
            else:
                Path(path).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("tier fs: %s cannot be removed: %s", path, error)
