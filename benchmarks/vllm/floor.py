"""The least cost of moving bytes: a plain copy in memory, a plain read of files through the page cache.

Both have as many threads as kvtier may use for the same work, touched buffers, and nothing else to do. They run while
the engine sleeps.
"""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from kvtier.cpu.row_copy import MAX_COPY_THREADS
from kvtier.limits import count_usable_cores
from kvtier.tiering.kit.disk import DEFAULT_NUM_THREADS


class Floor:
    """Buffers, files and threads of the plain copy and the plain read.

    Args:
        num_rows: rows of a prompt.
        row_bytes: bytes of a row; one file each.
        folder: folder for the files; an empty directory on the file system of the fs tier.

    Attributes:
        num_copy_threads: threads of the copy.
        num_read_threads: threads of the read.
    """

    num_read_threads = DEFAULT_NUM_THREADS

    def __init__(self, num_rows: int, row_bytes: int, folder: Path) -> None:
        self.num_copy_threads = min(MAX_COPY_THREADS, count_usable_cores())
        self._source, self._target = (np.ones(num_rows * row_bytes, dtype=np.int8) for _ in range(2))
        # Shared, like the rows of the primary tier: the kernel does not give such memory huge pages.
        self._rows = [memoryview(mmap.mmap(-1, row_bytes)) for _ in range(num_rows)]
        self._paths = [folder / str(number) for number in range(num_rows)]
        for path, row in zip(self._paths, self._rows, strict=True):
            row[:] = bytes(row_bytes)
            path.write_bytes(row)
        self._copiers = ThreadPoolExecutor(self.num_copy_threads)
        self._readers = ThreadPoolExecutor(self.num_read_threads)

    def __enter__(self) -> "Floor":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._copiers.shutdown()
        self._readers.shutdown()

    def copy_s(self) -> float:
        """Return the seconds that ``np.copyto`` takes for a prompt's bytes, split among threads."""
        sources = np.array_split(self._source, self.num_copy_threads)
        targets = np.array_split(self._target, self.num_copy_threads)
        start_s = time.perf_counter()
        list(self._copiers.map(np.copyto, targets, sources))
        return time.perf_counter() - start_s

    def read_s(self) -> float:
        """Return the seconds that ``open``, one ``preadv`` and ``close`` take for all of a prompt's rows."""
        start_s = time.perf_counter()
        list(self._readers.map(_read, self._paths, self._rows))
        return time.perf_counter() - start_s


def _read(path: Path, row: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        num_bytes = os.preadv(fd, [row], 0)
    finally:
        os.close(fd)
    if num_bytes != len(row):
        raise SystemExit(f"{path} has {num_bytes} bytes, not {len(row)}")
