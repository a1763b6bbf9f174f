"""Files of one block each, as the fs tier writes them: a page with an envelope, then the row.

What reads and writes them here is as little as can be done: the floors of the fs suite. The one with checksums seals as
far ahead as the tier does, so it shows what a checksum costs there, and not how far ahead would be best.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.crew import Crew
from benchmarks.harness.tier_jobs import flat_rows
from kvtier.base import OffloadKey
from kvtier.tiering.kit.disk import checksum_ahead, plan_num_checksums_ahead
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, HEADER_PAGE_BYTES, HeaderCheck, check_block, make_header

GET_FLAGS, SET_FLAGS, TOP_OF_HIERARCHY = 0x8008_6601, 0x4008_6602, 0x0002_0000
"""FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_TOPDIR_FL of Linux, where a long has 64 bits."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of all blocks of a round.

    Attributes:
        paths: block by block.
        keys: what is in their envelopes.
        digest: the namespace in their envelopes, 32 bytes.
    """

    paths: Sequence[str]
    keys: Sequence[OffloadKey]
    digest: bytes

    def empty(self) -> None:
        """Give their bytes back to the disk and keep their names.

        They are not removed while anything is measured: ext4 without a journal passes over inodes freed in the last
        minute one by one (2026-11, Linux 6.18), and 4,000 removals made each new file take 500 us instead of 11.
        """
        empty_files(self.paths)


class RawFiles:
    """Writes and reads sets of files with threads of its own.

    Args:
        rows: what to write and where to read to, shape (num_blocks, block_bytes).
        num_threads: how many.
        is_direct: whether the page cache is bypassed.
        is_sealed: whether each row gets an envelope, and is checked.

    Attributes:
        num_bytes: of all rows.
    """

    def __init__(self, rows: memoryview, num_threads: int, *, is_direct: bool, is_sealed: bool) -> None:
        self.num_bytes = rows.nbytes
        self._rows = flat_rows(rows)
        self._crew = Crew(num_threads)
        self._flags = os.O_DIRECT if is_direct else 0
        self._is_sealed = is_sealed
        self._num_ahead = (
            plan_num_checksums_ahead(len(self._rows[0]), has_direct_io=is_direct) if is_sealed else 0
        )
        self._pages = [memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES)) for _ in self._rows]

    def put(self, files: FileSet) -> None:
        """Write every block; each thread seals as far ahead of its writes as the tier's do."""

        def seal_block(number: int) -> int:
            if self._is_sealed:
                envelope = make_header(files.keys[number], files.digest, self._rows[number])
                self._pages[number][:ENVELOPE_BYTES] = envelope
            return number

        def put_blocks(numbers: Iterator[int]) -> None:
            for number in checksum_ahead(numbers, seal_block, self._num_ahead):
                self._move(files.paths[number], os.O_CREAT | os.O_RDWR, os.pwritev, number)

        self._crew.share(len(self._rows), put_blocks)

    def get(self, files: FileSet) -> None:
        """Read every block."""

        def get_block(number: int) -> None:
            self._move(files.paths[number], os.O_RDONLY, os.preadv, number)
            if self._is_sealed:
                verdict = check_block(self._pages[number], self._rows[number], files.keys[number], files.digest)
                assert verdict is HeaderCheck.OK

        self._crew.each(len(self._rows), get_block)

    def close(self) -> None:
        """End the threads."""
        self._crew.close()

    def _move(
        self, path: str, flags: int, call: Callable[[int, Sequence[memoryview], int], int], number: int
    ) -> None:
        fd = os.open(path, flags | self._flags, 0o600)
        num_moved = call(fd, [self._pages[number], self._rows[number]], 0)
        os.close(fd)
        assert num_moved == HEADER_PAGE_BYTES + len(self._rows[number])


def empty_files(paths: Iterable[str | Path]) -> None:
    """Cut files to no length; as ``FileSet.empty``."""
    for path in paths:
        os.truncate(path, 0)


def spread_folders(folder: Path) -> None:
    """Let ext4 give each folder that is made in ``folder`` a place of its own, as it does at its root (``chattr +T``).

    Else the first would lie beside ``folder``, where others may have removed files lately; see ``FileSet.empty``. Other
    file systems refuse, and need it not.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, GET_FLAGS, struct.pack("l", 0)))
            fcntl.ioctl(fd, SET_FLAGS, struct.pack("l", flags | TOP_OF_HIERARCHY))
    finally:
        os.close(fd)
