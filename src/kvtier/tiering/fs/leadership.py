"""Who evicts from a directory that several processes share.

It evicts nothing. The kernel releases the lock of a process that dies, so another takes over.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.tiering.fs.layout import LOCK_NAME
from kvtier.tiering.fs.system import open_shared_file


@contextmanager
def leading(root: Path, file_mode: int) -> Iterator[bool]:
    """Hold the lock of the directory's only evictor, if nobody else does; gives whether it is ours.

    Args:
        root: the directory.
        file_mode: permissions of the lock's file when it is made.

    Raises:
        OSError: the file cannot be opened.
    """
    fd = open_shared_file(root / LOCK_NAME, file_mode)
    is_leader = False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_leader = True
        except BlockingIOError:
            pass
        yield is_leader
    finally:
        # Closing alone would not do: a child that was forked meanwhile has the same lock.
        if is_leader:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
