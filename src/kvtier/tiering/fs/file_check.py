"""Whether a block's file is whole, found out without an engine and with little memory, whatever lies in its place."""

import os
from typing import NamedTuple

from kvtier.tiering.kit.block_pieces import check_in_pieces
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.kit.place import BlockState, Opener


class FileCheck(NamedTuple):
    """What one reading of a file found.

    Attributes:
        state: whether it is what its name says.
        inode: device and inode of the file, (0, 0) when it could not be read.
    """

    state: BlockState
    inode: tuple[int, int] = (0, 0)


def check_file(path: str, namespace_name: str, name: bytes | None, opener: Opener | None) -> FileCheck:
    """Read a block's file and compare it with its header.

    Args:
        path: the file; a symbolic link is not followed, and nothing that is no file is waited for.
        namespace_name: of the namespace that it lies in.
        name: the block's, by the name of the file.
        opener: opens encrypted blocks, which are read whole; without it only their headers are checked.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return FileCheck(BlockState.GONE)
    except OSError:
        return FileCheck(BlockState.UNREADABLE)
    try:
        status = os.fstat(fd)
        state = _check(fd, status, namespace_name, name, opener)
        # Engines read past the page cache or by themselves: what only this command reads need not stay in it.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return FileCheck(BlockState.UNREADABLE)
    finally:
        os.close(fd)
    return FileCheck(state, (status.st_dev, status.st_ino))


def _check(
    fd: int, status: os.stat_result, namespace_name: str, name: bytes | None, opener: Opener | None
) -> BlockState:
    def read(offset: int, num_bytes: int) -> bytes:
        return os.pread(fd, num_bytes, HEADER_PAGE_BYTES + offset)

    return check_in_pieces(
        os.pread(fd, HEADER_PAGE_BYTES, 0),
        status.st_size - HEADER_PAGE_BYTES,
        read,
        namespace_name,
        name,
        opener,
        num_disk_blocks=status.st_blocks,
    )
