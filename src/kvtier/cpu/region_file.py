"""The shared-memory file of a region: how processes create it, join it, and remove those of dead processes.

Processes agree through ``flock`` on the file itself, which the kernel releases when a process dies:

- exclusive: the holder alone may change the file. If it is empty, the holder is the creator, reserves the memory and
  writes the geometry. If not, all processes that used it are dead: the holder unlinks the name and retries.
- shared: the file is in use. A joiner gets this lock only when no creator is at work.

After either lock a process checks that the path still leads to its inode; if not, it retries. The creator's change
from the exclusive lock to a shared one is not atomic. A process that locks in between finds a finished file without
users and removes it; the creator then sees another inode, or none, and retries too.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from kvtier.errors import RegionError, RegionGeometryError, RegionMemoryError, RegionOwnerError
from kvtier.limits import MemoryLimit, find_memory_limit

SHARED_MEMORY_DIRECTORY = Path("/dev/shm")  # noqa: S108  # the mount, not a temporary file: O_NOFOLLOW, 0600, owner checked

DEFAULT_JOIN_TIMEOUT_S = 600.0
"""Seconds to wait for a creator. Reserving takes a second for some GB, so hundreds of GB need minutes. The wait ends at
once if the creator dies; only a creator that hangs makes it last."""

RETRY_INTERVAL_S = 0.005
"""Seconds between two checks of a file that another process is creating. Longer delays the joiner's start, shorter
wastes its core."""

TRAILER_BYTES = 4096
"""The geometry follows the rows in its own page, so that rows start at the file's first byte."""

MAGIC = "kvtier-region-1"


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Sizes that all processes of one region must agree on.

    Attributes:
        num_blocks: rows.
        row_stride: bytes from one row to the next.
        num_workers: workers side by side in a row.
        cpu_page_size: bytes of one worker's part.
    """

    num_blocks: int
    row_stride: int
    num_workers: int
    cpu_page_size: int

    @property
    def total_size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_blocks * self.row_stride

    @property
    def trailer_offset(self) -> int:
        """Offset of the geometry: the first page after the rows."""
        return -(-self.total_size_bytes // TRAILER_BYTES) * TRAILER_BYTES

    @property
    def file_size_bytes(self) -> int:
        """Bytes of the file: rows and trailer."""
        return self.trailer_offset + TRAILER_BYTES

    def encode(self) -> bytes:
        """Return the trailer's text."""
        return json.dumps({"magic": MAGIC, **asdict(self)}).encode() + b"\n"

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} rows of {self.row_stride} bytes ({self.num_workers} workers of "
            f"{self.cpu_page_size} bytes), {self.total_size_bytes} bytes"
        )


@dataclass(frozen=True, slots=True)
class RegionFile:
    """An open file on which this process holds a shared lock.

    Attributes:
        path: its name, until it is sealed.
        fd: its descriptor; the lock lives as long as it or a duplicate.
        identity: (device, inode).
        is_creator: whether this process created it.
        pid: this process; a child that it forks shares the lock, and must not use or give it back.
    """

    path: Path
    fd: int
    identity: tuple[int, int]
    is_creator: bool
    pid: int = field(default_factory=os.getpid)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a child of the one that opened the file."""
        return os.getpid() != self.pid


class _Step(Enum):
    """Result of one attempt."""

    START_OVER = "start over"
    WAIT = "wait"


def make_region_path(instance_id: str, directory: Path = SHARED_MEMORY_DIRECTORY) -> Path:
    """Return the path of the region of ``instance_id``; two users never share a path. Pure.

    An id that is not a plain file name is replaced by a readable part of it and its digest.
    """
    safe = instance_id
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", instance_id):
        digest = hashlib.sha256(instance_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        safe = re.sub(r"[^A-Za-z0-9_-]+", "_", instance_id)[:40] + "-" + digest
    return directory / f"kvtier_{os.geteuid()}_{safe}"


def open_region_file(
    path: Path,
    geometry: RegionGeometry,
    *,
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    memory_limit: Callable[[], MemoryLimit | None] = find_memory_limit,
) -> RegionFile:
    """Create the file at ``path`` or join the existing one; exactly one of concurrent callers creates it.

    Args:
        path: the file's name.
        geometry: the requested sizes.
        join_timeout_s: seconds to wait for another process that creates.
        clock: seconds, for the wait.
        pause: waits the given seconds.
        memory_limit: checked before memory is reserved.

    Raises:
        RegionGeometryError: the file is in use with another geometry.
        RegionOwnerError: the file is another user's, or not a regular file.
        RegionMemoryError: there is no memory for it; nothing is left behind.
        RegionError: its creator did not finish in time.
    """
    deadline_s = clock() + join_timeout_s
    while True:
        found = _attempt(path, geometry, memory_limit)
        if isinstance(found, RegionFile):
            return found
        if clock() > deadline_s:
            raise RegionError(
                f"region {path}: its creator did not finish within {join_timeout_s} s: check whether that "
                "process hangs (fuser shows it) and end it; the next start then removes the file"
            )
        if found is _Step.WAIT:
            pause(RETRY_INTERVAL_S)


def open_own_file(path: Path, what: str) -> tuple[int, tuple[int, int]]:
    """Open or create a file of this user; return its descriptor and its (device, inode).

    Args:
        path: the file's name, in the shared-memory mount.
        what: what it is, for the message.

    Raises:
        RegionOwnerError: it is another user's, or not a regular file.
        RegionError: it cannot be opened for another reason.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
            raise RegionOwnerError(
                f"{what} {path} cannot be opened ({error.strerror}): it belongs to another user, is a link or no file, "
                "or its directory is not accessible to this process; remove it, or choose another instance_id"
            ) from error
        raise RegionError(f"{what} {path} cannot be opened: {error.strerror}") from error
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise RegionOwnerError(
            f"{what} {path} belongs to user {found.st_uid} or is not a file, this process is user {os.geteuid()}: "
            "remove it, or choose another instance_id"
        )
    return fd, (found.st_dev, found.st_ino)


