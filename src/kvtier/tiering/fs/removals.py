"""What a tier does about folders that somebody else removes under it.

What was known of their blocks is forgotten, and what is left is to be counted and indexed anew, which the evictor does.
One line in the log tells of it, not one for each block. A tier that has nothing to store waits until nothing more is
removed, and does not make the directory again: an ``rm -rf`` is not to find new files where it has removed the old.
"""

import logging
import threading
from collections.abc import Callable

from kvtier.tiering.fs.directory import FSDirectory
from kvtier.tiering.fs.folder_watch import FolderWatch
from kvtier.tiering.fs.folders import FSNamespace, make_root
from kvtier.tiering.fs.recycled_files import RecycledFiles

logger = logging.getLogger(__name__)

TELL_AGAIN_S = 60.0
"""Seconds for which further removals go without a line in the log: to remove a large directory takes a while."""


class Removals:
    """Removals that were seen, and whether a count is due for one.

    Mutable for several threads are the number of removals, whether a count is due and when the log was told; ``_lock``
    guards them. The watch belongs to the evictor's thread.

    Args:
        directory: what is watched.
        current_space: the namespace that is served now.
        spares: files that may have been removed too.
    """

    def __init__(
        self, directory: FSDirectory, current_space: Callable[[], FSNamespace], spares: RecycledFiles
    ) -> None:
        self._directory = directory
        self._current_space = current_space
        self._spares = spares
        self._watch = FolderWatch(directory.root)
        self._lock = threading.Lock()
        self._num_seen = 0
        self._is_count_due = False
        self._told_s: float | None = None
        self._has_told_missing = False

    @property
    def num_seen(self) -> int:
        """How many have been seen."""
        return self._num_seen

    @property
    def is_count_due(self) -> bool:
        """Whether what is in the directory is to be counted and indexed."""
        return self._is_count_due

    @property
    def has_root(self) -> bool:
        """Whether the directory is there."""
        return self._directory.root.is_dir()

    def note(self, path: str | None) -> None:
        """Note that somebody has removed ``path``; None needs no line in the log. Thread: any."""
        now_s = self._directory.clock()
        with self._lock:
            self._num_seen += 1
            self._is_count_due = True
            is_told = path is None or (self._told_s is not None and now_s - self._told_s < TELL_AGAIN_S)
            if not is_told:
                self._told_s = now_s
        if not is_told:
            logger.warning(
                "tier fs: %s was removed by somebody else: its blocks are misses, new ones are stored as before",
                path,
            )

    def ask_count(self) -> None:
        """Have what is in the directory counted once more. Thread: any."""
        with self._lock:
            self._is_count_due = True

    def take_count(self) -> bool:
        """Return whether a count is due, which the caller makes now. Thread: the evictor's."""
        with self._lock:
            is_due, self._is_count_due = self._is_count_due, False
        return is_due

    def look(self) -> bool:
        """See what somebody has removed, and forget it; return whether it was anything.

        Thread: the evictor's; blocks.
        """
        space = self._current_space()
        losses = self._watch.take_losses(space.path, has_blocks=len(space.index) > 0)
        if not losses.is_count_wrong:
            return False
        if losses.is_namespace_lost:
            space.index.lose()
        self._spares.forget_missing()
        self.note(losses.paths[0] if losses.paths else None)
        return True

    def restore_root(self) -> bool:
        """Make the directory again if it is gone; False when that cannot be done. Thread: the evictor's."""
        if self.has_root:
            return True
        directory = self._directory
        try:
            make_root(directory.root, directory.file_mode)
            next(directory.root.iterdir())
        except OSError as error:
            if not self._has_told_missing:
                logger.warning("tier fs: %s is gone and cannot be made again: %s", directory.root, error)
            self._has_told_missing = True
            return False
        self._has_told_missing = False
        return True

    def close(self) -> None:
        """Watch no longer."""
        self._watch.close()
