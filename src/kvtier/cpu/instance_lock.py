"""Whether an instance id is taken: an engine's scheduler side holds it from its start to its end.

It guards a name, no memory. The region's own lock cannot tell an engine's processes from those of another engine with
the same id, because all of them share it; this one has a single holder.

The lock is ``flock`` on an empty file beside the regions, so that whoever could map the same region meets the same
lock. The kernel releases it however the holder dies. A forked child shares its parent's lock: it gives its copy back
before it runs anything else, or a worker that outlives its engine would keep the id taken. The holder unlinks the file
when it ends; a file that the dead left is taken over, or removed when the next engine starts (``dead_regions``).
After taking the lock a process looks whether the path still leads to its file; if not, it starts over.
"""

import errno
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
    remove_name,
)
from kvtier.errors import ConfigError, RegionError, RegionOwnerError

RELEASE_GRACE_S = 0.5
"""Seconds for which a lock that is taken is asked for again. An engine that starts may hold a dead one's lock for some
microseconds while it removes the file, and a killed process gives its own back a moment after it is gone. Zero
would refuse an engine for either; longer only delays the message of a real refusal."""


@dataclass(frozen=True, slots=True, eq=False)
class _Hold:
    """An open file with the exclusive lock of this process on it."""

    path: Path
    fd: int
    identity: tuple[int, int]


# INVARIANT: no descriptor is opened, given back or copied by a fork without the guard, so that a forked child knows
# each one it got. Reentrant, because the garbage collector may give a lock back inside of it.
_guard = threading.RLock()
_holds: set[_Hold] = set()


class InstanceLock:
    """An instance id, held by this process alone until it is released or dropped, or the process ends.

    Thread: any; building it blocks for ``grace_s`` at most.

    Args:
        instance_id: what is held; other users of the machine have ids of their own.
        directory: the shared-memory mount.
        grace_s: seconds for which an id that is taken is asked for again.
        clock: seconds, for the grace.
        pause: waits the given seconds.

    Raises:
        ConfigError: an engine that is alive holds the id.
        RegionOwnerError: the lock's file is another user's, or no file at all.
        RegionError: there can be no file in the directory.

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
        while (hold := _try_hold(self.path)) is None:
            if clock() >= deadline_s:
                remedy = (
                    f"is taken by an engine that is alive (fuser {self.path} names its process): "
                    "give each engine on this machine an instance_id of its own, or end the other one"
                )
                raise ConfigError("instance_id", instance_id, remedy)
            pause(RETRY_INTERVAL_S)
        self._give_back = weakref.finalize(self, _give_back, hold)

    def release(self) -> None:
        """Let others have the id; idempotent, and nothing in a child that was forked meanwhile."""
        self._give_back()


def make_lock_path(instance_id: str, directory: Path = SHARED_MEMORY_DIRECTORY) -> Path:
    """Return where the lock of ``instance_id`` is; no region has a name like it. Pure."""
    region = make_region_path(instance_id, directory)
    return region.with_name(region.name.replace("kvtier_", "kvtier-lock_", 1))


def _try_hold(path: Path) -> _Hold | None:
    """Take the lock if nobody has it and its file is still the one at ``path``."""
    with _guard:
        fd = _open(path)
        hold: _Hold | None = None
        try:
            found = os.fstat(fd)
            _check_owner(path, found)
            identity = (found.st_dev, found.st_ino)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at_path(path, identity):
                hold = _Hold(path, fd, identity)
                _holds.add(hold)
        except BlockingIOError:
            return None
        finally:
            if hold is None:
                os.close(fd)
        return hold


def _give_back(hold: _Hold) -> None:
    with _guard:
        if hold not in _holds:
            return
        _holds.remove(hold)
        try:
            remove_name(hold.path, hold.identity)
        finally:
            os.close(hold.fd)


def _leave_to_parent() -> None:
    """Close a child's copies. Unlocking one would unlock the parent's too."""
    while _holds:
        os.close(_holds.pop().fd)
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_leave_to_parent)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
            raise RegionOwnerError(
                f"instance lock {path} cannot be opened ({error.strerror}): it belongs to another user, is no file, or "
                "its directory is closed to this process; remove it, or choose another instance_id"
            ) from error
        raise RegionError(f"instance lock {path} cannot be opened: {error.strerror}") from error


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        raise RegionOwnerError(
            f"instance lock {path} belongs to user {found.st_uid} or is no file, this process is user "
            f"{os.geteuid()}: remove it, or choose another instance_id"
        )


def remove_dead_regions(directory: Path = SHARED_MEMORY_DIRECTORY) -> int:
    """Unlink this user's regions that nobody has open; return how many.

    Args:
        directory: the shared-memory mount.
    """
    return _remove_dead(make_region_path, directory)


def remove_dead_locks(directory: Path = SHARED_MEMORY_DIRECTORY) -> int:
    """Unlink this user's instance locks that nobody holds; return how many.

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
