"""The system calls that publish and read a block, as values that a test can replace by failing ones.

It adds little to them. Other calls of the tier are not here: no fault of theirs needs to be planted.
"""

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

Buffers = Sequence[memoryview]

PRIVATE_MODE = 0o600
"""Permissions that no usual umask changes."""


def set_file_mode(fd: int, file_mode: int) -> None:
    """Give a file that this user made the permissions that sharing needs and a umask took away."""
    if file_mode != PRIVATE_MODE and stat.S_IMODE(os.fstat(fd).st_mode) != file_mode:
        # Another user's file was set when that user made it; a file system without modes needs none.
        with suppress(OSError):
            os.fchmod(fd, file_mode)


def open_shared_file(path: Path, file_mode: int) -> int:
    """Open a file that all processes of a directory read and write, made when it is missing.

    Raises:
        OSError: the system refused.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, file_mode)
    set_file_mode(fd, file_mode)
    return fd


def link_open_file(fd: int, path: str) -> None:
    """Give the open file ``fd`` the name ``path``.

    Raises:
        FileExistsError: the name is taken.
    """
    # An absolute path makes src_dir_fd meaningless to the kernel, but without it Python 3.11 calls link(2),
    # which links the symbolic link in /proc itself and fails, instead of linkat(2), which follows it.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """What the kernel is asked to do with a block.

    Attributes:
        open: path, flags, mode -> file descriptor.
        pwritev: file descriptor, buffers, offset -> bytes written.
        preadv: file descriptor, buffers, offset -> bytes read.
        link: name an open file that has no name.
    """

    open: Callable[[str, int, int], int] = os.open
    pwritev: Callable[[int, Buffers, int], int] = os.pwritev
    preadv: Callable[[int, Buffers, int], int] = os.preadv
    link: Callable[[int, str], None] = link_open_file


REAL_CALLS = SystemCalls()
