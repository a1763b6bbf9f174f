"""The engine's speed is learned from steps that compute prompts, and from nothing between them."""

import pytest

from kvtier.cost_model import MAX_OPEN_STEPS, MIN_PREFILL_SAMPLES, MIN_STEP_TOKENS, PrefillEstimator

TOKENS = 100


def token_s(estimator: PrefillEstimator) -> float:
    """Return the seconds of a token, which must be known."""
    rate = estimator.rate()
    assert rate is not None
    return rate.token_s


def test_nothing_is_known_before_a_few_steps() -> None:
    estimator = PrefillEstimator()
    for number in range(MIN_PREFILL_SAMPLES):
        assert estimator.rate() is None
        estimator.end_step(estimator.begin_step(TOKENS, number * 10.0), number * 10.0 + 1.0)

    assert token_s(estimator) == pytest.approx(0.01)


def test_pauses_between_steps_do_not_count() -> None:
    estimator = PrefillEstimator()
    for number in range(5):
        estimator.end_step(estimator.begin_step(TOKENS, number * 1000.0), number * 1000.0 + 1.0)

    assert token_s(estimator) == pytest.approx(0.01)


def test_a_step_planned_while_another_runs_counts_from_the_report_of_that() -> None:
    estimator = PrefillEstimator()
    first = estimator.begin_step(TOKENS, 0.0)
    for number in range(1, 6):
        second = estimator.begin_step(TOKENS, number - 0.9)
        estimator.end_step(first, float(number))
        first = second

    assert token_s(estimator) == pytest.approx(0.01)


def test_a_report_without_a_number_ends_the_step_before() -> None:
    estimator = PrefillEstimator()
    for number in range(3):
        begun_s = number * 10.0
        step = estimator.begin_step(TOKENS, begun_s)
        estimator.end_step(None, begun_s + 4.0)
        estimator.end_step(step, begun_s + 5.0)

    assert token_s(estimator) == pytest.approx(0.01)


def test_steps_that_decode_are_not_timed() -> None:
    estimator = PrefillEstimator()

    assert estimator.begin_step(MIN_STEP_TOKENS - 1, 0.0) is None
    assert estimator.begin_step(MIN_STEP_TOKENS, 0.0) is not None


def test_one_odd_step_changes_nothing() -> None:
    estimator = PrefillEstimator()
    for number in range(6):
        time_s = 500.0 if number == 3 else 1.0
        estimator.end_step(estimator.begin_step(TOKENS, number * 1000.0), number * 1000.0 + time_s)

    assert token_s(estimator) == pytest.approx(0.01)


def test_long_steps_weigh_more_than_short_ones() -> None:
    estimator = PrefillEstimator()
    for number, (tokens, time_s) in enumerate([(50, 5.0), (50, 5.0), (1000, 1.0)]):
        estimator.end_step(estimator.begin_step(tokens, number * 100.0), number * 100.0 + time_s)

    assert token_s(estimator) == pytest.approx(0.001)


def test_an_engine_that_has_become_faster_is_believed_after_a_window() -> None:
    estimator = PrefillEstimator()
    for number in range(100):
        time_s = 10.0 if number < 60 else 1.0
        estimator.end_step(estimator.begin_step(TOKENS, number * 100.0), number * 100.0 + time_s)

    assert token_s(estimator) == pytest.approx(0.01)


def test_steps_that_are_never_reported_are_forgotten() -> None:
    estimator = PrefillEstimator()
    lost = [estimator.begin_step(TOKENS, 0.0) for _ in range(MAX_OPEN_STEPS + 3)]

    estimator.end_step(lost[0], 1e6)

    assert estimator.rate() is None
    assert len(estimator) == MAX_OPEN_STEPS


def test_a_step_that_is_reported_twice_counts_once() -> None:
    estimator = PrefillEstimator()
    step = estimator.begin_step(TOKENS, 0.0)
    for now_s in (1.0, 2.0, 3.0):
        estimator.end_step(step, now_s)

    assert estimator.rate() is None


def test_a_time_that_the_engine_measured_replaces_those_of_its_steps() -> None:
    estimator = PrefillEstimator()
    for number in range(5):
        estimator.end_step(estimator.begin_step(TOKENS, number * 10.0), number * 10.0 + 0.001)

    for _ in range(MIN_PREFILL_SAMPLES):
        estimator.observe(TOKENS, 2.0)

    assert token_s(estimator) == pytest.approx(0.02)
    assert estimator.begin_step(TOKENS, 0.0) is None


def test_a_measured_time_of_a_few_tokens_is_ignored() -> None:
    estimator = PrefillEstimator()
    for _ in range(10):
        estimator.observe(MIN_STEP_TOKENS - 1, 1.0)
        estimator.observe(TOKENS, 0.0)

    assert estimator.rate() is None