def is_at_path(path: Path, identity: tuple[int, int]) -> bool:
    """Return True when ``path`` leads to the file with this identity."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == identity


def remove_name(path: Path, identity: tuple[int, int]) -> None:
    """Unlink ``path`` if it still leads to the file with this identity; idempotent."""
    if is_at_path(path, identity):
        path.unlink(missing_ok=True)


def leave_region_file(file: RegionFile) -> None:
    """Close the descriptor; the last process removes the name, and a forked child neither that nor the lock."""
    try:
        if not file.is_inherited and _try_lock(file.fd, fcntl.LOCK_EX):
            remove_name(file.path, file.identity)
    finally:
        os.close(file.fd)


def _attempt(
    path: Path, geometry: RegionGeometry, memory_limit: Callable[[], MemoryLimit | None]
) -> RegionFile | _Step:
    """Open the file and lock it, then create or join it; the descriptor is closed unless that succeeds."""
    fd, identity = open_own_file(path, "region")
    result: RegionFile | _Step = _Step.START_OVER
    try:
        if _try_lock(fd, fcntl.LOCK_EX):
            result = _create(RegionFile(path, fd, identity, is_creator=True), geometry, memory_limit)
        elif _try_lock(fd, fcntl.LOCK_SH):
            result = _join(RegionFile(path, fd, identity, is_creator=False), geometry)
        else:
            result = _Step.WAIT
        return result
    finally:
        if not isinstance(result, RegionFile):
            os.close(fd)


def _create(
    file: RegionFile, geometry: RegionGeometry, memory_limit: Callable[[], MemoryLimit | None]
) -> RegionFile | _Step:
    """Continue with the exclusive lock: fill an empty file, remove one of dead processes."""
    if not is_at_path(file.path, file.identity):
        return _Step.START_OVER
    if os.fstat(file.fd).st_size:
        file.path.unlink()
        return _Step.START_OVER
    try:
        _check_memory(file.path, geometry, memory_limit())
        _reserve(file, geometry)
        os.pwrite(file.fd, geometry.encode(), geometry.trailer_offset)
    except BaseException:
        file.path.unlink()
        raise
    fcntl.flock(file.fd, fcntl.LOCK_SH)
    return file if is_at_path(file.path, file.identity) else _Step.START_OVER


def _join(file: RegionFile, geometry: RegionGeometry) -> RegionFile | _Step:
    """Continue with a shared lock: no creator is at work, so an unfinished file has lost its creator."""
    if not is_at_path(file.path, file.identity):
        return _Step.START_OVER
    # A creator that has opened the file but not locked it yet also leaves it empty.
    written = _read_geometry(file.fd)
    if written is None:
        return _Step.WAIT
    if written != geometry:
        raise RegionGeometryError(
            f"region {file.path} is in use with {written}, requested are {geometry}: give this engine "
            "another instance_id, or the same settings on all of its processes"
        )
    return file


def _read_geometry(fd: int) -> RegionGeometry | None:
    """Return the geometry, which the creator writes last; None before that."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes < TRAILER_BYTES:
        return None
    line, _, _ = os.pread(fd, TRAILER_BYTES, size_bytes - TRAILER_BYTES).partition(b"\n")
    try:
        fields = json.loads(line)
        if fields.pop("magic") != MAGIC:
            return None
        return RegionGeometry(**fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _check_memory(path: Path, geometry: RegionGeometry, limit: MemoryLimit | None) -> None:
    if limit is not None and geometry.file_size_bytes > limit.available_bytes:
        raise RegionMemoryError(
            f"region {path} needs {geometry.file_size_bytes} bytes, {limit.source} leaves "
            f"{limit.available_bytes}: lower cpu_bytes_to_use, or raise the container's memory limit"
        )


def _reserve(file: RegionFile, geometry: RegionGeometry) -> None:
    try:
        os.posix_fallocate(file.fd, 0, geometry.file_size_bytes)
    except OSError as error:
        room = os.fstatvfs(file.fd)
        raise RegionMemoryError(
            f"region {file.path} needs {geometry.file_size_bytes} bytes ({error.strerror}); its mount has "
            f"{room.f_bavail * room.f_frsize} free: make the mount larger (docker run --shm-size, mount -o "
            "remount,size=), raise the file size limit (ulimit -f), or lower cpu_bytes_to_use"
        ) from error


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
