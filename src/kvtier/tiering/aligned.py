"""Memory that direct I/O accepts."""

import mmap
import threading

import numpy as np

from kvtier.tiering.envelope import HEADER_PAGE_BYTES

ALIGNMENT_BYTES = 4096
"""What memory, offsets and lengths of direct I/O are multiples of: the largest logical block in use."""


def allocate_page() -> memoryview:
    """Return one zeroed, aligned page, format 'B'."""
    return memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES))


def allocate_pages(num_pages: int) -> list[memoryview]:
    """Return zeroed, aligned pages, format 'B', in one piece of memory."""
    memory = memoryview(mmap.mmap(-1, num_pages * HEADER_PAGE_BYTES))
    return [memory[start : start + HEADER_PAGE_BYTES] for start in range(0, len(memory), HEADER_PAGE_BYTES)]


class ThreadPages:
    """Aligned pages that each thread has for itself, made when it first asks for them.

    Args:
        num_pages: how many a thread has.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._local = threading.local()

    def of_this_thread(self) -> list[memoryview]:
        """Return the calling thread's, always the same ones, format 'B'. Thread: any."""
        pages: list[memoryview] | None = getattr(self._local, "pages", None)
        if pages is None:
            pages = self._local.pages = allocate_pages(self._num_pages)
        return pages


def is_aligned(rows: memoryview) -> bool:
    """Return whether direct I/O accepts each of ``rows``, shape (num_rows, row_bytes). Pure."""
    address = int(np.asarray(rows).ctypes.data)
    return address % ALIGNMENT_BYTES == 0 and rows.shape is not None and rows.shape[1] % ALIGNMENT_BYTES == 0
