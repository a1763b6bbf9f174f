"""Counts are there from the beginning and lose nothing between threads."""

import threading

from kvtier.tiering.kit.health import Counters


def test_named_counts_begin_at_zero() -> None:
    assert Counters("hits", "absent").snapshot() == {"hits": 0, "absent": 0}


def test_no_count_is_lost_between_threads() -> None:
    counters = Counters("hits")

    def count() -> None:
        for _ in range(2000):
            counters.add(hits=1, declined=2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == {"hits": 8000, "declined": 16000}
