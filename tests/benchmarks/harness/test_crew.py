"""Threads that share work do each piece once, and an error of one is told when all have ended."""

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from benchmarks.harness.crew import Crew

NUM_THREADS = 4


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(NUM_THREADS)
    yield crew
    crew.close()


@pytest.mark.parametrize("num_items", [0, 1, NUM_THREADS, 1000])
def test_each_piece_is_done_once(crew: Crew, num_items: int) -> None:
    done: list[int] = []
    crew.each(num_items, done.append)
    assert Counter(done) == Counter(range(num_items))


def test_each_thread_takes_part(crew: Crew) -> None:
    together = threading.Barrier(NUM_THREADS, timeout=60.0)
    crew.each(NUM_THREADS, lambda _: together.wait())


def test_an_error_is_told_and_the_others_go_on(crew: Crew) -> None:
    done: list[int] = []

    def fail_once(number: int) -> None:
        if number == 0:
            raise OSError("the first one")
        done.append(number)

    with pytest.raises(OSError, match="the first one"):
        crew.each(100, fail_once)
    assert sorted(done) == list(range(1, 100))
    crew.each(1, done.append)
    assert done[-1] == 0
