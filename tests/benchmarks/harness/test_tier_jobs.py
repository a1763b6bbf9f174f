"""Rates leave out what happens between puts and gets; the page cache forgets; everybody begins equally often."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.tier_jobs import drop_page_cache, rates_of, whole_turns

PAGE_BYTES = 4096


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
    """Return whether the first page of a file is in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(PAGE_BYTES)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


@pytest.mark.parametrize("has_between", [True, False])
def test_what_is_done_between_put_and_get_takes_no_time(has_between: bool) -> None:
    clock = ManualClock()
    between = clock.working(50.0) if has_between else None

    rates = rates_of(8 * 2**20, clock.working(2.0), clock.working(0.5), between, clock=clock)

    assert rates == {"put": 4.0, "get": 16.0}
    assert clock.now_s == (152.5 if has_between else 102.5)


def test_files_are_forgotten_by_the_page_cache_and_keep_their_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(path.name.encode() * PAGE_BYTES)
    try:
        were_cached = [is_cached(path) for path in paths]
    except OSError as error:
        pytest.skip(f"this file system does not say what is cached: {error}")
    assert all(were_cached), "just written"

    drop_page_cache(paths[:2])

    assert [is_cached(path) for path in paths] == [False, False, True]
    assert [path.read_bytes() for path in paths] == [path.name.encode() * PAGE_BYTES for path in paths]


@pytest.mark.parametrize(
    ("num_rounds", "num_contestants", "expected"),
    [(9, 3, 9), (9, 4, 12), (9, 5, 10), (9, 2, 10), (1, 1, 1), (1, 4, 4), (12, 4, 12)],
)
def test_rounds_are_enough_and_each_begins_equally_often(
    num_rounds: int, num_contestants: int, expected: int
) -> None:
    assert whole_turns(num_rounds, num_contestants) == expected
