"""Disks that have little room, or fail when a test says so."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.tiering.fs.system_calls import Buffers


@contextmanager
def small_disk_at(folder: Path, size: str = "1m") -> Iterator[Path]:
    """Mount a small file system at a folder that is made; skips the test where this user may not."""
    folder.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("there is no mount command here")
    command = [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([umount, str(folder)], check=True)


class FailingWrites:
    """Writes that fail while the test says so.

    Attributes:
        error: the number of the error; 0 writes.
    """

    def __init__(self) -> None:
        self.error = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview] | Buffers, offset: int) -> int:
        """Write, or fail."""
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return os.pwritev(fd, buffers, offset)


NO_ROOM, BROKEN = errno.ENOSPC, errno.EIO
