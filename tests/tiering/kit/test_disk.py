"""Memory that direct I/O accepts is told from memory that it does not."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtier.testing.tier_suite import make_rows
from kvtier.tiering.kit.disk import ThreadPages, allocate_page, allocate_pages, is_aligned


def test_a_page_is_aligned_and_zeroed() -> None:
    page = allocate_page()
    assert is_aligned(memoryview(page).cast("b", (1, 4096)))
    assert bytes(page) == bytes(4096)


def test_pages_are_aligned_and_apart() -> None:
    pages = allocate_pages(3)
    for number, page in enumerate(pages):
        assert is_aligned(memoryview(page).cast("b", (1, 4096)))
        page[:] = bytes([number]) * 4096
    assert b"".join(pages) == b"".join(bytes([number]) * 4096 for number in range(3))


def test_each_thread_has_pages_of_its_own_and_keeps_them() -> None:
    pages = ThreadPages(2)
    mine = pages.of_this_thread()
    assert len(mine) == 2
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(pages.of_this_thread).result()
        theirs[0][:] = b"x" * 4096
        assert pool.submit(pages.of_this_thread).result() is theirs
    assert pages.of_this_thread() is mine
    assert bytes(mine[0]) == bytes(4096)


def test_rows_are_aligned_in_address_and_length() -> None:
    assert is_aligned(make_rows(4, 8192))
    assert not is_aligned(make_rows(4, 8192 + 512))
    memory = np.zeros(3 * 4096, np.int8)
    start = -memory.ctypes.data % 4096 + 64
    assert not is_aligned(memory[start : start + 4096].reshape(1, 4096).data)
