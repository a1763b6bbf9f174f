"""Counts lose nothing between threads; an outage is logged once, and a backend is left alone for a while after it."""

import logging
import threading

import pytest

from kvtier.errors import TierError
from kvtier.testing.clock import ManualClock
from kvtier.tiering.kit.backend import Counters
from kvtier.tiering.kit.health import BackendHealth


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


AWAY = "no answer"


def test_a_backend_that_never_failed_is_called() -> None:
    health = BackendHealth("somewhere", ManualClock(), pause_s=1.0)
    health.require_no_pause()
    assert not health.is_paused


def test_a_backend_that_failed_is_left_alone_for_the_pause_and_then_called_again() -> None:
    clock = ManualClock()
    health = BackendHealth("somewhere", clock, pause_s=1.0)
    health.begin_pause(AWAY)
    for _ in range(2):
        assert health.is_paused
        with pytest.raises(TierError, match="'somewhere': no answer"):
            health.require_no_pause()
        clock.advance(0.4)
    clock.advance(0.2)
    health.require_no_pause()
    assert not health.is_paused


def test_a_later_failure_prolongs_the_pause() -> None:
    clock = ManualClock()
    health = BackendHealth("somewhere", clock, pause_s=1.0)
    health.begin_pause(AWAY)
    clock.advance(0.75)
    health.begin_pause("still no answer")
    clock.advance(0.75)
    with pytest.raises(TierError, match="still no answer"):
        health.require_no_pause()
    clock.advance(0.25)
    health.require_no_pause()


def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = BackendHealth("somewhere", ManualClock(), name="somewhere, node a")
    with caplog.at_level(logging.WARNING):
        health.on_success()
        for _ in range(3):
            health.on_failure(TierError("somewhere", AWAY), num_unanswered=2)
        for _ in range(3):
            health.on_success()
    first, last = (record.getMessage() for record in caplog.records)
    assert AWAY in first
    assert last == "tier somewhere, node a can be reached again"
    assert (health.drain_unanswered(), health.drain_unanswered()) == (6, 0)
