"""Why a block was not read as it should be, and what becomes of its file.

A damaged file is removed, one of another namespace or version is left alone, and what is no regular file goes too.
"""

import logging
from pathlib import Path

from kvtier.base import OffloadKey
from kvtier.departed import Loss
from kvtier.tiering.base import TierFailure
from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.folders import FSNamespace
from kvtier.tiering.fs.system import FileStatus
from kvtier.tiering.kit.envelope import FAILURE_OF_CHECK, HeaderCheck

logger = logging.getLogger(__name__)


class FailedReads:
    """Deals with blocks that could not be read; keeps no state.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: FSDirectory) -> None:
        self._files = directory.files
        self._usage = directory.usage
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
        namespace.index.discard((key,))
        return failure

    def remove(
        self, namespace: FSNamespace, key: OffloadKey, path: str, status: FileStatus, why: Loss
    ) -> None:
        """Remove a block that was read, unless its file was replaced since, and remember ``why``."""
        try:
            self._usage.remove(self._files.remove(path, status))
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
