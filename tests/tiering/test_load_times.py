"""What a tier's next load would take follows from the loads it has ended, and from those it is at."""

from typing import NamedTuple

import pytest

from kvtier.cost_model import LinkRate
from kvtier.locations import TierLoad
from kvtier.testing.clock import ManualClock
from kvtier.tiering.load_times import (
    MAX_BUSY_JOBS,
    MAX_PROBE_ROWS,
    MIN_PROBE_REST_S,
    PROBE_REST_RATIO,
    LoadTimes,
)

ROW = 10


class Load(NamedTuple):
    """A load that was begun."""

    num_bytes: int
    started_s: float


class Tier:
    """A tier that is watched."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.times = LoadTimes(self.clock)

    def begin(self, num_rows: int) -> Load:
        self.times.begin(num_rows * ROW)
        return Load(num_rows * ROW, self.clock())

    def end(self, *loads: Load, is_whole: bool = True, took_s: float | None = None) -> None:
        for load in loads:
            self.times.end(load.num_bytes, load.started_s, is_whole=is_whole, took_s=took_s)
        self.times.learn()

    def load(self, num_rows: int, time_s: float) -> None:
        job = self.begin(num_rows)
        self.clock.advance(time_s)
        self.end(job)

    def describe(self, num_wanted_rows: int = 0) -> TierLoad:
        return self.times.describe("tier", ROW, num_wanted_rows)


def test_a_tier_that_has_loaded_nothing_is_unknown_and_costs_nothing() -> None:
    tier = Tier()

    assert tier.describe() == TierLoad("tier", ROW)
    assert tier.describe().time_s(1000) == 0.0


def test_a_load_that_ended_tells_the_rate() -> None:
    tier = Tier()

    tier.load(4, 2.0)

    assert tier.describe() == TierLoad("tier", ROW, LinkRate(20.0))
    assert tier.describe().time_s(8) == 4.0


def test_idle_time_between_loads_does_not_count() -> None:
    tier = Tier()

    for _ in range(3):
        tier.load(4, 2.0)
        tier.clock.advance(1000.0)

    assert tier.times.rate == LinkRate(20.0)


def test_loads_that_overlap_count_as_one_busy_time() -> None:
    tier = Tier()
    first = tier.begin(4)
    tier.clock.advance(1.0)
    second = tier.begin(4)
    tier.clock.advance(1.0)
    tier.end(first)
    tier.clock.advance(2.0)
    tier.end(second)

    assert tier.times.rate == LinkRate(20.0)


def test_loads_reported_by_one_poll_count_together() -> None:
    tier = Tier()
    jobs = [tier.begin(2) for _ in range(3)]
    tier.clock.advance(3.0)

    tier.end(*jobs)

    assert tier.times.rate == LinkRate(20.0)


def test_a_busy_time_that_does_not_end_is_learned_from() -> None:
    tier = Tier()
    jobs = [tier.begin(2) for _ in range(MAX_BUSY_JOBS + 1)]
    for job in jobs[:-1]:
        tier.clock.advance(1.0)
        tier.end(job)

    assert tier.times.rate == LinkRate(20.0)


def test_a_load_that_fails_at_once_says_nothing() -> None:
    tier = Tier()
    job = tier.begin(4)
    tier.clock.advance(0.5)

    tier.end(job, is_whole=False)

    assert tier.times.rate is None
    tier.load(4, 2.0)
    assert tier.times.rate == LinkRate(20.0)


def test_a_load_that_is_given_up_after_a_while_tells_how_fast_the_tier_is_not() -> None:
    tier = Tier()
    job = tier.begin(4)
    tier.clock.advance(30.0)

    tier.end(job, is_whole=False)

    assert tier.times.rate == LinkRate(40 / 30)


def test_a_failure_never_makes_a_tier_look_faster() -> None:
    tier = Tier()
    tier.load(4, 40.0)
    job = tier.begin(400)
    tier.clock.advance(30.0)

    tier.end(job, is_whole=False)

    assert tier.times.rate == LinkRate(1.0)


def test_what_the_tier_has_to_load_already_comes_first() -> None:
    tier = Tier()
    tier.load(4, 2.0)
    tier.begin(8)
    tier.clock.advance(1.0)

    assert tier.describe().queue_s == pytest.approx(3.0)
    assert tier.describe().time_s(4) == pytest.approx(3.0 + 2.0)


def test_what_this_step_has_asked_for_comes_first_too() -> None:
    tier = Tier()
    tier.load(4, 2.0)

    assert tier.describe(num_wanted_rows=6).queue_s == pytest.approx(3.0)


def test_a_load_that_is_overdue_is_expected_to_take_as_long_again() -> None:
    tier = Tier()
    tier.load(4, 2.0)
    tier.begin(4)
    tier.clock.advance(32.0)

    assert tier.describe().queue_s == pytest.approx(30.0)


def test_the_first_load_bounds_the_rate_while_it_is_under_way() -> None:
    tier = Tier()
    tier.begin(4)
    assert tier.describe().time_s(4) == 0.0

    tier.clock.advance(8.0)

    assert tier.describe().rate == LinkRate(5.0)


def test_a_tier_is_left_alone_for_nine_times_as_long_as_it_was_measured() -> None:
    tier = Tier()
    assert tier.times.plan_probe(ROW)

    tier.times.on_probe()
    tier.load(4, 2.0)
    tier.clock.advance(17.9)
    assert tier.times.plan_probe(ROW) == 0
    tier.clock.advance(0.2)

    assert tier.times.plan_probe(ROW)
    tier.begin(1)
    assert tier.times.plan_probe(ROW) == 0


def test_a_load_that_somebody_wanted_asks_for_no_such_rest() -> None:
    tier = Tier()
    tier.load(4, 100.0)
    tier.clock.advance(MIN_PROBE_REST_S)

    assert tier.times.plan_probe(ROW) > 0


def test_a_fast_tier_is_left_alone_for_a_while_all_the_same() -> None:
    tier = Tier()
    tier.load(4, 0.001)
    tier.clock.advance(MIN_PROBE_REST_S / 2)

    assert tier.times.plan_probe(ROW) == 0


@pytest.mark.parametrize(("row_s", "expected"), [(0.001, MAX_PROBE_ROWS), (0.25, 4), (0.9, 1), (100.0, 1)])
def test_a_slow_tier_is_measured_with_few_rows(row_s: float, expected: int) -> None:
    tier = Tier()
    tier.load(4, 4 * row_s)
    tier.clock.advance(10_000.0)

    assert tier.times.plan_probe(ROW) == expected


def test_a_tier_that_was_never_measured_is_measured_with_several_rows() -> None:
    assert Tier().times.plan_probe(ROW) == MAX_PROBE_ROWS


def test_a_load_that_ended_while_nobody_looked_took_as_long_as_its_tier_says() -> None:
    tier = Tier()
    tier.load(4, 2.0)
    tier.times.on_probe()
    job = tier.begin(4)

    tier.clock.advance(600.0)  # the engine computes a long prompt, or has nothing to do
    tier.end(job, took_s=0.5)

    assert tier.describe() == TierLoad("tier", ROW, LinkRate(80.0))
    tier.clock.advance(PROBE_REST_RATIO * 0.5)
    assert tier.times.plan_probe(ROW) > 0


def test_a_tier_that_says_more_than_has_passed_is_not_believed() -> None:
    tier = Tier()
    job = tier.begin(4)
    tier.clock.advance(2.0)

    tier.end(job, took_s=1000.0)

    assert tier.describe() == TierLoad("tier", ROW, LinkRate(20.0))


def test_of_loads_that_overlap_the_last_to_end_counts() -> None:
    tier = Tier()
    first = tier.begin(4)
    tier.clock.advance(1.0)
    second = tier.begin(4)
    tier.clock.advance(9.0)
    tier.times.end(*second, is_whole=True, took_s=3.0)
    tier.times.end(*first, is_whole=True, took_s=2.0)

    tier.times.learn()

    assert tier.describe() == TierLoad("tier", ROW, LinkRate(20.0))
