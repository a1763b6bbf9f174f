"""What a file system can do for the files of blocks, found out by trying once, when the tier is built.

Some refuse ``O_DIRECT`` or ``O_TMPFILE`` only when they are used.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiering.fs.system import SystemCalls
from kvtier.tiering.kit.backend import allocate_page


@dataclass(frozen=True, slots=True)
class FileSupport:
    """What the tier uses of a file system.

    Attributes:
        has_direct_io: blocks bypass the page cache.
        has_unnamed_files: a block is written without a name, so that a crash leaves nothing.
        is_durable: what is published outlives a loss of power.
    """

    has_direct_io: bool
    has_unnamed_files: bool
    is_durable: bool = False

    @property
    def flags(self) -> int:
        """Flags for ``open``."""
        return os.O_CLOEXEC | (os.O_DIRECT if self.has_direct_io else 0)

    @property
    def write_flags(self) -> int:
        """The same for files that are written: with ``O_DSYNC`` each call ends as if with ``fdatasync``."""
        return self.flags | (os.O_DSYNC if self.is_durable else 0)


def detect_file_support(
    directory: Path, scratch_path: Path, file_mode: int, calls: SystemCalls
) -> FileSupport:
    """Try what the file system of ``directory`` can do; leaves nothing behind.

    Args:
        directory: an existing, writable directory.
        scratch_path: a free name on the same file system.
        file_mode: permissions of the files that are tried.
        calls: the system.

    Raises:
        OSError: not even an ordinary file can be made.
    """

    def works(attempt: Callable[[], None]) -> bool:
        try:
            attempt()
        except OSError:
            return False
        finally:
            scratch_path.unlink(missing_ok=True)
        return True

    def make_named(flags: int) -> int:
        return calls.open(str(scratch_path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, file_mode)

    def write_direct() -> None:
        fd = make_named(os.O_DIRECT)
        try:
            calls.pwritev(fd, [allocate_page(), allocate_page()], 0)
            calls.preadv(fd, [allocate_page(), allocate_page()], 0)
        finally:
            os.close(fd)

    def link_unnamed() -> None:
        fd = calls.open(str(directory), os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, file_mode)
        try:
            calls.link(fd, str(scratch_path))
        finally:
            os.close(fd)

    try:
        os.close(make_named(0))
    finally:
        scratch_path.unlink(missing_ok=True)
    return FileSupport(works(write_direct), works(link_unnamed))
