"""The directory of the demo's secondary tier: the user's own, or a temporary one that is removed at the end.

A temporary directory is locked while a process uses it. The kernel drops the lock when the process dies, and the next
demo removes the directories that are not locked.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError

TEMPORARY_PREFIX = "kvtier-demo-"


@dataclass(frozen=True, slots=True)
class TierDirectory:
    """Where the tier keeps its blocks.

    Attributes:
        path: the directory.
        lock_fds: descriptors that hold the lock on a temporary directory; a child that uses it inherits them.
    """

    path: Path
    lock_fds: tuple[int, ...] = ()


@contextmanager
def open_directory(directory: Path | None) -> Iterator[TierDirectory]:
    """Yield ``directory``, created if missing and kept, or a temporary one, removed at the end.

    Raises:
        ConfigError: it cannot be created or written.
    """
    if directory is not None:
        _require_writable(directory)
        yield TierDirectory(directory.absolute())
        return
    parent = Path(tempfile.gettempdir())
    remove_abandoned(parent)
    path, lock_fd = _make_locked(parent)
    try:
        yield TierDirectory(path, (lock_fd,))
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock_fd)


def remove_abandoned(parent: Path) -> None:
    """Remove the temporary directories of this user's demos that no process holds."""
    for path in parent.glob(f"{TEMPORARY_PREFIX}*"):
        lock_fd = _lock(path)
        if lock_fd is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock_fd)


def _make_locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent))
        lock_fd = _lock(path)
        # A demo that starts now may have removed the new directory, which was not locked yet.
        if lock_fd is not None and path.is_dir():
            return path, lock_fd
        if lock_fd is not None:
            os.close(lock_fd)


def _lock(path: Path) -> int | None:
    """Return a descriptor that locks the directory at ``path``; None when it is in use or not ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _require_writable(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        remedy = f"must be a directory that can be written: {error.strerror}"
        raise ConfigError("--dir", str(directory), remedy) from error
