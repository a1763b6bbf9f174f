"""The pages that headers are read into are aligned, and each thread has its own."""

from concurrent.futures import ThreadPoolExecutor

from kvtier.tiering.kit.backend import ThreadPages, allocate_page, allocate_pages
from kvtier.tiering.kit.disk import is_aligned


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
