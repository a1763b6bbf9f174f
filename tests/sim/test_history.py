"""Samples are evenly spaced, few, and show the state that held at their times."""

from itertools import pairwise

import pytest

from kvtier.sim.history import FIRST_INTERVAL_S, MAX_SAMPLES, HistoryRecorder, Reading


class Place:
    """A place whose numbers a test sets."""

    def __init__(self) -> None:
        self.held = 0
        self.num_reads = 0

    def read(self) -> Reading:
        self.num_reads += 1
        return Reading({"host": self.held}, {"host": 2 * self.held})


def test_a_sample_shows_what_held_before_the_next_event() -> None:
    place = Place()
    recorder = HistoryRecorder(10.0, place.read)

    recorder.record_until(11.5)
    place.held = 7
    recorder.record_until(12.0)
    place.held = 9
    history = recorder.finish(12.5)

    assert history.at_s == (10.0, 11.0, 12.0, 12.5)
    assert history.held_blocks == {"host": (0, 0, 7, 9)}
    assert history.written_blocks == {"host": (0, 0, 14, 18)}


def test_nothing_is_read_where_no_sample_is_due() -> None:
    place = Place()
    recorder = HistoryRecorder(0.0, place.read)

    for number in range(100):
        recorder.record_until(number / 1000)

    assert place.num_reads == 1


@pytest.mark.parametrize("duration_s", [150.0, 3600.0, 604_800.0, 1.7e12])
def test_samples_stay_few_and_even_however_long_the_run(duration_s: float) -> None:
    place = Place()
    recorder = HistoryRecorder(5.0, place.read)

    for part in range(1, 1001):
        recorder.record_until(5.0 + duration_s * part / 1000)
        place.held = part
    at_s = recorder.finish(5.0 + duration_s).at_s

    gaps_s = {later - earlier for earlier, later in pairwise(at_s[:-1])}
    assert MAX_SAMPLES // 2 <= len(at_s) <= MAX_SAMPLES + 1
    assert len(gaps_s) == 1
    assert (gaps_s.pop() / FIRST_INTERVAL_S).is_integer()
    assert at_s[0] == 5.0


def test_a_run_without_events_has_its_end() -> None:
    assert HistoryRecorder(3.0, Place().read).finish(0.0).at_s == (3.0,)
