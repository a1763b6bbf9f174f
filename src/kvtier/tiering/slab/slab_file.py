"""The open file of a slab, and the system calls on it, as values that a test can replace by failing ones.

Opening and locking are not here: tests plant no fault in them.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiering.kit.backend import allocate_page
from kvtier.tiering.kit.disk import rest_of
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.slab.superblock import SlabGeometry

logger = logging.getLogger(__name__)

Buffers = Sequence[memoryview]


def set_flags(fd: int, flags: int) -> None:
    """Give an open file the status flags ``flags`` in place of those it has.

    Raises:
        OSError: the file system refuses one of them, ``O_DIRECT`` for example.
    """
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """What the kernel does with the file.

    Attributes:
        allocate: file descriptor, offset, length; reserves the room.
        set_flags: file descriptor, status flags such as ``O_DIRECT``.
        pwritev: file descriptor, buffers, offset -> bytes written.
        preadv: file descriptor, buffers, offset -> bytes read.
    """

    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    set_flags: Callable[[int, int], None] = set_flags
    pwritev: Callable[[int, Buffers, int], int] = os.pwritev
    preadv: Callable[[int, Buffers, int], int] = os.preadv


REAL_CALLS = SystemCalls()


class SlabFile:
    """A locked, formatted file; immutable, so any thread may use it until it is closed.

    Args:
        path: its name, for messages.
        fd: the open file; closing it gives the lock back.
        geometry: how it is divided.
        is_new: whether it has just been formatted, so that no slot holds anything.
        has_direct_io: whether slots bypass the page cache.
        calls: the system.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        geometry: SlabGeometry,
        *,
        is_new: bool,
        has_direct_io: bool,
        calls: SystemCalls,
    ) -> None:
        self.path = path
        self.geometry = geometry
        self.is_new = is_new
        self.has_direct_io = has_direct_io
        self._fd = fd
        self._calls = calls
        self._zero_page = allocate_page()

    def write(self, slot: int, buffers: Buffers) -> None:
        """Write ``buffers`` over the slots from ``slot`` on.

        Raises:
            OSError: the system refused; the slots are then of no use.
        """
        done = self._transfer(self._calls.pwritev, slot, buffers)
        if done < sum(map(len, buffers)):
            raise OSError(errno.ENOSPC, "the file system took only a part of the block")

    def read(self, slot: int, buffers: Buffers) -> int:
        """Fill ``buffers`` from the slots from ``slot`` on.

        Returns:
            The bytes read; fewer than the buffers take when the file ends before.

        Raises:
            OSError: the system could not read.
        """
        return self._transfer(self._calls.preadv, slot, buffers)

    def read_header(self, slot: int, page: memoryview) -> bool:
        """Fill ``page`` with the header of ``slot``; False when the file ends before.

        Raises:
            OSError: the system could not read.
        """
        return self.read(slot, [page]) == HEADER_PAGE_BYTES

    def erase(self, slot: int) -> None:
        """Make ``slot`` an empty one.

        Raises:
            OSError: the system refused.
        """
        self.write(slot, [self._zero_page])

    def find_loss(self) -> str | None:
        """Return what has become of the file if another program has deleted, replaced, cut or emptied it, else None."""
        try:
            found = os.stat(self.path, follow_symlinks=False)  # noqa: PTH116 - once a second at most
            own = os.fstat(self._fd)
            if not os.path.samestat(found, own):
                return f"{self.path} was replaced by another file"
            if own.st_size < self.geometry.file_bytes:
                return f"{self.path} was cut to {own.st_size} bytes"
            first_page = allocate_page()
            if os.preadv(self._fd, [first_page], 0) and not any(first_page):
                return f"{self.path} was emptied"
        except FileNotFoundError:
            return f"{self.path} was deleted, or its file system is not mounted"
        except OSError as error:
            return f"{self.path} cannot be reached: {error.strerror}"
        return None

    def close_in_child(self) -> None:
        """Close a forked child's copy. Unlocking it would unlock the parent's too."""
        os.close(self._fd)

    def close(self) -> None:
        """Give the file and its lock back, whatever the system says: blocks that it could not keep are misses later."""
        # Closing alone would not do: a child that was forked meanwhile has the same lock.
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            finally:
                os.close(self._fd)
        except OSError as error:
            logger.warning("tier slab: %s could not be closed as it should: %s", self.path, error)

    def _transfer(self, call: Callable[[int, Buffers, int], int], slot: int, buffers: Buffers) -> int:
        offset = self.geometry.offset_of(slot)
        total = sum(map(len, buffers))
        done = call(self._fd, buffers, offset)
        while 0 < done < total:
            try:
                more = call(self._fd, rest_of(buffers, done), offset + done)
            except OSError as error:
                # Direct I/O goes on at page boundaries only, and stops elsewhere only where the file ends.
                if error.errno != errno.EINVAL:
                    raise
                break
            if more == 0:
                break
            done += more
        return done
