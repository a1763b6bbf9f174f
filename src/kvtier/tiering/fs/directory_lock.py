"""``ROOT/.lock``, which a process holds while it makes, adopts or removes files of a tier's directory."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.tiering.fs.system_calls import PRIVATE_MODE, REAL_CALLS, SystemCalls, open_regular

LOCK_NAME = ".lock"

LOCK_WAIT_S = 1.0
"""Seconds to wait for the lock. Its holder may be stopped, and a store must not wait for that; a living one needs some
milliseconds."""

BACK_OFF_S = 5.0
"""Seconds after such a wait in which a lock that is not free is not waited for. Shorter spends more of the threads'
time behind a stopped process; longer makes a living one wait for room that has become free."""

POLL_S = 0.002


class DirectoryLock:
    """The lock, as one tier takes it. Thread: any; it is not taken twice by one thread.

    Args:
        root: the directory.
        calls: the system.
        file_mode: permissions of the lock's file.
        clock: seconds, monotonic.
        pause: waits so many seconds.
    """

    def __init__(
        self,
        root: Path,
        calls: SystemCalls = REAL_CALLS,
        file_mode: int = PRIVATE_MODE,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = root / LOCK_NAME
        self._calls = calls
        self._file_mode = file_mode
        self._clock = clock
        self._pause = pause
        self._patient_s = clock()
        self._fds: set[int] = set()

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the lock; gives False when another process keeps it.

        Raises:
            OSError: the directory is gone, or the lock's file cannot be used.
        """
        fd = self._take()
        try:
            yield fd is not None
        finally:
            if fd is not None:
                # Closing alone would leave the lock to a child that was forked meanwhile.
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
                self._close(fd)

    def close_in_child(self) -> None:
        """Close a forked child's copies, which would keep the lock of a parent that is killed."""
        for fd in list(self._fds):
            self._close(fd)

    def _take(self) -> int | None:
        end_s = self._clock() + LOCK_WAIT_S
        while True:
            fd = open_regular(self._calls, self._path, os.O_RDWR | os.O_CREAT, self._file_mode)
            self._fds.add(fd)
            is_held = is_usable = False
            try:
                is_held = self._wait(fd, end_s)
                is_usable = is_held and not self._is_removed(fd)
            finally:
                if not is_usable:
                    self._close(fd)
            # One that was removed meanwhile excludes no process that comes later: the next one is tried.
            if is_usable or not is_held:
                return fd if is_usable else None

    def _wait(self, fd: int, end_s: float) -> bool:
        while not self._calls.try_lock(fd):
            now_s = self._clock()
            if now_s < self._patient_s:
                return False
            if now_s >= end_s:
                self._patient_s = now_s + BACK_OFF_S
                return False
            self._pause(POLL_S)
        return True

    def _is_removed(self, fd: int) -> bool:
        try:
            return not os.path.samestat(os.fstat(fd), self._path.lstat())
        except OSError:
            return True

    def _close(self, fd: int) -> None:
        self._fds.discard(fd)
        with suppress(OSError):
            os.close(fd)
