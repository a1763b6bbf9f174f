"""A lock on an instance id, which an engine's scheduler side holds from its start to its end.

The region's own lock is shared by all processes of an engine, so it cannot distinguish them from those of another
engine with the same id; this lock has a single holder.

The lock is ``flock`` on an empty file beside the regions, so each process that could map the same region uses the same
lock. The kernel releases it when the holder dies. A forked child shares its parent's lock and closes its copy before it
runs anything else: a worker that outlives its engine would otherwise keep the id taken. The holder unlinks the file at
its end. The file of a dead holder is reused, or removed when the next engine starts. After locking, a process checks
that the path still leads to its file; if not, it retries.
"""

import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.cpu.region_file import (
    RETRY_INTERVAL_S,
    SHARED_MEMORY_DIRECTORY,
    is_at_path,
    make_region_path,
    open_own_file,
    remove_name,
)
from kvtier.errors import ConfigError

RELEASE_GRACE_S = 0.5
"""Seconds for which a taken lock is retried. A starting engine may hold a dead one's lock for some microseconds while
it removes the file, and the kernel releases a killed process's lock a moment after its end. Zero would refuse an
engine for either; longer only delays the message of a real refusal."""


@dataclass(frozen=True, slots=True, eq=False)
class _HeldLock:
    """An open file that this process has locked exclusively."""

    path: Path
    fd: int
    identity: tuple[int, int]


# INVARIANT: a descriptor is opened, closed or copied by a fork only under the guard, so that a forked child knows each
# one it got. Reentrant, because the garbage collector may release a lock inside of it.
_guard = threading.RLock()
_held_locks: set[_HeldLock] = set()


class InstanceLock:
    """An instance id, held by this process until it is released or garbage collected, or the process ends.

    Thread: any; the constructor blocks for at most ``grace_s``.

    Args:
        instance_id: the id; the ids of other users are separate.
        directory: the shared-memory mount.
        grace_s: seconds for which a taken id is retried.
        clock: seconds, for the grace.
        pause: waits the given seconds.

    Raises:
        ConfigError: a running engine holds the id.
        RegionOwnerError: the lock's file is another user's, or not a regular file.
        RegionError: no file can be created in the directory.

    Attributes:
        path: the lock's file.
    """

    def __init__(
        self,
        instance_id: str,
        directory: Path = SHARED_MEMORY_DIRECTORY,
        *,
        grace_s: float = RELEASE_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.path = make_lock_path(instance_id, directory)
        deadline_s = clock() + grace_s
        while (hold := _try_lock(self.path)) is None:
            if clock() >= deadline_s:
                remedy = (
                    f"is taken by a running engine (fuser {self.path} shows its process): "
                    "give each engine on this machine its own instance_id, or end the other one"
                )
                raise ConfigError("instance_id", instance_id, remedy)
            pause(RETRY_INTERVAL_S)
        self._unlock = weakref.finalize(self, _unlock, hold)

    def release(self) -> None:
        """Release the id; idempotent, and without effect in a child that was forked meanwhile."""
        self._unlock()


def make_lock_path(instance_id: str, directory: Path = SHARED_MEMORY_DIRECTORY) -> Path:
    """Return the lock's path for ``instance_id``; no region has such a name. Pure."""
    region = make_region_path(instance_id, directory)
    return region.with_name(region.name.replace("kvtier_", "kvtier-lock_", 1))


def _try_lock(path: Path) -> _HeldLock | None:
    """Lock the file if no process holds it and it is still the one at ``path``."""
    with _guard:
        fd, identity = open_own_file(path, "instance lock")
        hold: _HeldLock | None = None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at_path(path, identity):
                hold = _HeldLock(path, fd, identity)
                _held_locks.add(hold)
        except BlockingIOError:
            return None
        finally:
            if hold is None:
                os.close(fd)
        return hold


def _unlock(hold: _HeldLock) -> None:
    with _guard:
        if hold not in _held_locks:
            return
        _held_locks.remove(hold)
        try:
            remove_name(hold.path, hold.identity)
        finally:
            os.close(hold.fd)


def _close_in_child() -> None:
    """Close a child's copies. Unlocking one would unlock the parent's too."""
    while _held_locks:
        os.close(_held_locks.pop().fd)
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child)


def remove_dead_regions(directory: Path = SHARED_MEMORY_DIRECTORY) -> int:
    """Unlink this user's regions that no process has open; return how many.

    Args:
        directory: the shared-memory mount.
    """
    return _remove_dead(make_region_path, directory)


def remove_dead_locks(directory: Path = SHARED_MEMORY_DIRECTORY) -> int:
    """Unlink this user's instance locks that no process holds; return how many.

    Args:
        directory: the shared-memory mount.
    """
    return _remove_dead(make_lock_path, directory)


def _remove_dead(make_path: Callable[[str, Path], Path], directory: Path) -> int:
    any_id = "x"
    prefix = make_path(any_id, directory).name.removesuffix(any_id)
    return sum(_remove_if_dead(path) for path in sorted(directory.glob(f"{prefix}*")))


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_name(path, (found.st_dev, found.st_ino))
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
