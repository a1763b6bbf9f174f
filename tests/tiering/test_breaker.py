"""The breaker opens, is tried and closes by the manual clock; the back-off keeps its bounds."""

import random

import pytest

from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of
from kvtier.tiering.base import FAILURES_TO_OPEN
from kvtier.tiering.breaker import (
    BACKOFF_S,
    MAX_BACKOFF_KEYS,
    MAX_BACKOFF_S,
    OPEN_S,
    TRIAL_TIMEOUT_S,
    BreakerState,
    CircuitBreaker,
    LoadBackoff,
)

OLD, TRIAL, OTHER = object(), object(), object()
"""Owners of work: begun before the breaker opened, the trial, and anybody else."""


@pytest.fixture
def clock() -> ManualClock:
    """Time of the test."""
    return ManualClock(100.0)


@pytest.fixture
def breaker(clock: ManualClock) -> CircuitBreaker:
    """A breaker with the default limits."""
    return CircuitBreaker(clock)


def open_by_failures(breaker: CircuitBreaker) -> None:
    """Fail as often as it takes."""
    for _ in range(FAILURES_TO_OPEN):
        breaker.record_failure(OLD)


def test_it_stays_closed_below_the_limit(breaker: CircuitBreaker) -> None:
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.record_failure(OLD)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.begin(TRIAL)


def test_consecutive_failures_open_it(breaker: CircuitBreaker) -> None:
    open_by_failures(breaker)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.begin(TRIAL)
    assert breaker.num_openings == 1


def test_a_success_between_failures_starts_the_count_again(breaker: CircuitBreaker) -> None:
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.record_failure(OLD)
    breaker.record_success(OLD)
    breaker.record_failure(OLD)
    assert breaker.state is BreakerState.CLOSED


def test_after_the_pause_one_trial_and_only_one_gets_through(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    open_by_failures(breaker)
    clock.advance(OPEN_S)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.begin(TRIAL)
    assert not breaker.allows(OTHER)
    assert not breaker.begin(OTHER)
    assert breaker.begin(TRIAL)


def test_a_good_trial_closes_it(breaker: CircuitBreaker, clock: ManualClock) -> None:
    open_by_failures(breaker)
    clock.advance(OPEN_S)
    breaker.begin(TRIAL)
    breaker.record_success(TRIAL)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.begin(OTHER)


def test_a_bad_trial_opens_it_for_another_pause(breaker: CircuitBreaker, clock: ManualClock) -> None:
    open_by_failures(breaker)
    clock.advance(OPEN_S)
    breaker.begin(TRIAL)
    breaker.record_failure(TRIAL)
    assert breaker.state is BreakerState.OPEN
    clock.advance(OPEN_S)
    assert breaker.begin(TRIAL)


def test_a_late_success_of_older_work_does_not_close_an_open_breaker(breaker: CircuitBreaker) -> None:
    open_by_failures(breaker)
    breaker.record_success(OLD)
    assert breaker.state is BreakerState.OPEN


def test_reports_of_older_work_decide_nothing_while_a_trial_is_out(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    open_by_failures(breaker)
    clock.advance(OPEN_S)
    breaker.begin(TRIAL)
    breaker.record_success(OLD)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.record_failure(OLD)
    assert not breaker.allows(OTHER)


def test_a_trial_that_nobody_reports_makes_room_for_the_next(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    open_by_failures(breaker)
    clock.advance(OPEN_S)
    breaker.begin(TRIAL)
    clock.advance(TRIAL_TIMEOUT_S)
    assert breaker.begin(OTHER)
    breaker.record_success(TRIAL)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.record_success(OTHER)
    assert breaker.allows(OLD)


def test_a_success_changes_nothing_unless_something_has_failed(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    draw = random.Random(5)
    num_without = 0
    for _ in range(2000):
        owner = draw.choice((OLD, TRIAL, OTHER))
        if not breaker.has_failures:
            before = dict(vars(breaker))
            breaker.record_success(owner)
            assert vars(breaker) == before
            num_without += 1
        change = draw.choice(
            (breaker.begin, breaker.record_success, breaker.record_failure, breaker.end_lookup)
        )
        change(owner)
        if draw.random() < 0.05:
            breaker.trip()
        clock.advance(draw.random() * OPEN_S)
    assert 100 < num_without < 1900


def test_an_overloaded_tier_can_be_tripped_at_once(breaker: CircuitBreaker) -> None:
    breaker.trip()
    breaker.trip()
    assert breaker.state is BreakerState.OPEN
    assert breaker.num_openings == 1


def test_a_failed_key_is_left_alone_for_a_doubling_while(clock: ManualClock) -> None:
    backoff = LoadBackoff(clock)
    pause_s = BACKOFF_S
    for _ in range(10):
        backoff.record_failure(key_of(1))
        clock.advance(pause_s - 0.001)
        assert backoff.is_paused(key_of(1))
        clock.advance(0.001)
        assert not backoff.is_paused(key_of(1))
        pause_s = min(2 * pause_s, MAX_BACKOFF_S)


def test_a_success_forgets_the_failures_of_a_key(clock: ManualClock) -> None:
    backoff = LoadBackoff(clock)
    backoff.record_failure(key_of(1))
    backoff.record_successes([key_of(1)])
    assert not backoff.is_paused(key_of(1))
    assert len(backoff) == 0


def test_the_back_off_is_bounded(clock: ManualClock) -> None:
    backoff = LoadBackoff(clock)
    for number in range(MAX_BACKOFF_KEYS + 10):
        backoff.record_failure(key_of(number))
    assert len(backoff) == MAX_BACKOFF_KEYS
    assert not backoff.is_paused(key_of(0))
    assert backoff.is_paused(key_of(MAX_BACKOFF_KEYS))


def test_a_late_failure_of_nobody_s_does_not_prolong_the_pause() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock, failures_to_open=1, open_s=5.0)
    breaker.record_no_response()
    clock.advance(4.0)
    breaker.record_no_response()
    breaker.record_failure(None)
    clock.advance(1.0)
    assert breaker.state is BreakerState.HALF_OPEN
