"""Files of one block each, as the peers of the fs suite write them: how they are emptied, and where ext4 puts them."""

import fcntl
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

GET_FLAGS, SET_FLAGS, TOP_OF_HIERARCHY = 0x8008_6601, 0x4008_6602, 0x0002_0000
"""FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_TOPDIR_FL of Linux, where a long has 64 bits."""


def empty_files(paths: Iterable[str | Path]) -> None:
    """Truncate files and keep their names.

    They are not removed during a measurement: ext4 without a journal searches past inodes freed in the last minute
    one by one (2026-11, Linux 6.18), and 4,000 removals made each new file take 500 us instead of 11.
    """
    for path in paths:
        os.truncate(path, 0)


def spread_folders(folder: Path) -> None:
    """Make ext4 place each folder created in ``folder`` independently, as it does at its root (``chattr +T``).

    Otherwise the first would lie beside ``folder``, where other programs may have removed files lately; see
    ``empty_files``. Other file systems refuse, and do not need it.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, GET_FLAGS, struct.pack("l", 0)))
            fcntl.ioctl(fd, SET_FLAGS, struct.pack("l", flags | TOP_OF_HIERARCHY))
    finally:
        os.close(fd)
