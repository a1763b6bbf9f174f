"""Files of evicted blocks that wait to be written over.

It evicts nothing and writes no block. To remove a file and to make another is most of what a file system does for a
block; a spare one has its inode and its place on the disk already. Spare files have temporary names, so those of a
process that died are removed like any other half-written file, and count as bytes on the disk. They are used in the
order in which they came: another host takes a process without a sign of life for dead, and a file's time is one.
"""

import logging
import os
import stat
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from kvtier.tiering.fs.block_file import BlockFiles

logger = logging.getLogger(__name__)


class Spares:
    """The spare files of one tier.

    Mutable is the deque of their names, where appending and taking are atomic.

    Args:
        files: sets them aside.
        file_mode: permissions that they must have.
        block_bytes: length that they must have.
    """

    def __init__(self, files: BlockFiles, file_mode: int, block_bytes: int) -> None:
        self._files = files
        self._file_mode = file_mode
        self._block_bytes = block_bytes
        self._paths: deque[str] = deque()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._paths)

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk that wait here."""
        return len(self._paths) * self._block_bytes

    def can_keep(self, status: os.stat_result) -> bool:
        """Return whether a file could be written over: a block's, nobody else's, under no other name. Pure."""
        return (
            status.st_size == self._block_bytes
            and status.st_nlink == 1
            and status.st_uid == os.geteuid()
            and stat.S_IMODE(status.st_mode) == self._file_mode
        )

    def keep(self, path: str) -> bool:
        """Set the file of an evicted block aside; False when that cannot be done, and then nothing has changed."""
        try:
            self._paths.append(self._files.set_aside(path))
        except OSError:
            return False  # gone meanwhile, or the folder for temporary files is
        return True

    def take(self, num_files: int) -> list[str]:
        """Return up to ``num_files`` of them, which are the caller's now. Thread: any."""
        taken: list[str] = []
        try:
            while len(taken) < num_files:
                taken.append(self._paths.popleft())
        except IndexError:
            pass
        return taken

    def give_back(self, paths: Iterable[str]) -> None:
        """Take back what was not written over. Thread: any."""
        self._paths.extend(paths)

    def trim(self, num_files: int) -> int:
        """Remove all but ``num_files`` and return the bytes that this gave."""
        freed_bytes = 0
        for path in self.take(len(self._paths) - num_files):
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("tier fs: spare file %s cannot be removed: %s", path, error)
                continue
            freed_bytes += self._block_bytes
        return freed_bytes
