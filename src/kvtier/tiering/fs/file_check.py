"""Whether a block's file is whole, found out without an engine and with little memory, whatever lies in its place."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES, Envelope, digest_pieces, unpack
from kvtier.tiering.kit.place import BlockState, Opener, check_bytes

PIECE_BYTES = 4 * 2**20
"""Bytes read at a time. More gain nothing; fewer are more calls."""

MAX_HOLLOW_BYTES = 2**30
"""Longer files must have bytes on the disk, a part of their length: one of holes may be longer than any memory and take
days to read. Shorter ones are read, as a file system that compresses may need next to nothing for a row of zeros."""

MAX_HOLLOW_SHARE = 64

DISK_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, whatever the file system's own is."""


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


def is_hollow(num_bytes: int, num_disk_blocks: int) -> bool:
    """Return whether a file is of holes, next to nothing of its length being on the disk. Pure."""
    return num_bytes > MAX_HOLLOW_BYTES and num_disk_blocks * DISK_BLOCK_BYTES * MAX_HOLLOW_SHARE < num_bytes


def _check(
    fd: int, status: os.stat_result, namespace_name: str, name: bytes | None, opener: Opener | None
) -> BlockState:
    header = os.pread(fd, HEADER_PAGE_BYTES, 0)
    envelope = unpack(header)
    # Whose block it is; a payload is not there yet, and only its absence is wrong with a good header.
    state = check_bytes(header, b"", namespace_name, name)
    is_sensible = (
        isinstance(envelope, Envelope)
        and envelope.stored_bytes > 0
        and HEADER_PAGE_BYTES + envelope.stored_bytes == status.st_size
        and not is_hollow(status.st_size, status.st_blocks)
    )
    if state is not BlockState.DAMAGED or not is_sensible:
        return state
    assert isinstance(envelope, Envelope), "a sensible one"
    if not envelope.is_encrypted:
        digest = digest_pieces(_read_pieces(fd, status.st_size))
        return BlockState.WHOLE if digest == envelope.checksum else BlockState.DAMAGED
    if opener is None:
        return BlockState.ENCRYPTED
    return check_bytes(header, _read_payload(fd, envelope.stored_bytes), namespace_name, name, opener)


def _read_pieces(fd: int, end: int) -> Iterator[bytes]:
    """Yield what stands behind the header, up to ``end``: the file may grow meanwhile."""
    offset = HEADER_PAGE_BYTES
    while offset < end and (piece := os.pread(fd, min(PIECE_BYTES, end - offset), offset)):
        yield piece
        offset += len(piece)


def _read_payload(fd: int, num_bytes: int) -> memoryview:
    payload = memoryview(bytearray(num_bytes))
    done = 0
    while done < num_bytes:
        num_read = os.preadv(fd, [payload[done : done + PIECE_BYTES]], HEADER_PAGE_BYTES + done)
        if not num_read:
            break
        done += num_read
    return payload[:done]
