"""Rates are of puts and gets alone; the page cache forgets."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.harness.tier_jobs import cold_rate_of, drop_page_cache, rates_of, write_back

PAGE_BYTES = 4096
LIBC = ctypes.CDLL(None, use_errno=True)


class ManualClock:
    """A clock that stands still until somebody works."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def working(self, seconds: float) -> Callable[[], None]:
        """Return work that takes so long."""

        def work() -> None:
            self.now_s += seconds

        return work


def is_cached(path: Path) -> bool:
    """Return whether the first page of a file is in the page cache, without bringing it there.

    A read that may not wait is no way to ask: it begins to read ahead, and a fast disk has answered before it looks.
    """
    is_held = ctypes.c_ubyte()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), PAGE_BYTES) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        status = LIBC.mincore(ctypes.byref(first), ctypes.c_size_t(PAGE_BYTES), ctypes.byref(is_held))
        del first
    assert status == 0, os.strerror(ctypes.get_errno())
    return bool(is_held.value & 1)


def require_page_cache(path: Path) -> None:
    """Skip the test where a file system, one in memory for example, takes no read that may not wait."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(PAGE_BYTES)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        pass
    except OSError as error:
        pytest.skip(f"this file system may have nothing to forget: {error}")
    finally:
        os.close(fd)


def test_rates_are_of_the_time_that_each_way_takes() -> None:
    clock = ManualClock()

    rates = rates_of(8 * 2**20, clock.working(2.0), clock.working(0.5), clock=clock)

    assert rates == {"put": 4.0, "get": 16.0}


def test_forgetting_takes_no_time_and_comes_before_the_read(tmp_path: Path) -> None:
    clock = ManualClock()
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES))
    were_cached: list[bool] = []

    def paths() -> Iterator[Path]:
        clock.working(50.0)()
        yield path

    def get() -> None:
        were_cached.append(is_cached(path))
        clock.working(0.5)()

    require_page_cache(path)
    write_back([path])
    assert is_cached(path)

    assert cold_rate_of(8 * 2**20, paths(), get, clock=clock) == {"get": 16.0}
    assert were_cached == [False]


def test_files_are_forgotten_by_the_page_cache_and_keep_their_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(path.name.encode() * PAGE_BYTES)
    require_page_cache(paths[0])
    assert all(map(is_cached, paths)), "just written"

    write_back(paths)
    drop_page_cache(paths[:2])

    assert [is_cached(path) for path in paths] == [False, False, True]
    assert [path.read_bytes() for path in paths] == [path.name.encode() * PAGE_BYTES for path in paths]
