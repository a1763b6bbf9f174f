"""Files of evicted blocks that wait to be written over.

It evicts nothing and writes no block. To remove a file and to make another is most of what a file system does for a
block; a spare one has its inode and its place on the disk already. Spare files have temporary names, so those of a
process that died are removed like any other half-written file, and count as bytes on the disk. They are used in the
order in which they came: another host takes a process without a sign of life for dead, and a file's time is one.

Each is written over by a block of its own namespace only. Should the disk lose the bytes and keep the name, a reader
finds an older block of the same namespace, which says that it is another than its name does: that is damage, and is
removed, where a block of another namespace would be left alone for ever.
"""

import logging
import os
import stat
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.tiering.fs.block_file import BlockFiles
from kvtier.tiering.fs.shared_usage import SharedUsage

logger = logging.getLogger(__name__)


class Spare(NamedTuple):
    """A file that may be written over.

    Attributes:
        path: its temporary name.
        namespace_name: whose block it was.
    """

    path: str
    namespace_name: str


class RecycledFiles:
    """The spare files of one tier.

    Mutable is the deque of them, where appending and taking are atomic.

    Args:
        files: sets them aside.
        file_mode: permissions that they must have.
        block_bytes: length that they must have.
    """

    def __init__(self, files: BlockFiles, file_mode: int, block_bytes: int) -> None:
        self._files = files
        self._file_mode = file_mode
        self._block_bytes = block_bytes
        self._spares: deque[Spare] = deque()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._spares)

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk that wait here."""
        return len(self._spares) * self._block_bytes

    def can_keep(self, status: os.stat_result) -> bool:
        """Return whether a file could be written over: a block's, this user's, under no other name."""
        return (
            stat.S_ISREG(status.st_mode)
            and stat.S_IMODE(status.st_mode) == self._file_mode
            and status.st_size == self._block_bytes
            and status.st_nlink == 1
            and status.st_uid == os.geteuid()
        )

    def keep(self, path: str, namespace_name: str) -> bool:
        """Set the file of an evicted block aside; False when that cannot be done, and then nothing has changed."""
        try:
            self._spares.append(Spare(self._files.set_aside(path), namespace_name))
        except OSError:
            return False  # gone meanwhile, or the folder for temporary files is
        return True

    def take(self, num_files: int, namespace_name: str) -> list[Spare]:
        """Return up to ``num_files`` of them, which are the caller's now; others than the namespace's are removed.

        Thread: any; may block.
        """
        taken: list[Spare] = []
        try:
            while len(taken) < num_files:
                spare = self._spares.popleft()
                if spare.namespace_name == namespace_name:
                    taken.append(spare)
                else:
                    self.discard(spare)
        except IndexError:
            pass
        return taken

    def give_back(self, spares: Iterable[Spare]) -> None:
        """Take back what was not written over. Thread: any."""
        self._spares.extend(spares)

    def forget_missing(self) -> None:
        """Drop those whose files somebody has removed. Thread: the evictor's; blocks."""
        there = []
        with suppress(IndexError):
            while True:
                spare = self._spares.popleft()
                if os.path.lexists(spare.path):
                    there.append(spare)
        self._spares.extendleft(reversed(there))

    def discard(self, spare: Spare) -> None:
        """Remove a file that is of no use, if it is there. Thread: any; may block.

        Its bytes stay in the shared count until somebody counts anew: who walks the directory in between must not have
        them counted out twice.
        """
        with suppress(OSError):
            Path(spare.path).unlink()

    def give_up(self, ledger: SharedUsage) -> None:
        """Remove every one and count them out, while others may be counting. Thread: the evictor's; blocks."""
        num_bytes = self.num_bytes
        ledger.begin_removal(num_bytes)
        ledger.end_removal(num_bytes, self.trim(0))

    def trim(self, num_files: int) -> int:
        """Remove the oldest beyond ``num_files`` and return the bytes that this gave. Thread: the evictor's; blocks."""
        freed_bytes = 0
        while len(self._spares) > num_files:
            try:
                spare = self._spares.popleft()
                Path(spare.path).unlink()
            except (IndexError, FileNotFoundError):
                continue
            except OSError as error:
                logger.warning("tier fs: spare file %s cannot be removed: %s", spare.path, error)
                continue
            freed_bytes += self._block_bytes
        return freed_bytes
