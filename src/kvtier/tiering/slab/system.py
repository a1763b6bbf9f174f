"""The system calls of the tier, as values that a test can replace by failing ones.

It adds nothing to them. Opening and locking are not here: no fault of theirs needs to be planted.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Buffers = Sequence[memoryview]


def set_flags(fd: int, flags: int) -> None:
    """Give an open file the status flags ``flags`` in place of those it has.

    Raises:
        OSError: the file system refuses one of them, ``O_DIRECT`` for example.
    """
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """What the kernel is asked to do with the file.

    Attributes:
        allocate: file descriptor, offset, length; reserves the room.
        set_flags: file descriptor, status flags such as ``O_DIRECT``.
        pwritev: file descriptor, buffers, offset -> bytes written.
        preadv: file descriptor, buffers, offset -> bytes read.
    """

    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    set_flags: Callable[[int, int], None] = set_flags
    pwritev: Callable[[int, Buffers, int], int] = os.pwritev
    preadv: Callable[[int, Buffers, int], int] = os.preadv


REAL_CALLS = SystemCalls()
