"""Maps the pages of a region before the first transfer needs them, several threads at a time.

It changes no byte, so that a process that joins a region in use may do it too. A first touch inside a copy costs a
page fault per 4 KiB, which halves the copy's bandwidth.
"""

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvtier.cores import count_usable_cores
from kvtier.errors import RegionMemoryError

MADV_POPULATE_WRITE = 23
"""Not in Python 3.11's mmap module; Linux 5.14 and later."""

CHUNK_BYTES = 64 << 20
"""Bytes populated with one system call. Smaller chunks balance better, larger ones make fewer calls."""

MAX_PREFAULT_THREADS = 8
"""Zeroing memory is bound by its bandwidth, which about eight cores exhaust."""


def prefault(mapping: mmap.mmap, size_bytes: int) -> None:
    """Make every page of the first ``size_bytes`` present and writable; their bytes stay as they are.

    Raises:
        RegionMemoryError: the kernel has no memory for a page.

    Thread: blocks the caller, not the interpreter lock, until the last page is there.
    """
    view = np.frombuffer(mapping, dtype=np.int8, count=size_bytes)
    starts = range(0, size_bytes, CHUNK_BYTES)
    num_threads = min(MAX_PREFAULT_THREADS, count_usable_cores(), len(starts))
    with ThreadPoolExecutor(num_threads, "kvtier-prefault") as pool:
        for done in [pool.submit(_populate, view[start : start + CHUNK_BYTES]) for start in starts]:
            done.result()


def _populate(chunk: npt.NDArray[np.int8]) -> None:
    """Populate with one system call; where the kernel is too old, read a byte of each page.

    mmap.madvise would do, but holds the interpreter lock (Python 3.11); ctypes does not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(chunk.ctypes.data), ctypes.c_size_t(chunk.nbytes)
    if libc.madvise(address, length, MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise RegionMemoryError(
            f"{chunk.nbytes} bytes of the region cannot be mapped ({os.strerror(code)}): lower cpu_bytes_to_use"
        )
    chunk[:: mmap.PAGESIZE].max()
