"""The system calls on the files of packs, as values that a test can replace by failing ones.

``fallocate`` is the kernel's own: what the C library does in its place on a file system without it writes every block.
The kind of a file system is its name in ``mountinfo``: numbers of ``statfs`` do not tell one FUSE daemon from another.
"""

import ctypes
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiering.kit.disk import rest_of, sync_folder

Buffers = Sequence[memoryview]

KEEP_SIZE = 1
PUNCH_HOLE = 2
"""Modes of fallocate. Source: linux/falloc.h."""

NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What a file system says that cannot do so."""

PRIVATE_MODE = 0o600
OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Every file is opened so: never through a link, and without waiting for the other end of a pipe."""

_ESCAPED = re.compile(r"\\([0-7]{3})")
_LIBC = ctypes.CDLL(None, use_errno=True)


def fallocate(fd: int, mode: int, offset: int, num_bytes: int) -> None:
    """Reserve or punch a part of a file.

    Raises:
        OSError: the system refused; with EOPNOTSUPP the file system cannot do it.
    """
    arguments = ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(num_bytes)
    if _LIBC.fallocate64(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the ``flock`` of an open file, and return whether it was free.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_system_of(path: str) -> str:
    """Return the kind of the file system of a folder, such as "ext4" or "fuse.sshfs", "" where it is not known."""
    folder, kind, longest = os.path.realpath(path), "", 0
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            place, _, source = line.partition(" - ")
            mount = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), (place.split(" ") + [""] * 5)[4])
            # Of two mounts at one place the later one is seen.
            if f"{folder}/".startswith(f"{mount.rstrip('/')}/") and len(mount) >= longest:
                kind, longest = source.partition(" ")[0], len(mount)
    return kind


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """What the kernel does with the files.

    Attributes:
        open: path, flags, mode -> file descriptor.
        write: file descriptor, bytes -> bytes appended.
        pread: file descriptor, length, offset -> bytes.
        pwritev: file descriptor, buffers, offset -> bytes written.
        preadv: file descriptor, buffers, offset -> bytes read.
        truncate: file descriptor, length.
        fallocate: file descriptor, mode, offset, length.
        sync: file descriptor; its bytes outlive a loss of power.
        sync_folder: path; the names in it do.
        try_lock: file descriptor -> whether its lock was free and is now this process's.
        rename: path, new path.
        unlink: path.
        file_system: path -> kind of its file system, "" where it is not known.
    """

    open: Callable[[str, int, int], int] = os.open
    write: Callable[[int, bytes], int] = os.write
    pread: Callable[[int, int, int], bytes] = os.pread
    pwritev: Callable[[int, Buffers, int], int] = os.pwritev
    preadv: Callable[[int, Buffers, int], int] = os.preadv
    truncate: Callable[[int, int], None] = os.ftruncate
    fallocate: Callable[[int, int, int, int], None] = fallocate
    sync: Callable[[int], None] = os.fdatasync
    sync_folder: Callable[[str], None] = sync_folder
    try_lock: Callable[[int], bool] = try_lock
    rename: Callable[[str, str], None] = os.rename
    unlink: Callable[[str], None] = os.unlink
    file_system: Callable[[str], str] = file_system_of


REAL_CALLS = SystemCalls()


def open_regular(calls: SystemCalls, path: Path, flags: int, file_mode: int = PRIVATE_MODE) -> int:
    """Open a regular file of this user, of root, or of those that ``file_mode`` shares with.

    Args:
        calls: the system.
        path: the file.
        flags: besides ``OPEN_FLAGS``.
        file_mode: permissions of a file that is made.

    Raises:
        OSError: there is none, it is something else, or another user's.
    """
    fd = calls.open(str(path), flags | OPEN_FLAGS, file_mode)
    try:
        found = os.fstat(fd)
        is_ours = found.st_uid in {os.geteuid(), 0} or bool(file_mode & stat.S_IWGRP)
        if stat.S_ISREG(found.st_mode) and is_ours:
            if flags & os.O_CREAT and file_mode != PRIVATE_MODE and stat.S_IMODE(found.st_mode) != file_mode:
                with suppress(OSError):  # another user's, which was set when that user made it
                    os.fchmod(fd, file_mode)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    raise PermissionError(errno.EPERM, "is no regular file of this user", str(path))


def transfer(call: Callable[[int, Buffers, int], int], fd: int, buffers: Buffers, offset: int) -> int:
    """Move all bytes with as many calls as it takes; return how many were moved, fewer where the file or disk ends.

    Raises:
        OSError: the system refused.
    """
    total = sum(map(len, buffers))
    done = call(fd, buffers, offset)
    while 0 < done < total:
        try:
            more = call(fd, rest_of(buffers, done), offset + done)
        except OSError as error:
            # Direct I/O goes on at page boundaries only, and stops elsewhere only where the file ends.
            if error.errno != errno.EINVAL:
                raise
            break
        if more == 0:
            break
        done += more
    return done


def write_whole(temporary: Path, path: Path, data: bytes, file_mode: int) -> None:
    """Write a file whole or not at all, with the real system.

    Args:
        temporary: its name until then, which no other process uses meanwhile; what has that name is removed.
        path: its name.
        data: what stands in it.
        file_mode: its permissions.

    Raises:
        OSError: the system refused.
    """
    with named_when_done(REAL_CALLS, temporary, path, os.O_WRONLY, file_mode) as fd:
        transfer(REAL_CALLS.pwritev, fd, [memoryview(data)], 0)
    os.close(fd)


@contextmanager
def named_when_done(
    calls: SystemCalls, temporary: Path, path: Path, flags: int, file_mode: int = PRIVATE_MODE
) -> Iterator[int]:
    """Make a file that gets its name, instead of the file that had it, when the block ends; none when the block raises.

    The descriptor stays open, and is the caller's; it is closed when the block raises.

    Args:
        calls: the system.
        temporary: its name until then; what has that name is removed.
        path: its name.
        flags: besides those that make a file.
        file_mode: its permissions.

    Raises:
        OSError: the system refused.
    """
    with suppress(FileNotFoundError):
        calls.unlink(str(temporary))
    fd = open_regular(calls, temporary, flags | os.O_CREAT | os.O_EXCL, file_mode)
    try:
        yield fd
        calls.rename(str(temporary), str(path))
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            calls.unlink(str(temporary))
        raise
