"""Removes what engines that were killed leave in shared memory: regions, and the locks on their ids.

It touches no file that a process still has open. An engine unlinks its region's name as soon as both halves have
mapped it; one that is killed before leaves the name, and since every engine has a new id, no later engine comes
across it. One that is killed at any time leaves its instance lock, which is empty. The lock is the file's own:
exclusive is granted only when every process that had the file is dead, and one that has not locked its file yet
sees the name gone and starts over.
"""

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from kvtier.cpu.instance_lock import make_lock_path
from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY, make_region_path, remove_name


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
