"""What loading saves, with its interval: on numbers whose truth is known."""

import random
from statistics import fmean

import pytest

from kvtier.connector.control_arm import (
    BUCKETS,
    MIN_ROUNDS,
    TRIAL_RATIO,
    Arm,
    ControlArm,
    DecayingMean,
    bucket_of,
    find_interval,
)

NUM_TOKENS = 1000


def fill(arm: ControlArm, rng: random.Random, loaded_s: float, computed_s: float, num: int) -> None:
    """Add ``num`` requests of each kind with noisy times."""
    for _ in range(num):
        arm.add("fs", NUM_TOKENS, loaded_s * rng.lognormvariate(0, 0.3), Arm.LOADED)
        arm.add("fs", NUM_TOKENS, computed_s * rng.lognormvariate(0, 0.3), Arm.AUDITED)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng, num_covered, num_trials = random.Random(1), 0, 400
    truth = (2.0 - 0.5) * 1.046 / NUM_TOKENS  # the mean of that noise is exp(0.3^2 / 2)
    for _ in range(num_trials):
        arm = ControlArm(random.Random(0))
        fill(arm, rng, loaded_s=0.5, computed_s=2.0, num=30)
        found = arm.intervals()[0]
        num_covered += found.low_s <= truth <= found.high_s

    assert num_covered / num_trials > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("num_requests", "audit_ratio"), [(150, 0.2), (1000, 0.02)])
def test_a_run_of_live_requests_is_covered_about_as_often_as_it_says(
    num_requests: int, audit_ratio: float
) -> None:
    rng, num_covered, num_trials = random.Random(5), 0, 400
    for _ in range(num_trials):
        arm = ControlArm(random.Random(0))
        for _ in range(num_requests):
            is_computed = rng.random() < audit_ratio
            time_s = (2.0 if is_computed else 1.0) * rng.lognormvariate(-0.08, 0.4)  # its mean is the factor
            arm.add("fs", NUM_TOKENS, time_s, Arm.AUDITED if is_computed else Arm.LOADED)
        found = arm.intervals()[0]
        num_covered += found.low_s <= 1.0 / NUM_TOKENS <= found.high_s

    assert 0.93 <= num_covered / num_trials <= 0.98


@pytest.mark.parametrize("busy_requests", [7, 40, 400])
def test_a_load_that_comes_and_goes_delays_both_kinds_and_is_not_taken_for_a_difference(
    busy_requests: int,
) -> None:
    rng, num_covered, num_off, num_trials = random.Random(6), 0, 0, 400
    for _ in range(num_trials):
        arm, begin = ControlArm(random.Random(0)), rng.randrange(2 * busy_requests)
        for number in range(300):
            is_computed = rng.random() < 0.1
            waits_s = 10.0 if (begin + number) // busy_requests % 2 else 0.0
            time_s = waits_s + (2.0 if is_computed else 1.0) + rng.gauss(0, 0.2)
            arm.add("fs", NUM_TOKENS, time_s, Arm.AUDITED if is_computed else Arm.LOADED)
        found = arm.intervals()[0]
        num_covered += found.low_s <= 1.0 / NUM_TOKENS <= found.high_s
        num_off += found.is_off

    assert num_covered / num_trials > 0.95
    assert num_off / num_trials < 0.02


def test_with_few_audits_the_interval_is_wide_and_still_covers() -> None:
    rng, num_covered, num_trials = random.Random(2), 0, 400
    for _ in range(num_trials):
        differences = DecayingMean()
        for _ in range(MIN_ROUNDS):
            differences.add(rng.gauss(0.5, 0.2))
        _, low_s, high_s = find_interval(differences)
        num_covered += low_s <= 0.5 <= high_s

    assert num_covered / num_trials > 0.9


def test_too_few_requests_give_no_interval_and_switch_nothing_off() -> None:
    arm = ControlArm(random.Random(0))
    fill(arm, random.Random(0), loaded_s=100.0, computed_s=0.1, num=MIN_ROUNDS - 1)

    assert arm.draws_skip("fs", NUM_TOKENS) is None
    assert not [name for name in arm.stats() if name.startswith("audit.saved_s.")]


def serve_live(
    arm: ControlArm, rng: random.Random, num: int, loaded_s: float, *, audit_ratio: float = 0.02
) -> int:
    """Add requests as the arm divides them; return how many of them it had computed."""
    num_skipped = 0
    for _ in range(num):
        is_audited = rng.random() < audit_ratio
        is_skipped = not is_audited and bool(arm.draws_skip("fs", NUM_TOKENS))
        kind = Arm.AUDITED if is_audited else Arm.SKIPPED if is_skipped else Arm.LOADED
        time_s = (loaded_s if kind is Arm.LOADED else 1.0) * rng.lognormvariate(0, 0.3)
        arm.add("fs", NUM_TOKENS, time_s, kind)
        num_skipped += is_skipped
    return num_skipped


@pytest.mark.parametrize("slow_s", [1.7, 5.0, 50.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_place_that_slows_down_is_switched_off_within_200_requests_and_comes_back(
    seed: int, slow_s: float
) -> None:
    arm, rng = ControlArm(random.Random(seed)), random.Random(100 + seed)
    assert serve_live(arm, rng, 1000, loaded_s=0.1) == 0

    serve_live(arm, rng, 200, loaded_s=slow_s)
    assert serve_live(arm, rng, 100, loaded_s=slow_s) > 80

    serve_live(arm, rng, 400, loaded_s=0.1)
    assert serve_live(arm, rng, 100, loaded_s=0.1) == 0


def test_while_loading_is_suspected_a_small_share_is_computed() -> None:
    arm, rng = ControlArm(random.Random(9)), random.Random(9)
    serve_live(arm, rng, 500, loaded_s=0.5)
    for _ in range(30):
        arm.add("fs", NUM_TOKENS, 3.0, Arm.LOADED)

    share = fmean(bool(arm.draws_skip("fs", NUM_TOKENS)) for _ in range(10_000))
    assert share == pytest.approx(TRIAL_RATIO, rel=0.2)


def test_a_class_is_off_while_its_interval_lies_below_zero_and_the_others_are_not() -> None:
    arm, rng = ControlArm(random.Random(0)), random.Random(3)
    fill(arm, rng, loaded_s=5.0, computed_s=1.0, num=10)

    share = fmean(bool(arm.draws_skip("fs", NUM_TOKENS)) for _ in range(10_000))
    assert share == pytest.approx(1 - TRIAL_RATIO, abs=0.01)
    assert arm.draws_skip("fs", 20_000) is None
    assert arm.draws_skip("host", NUM_TOKENS) is None
    assert arm.stats()["audit.switched_off.256.fs"] == 1.0


def test_equal_kinds_are_not_told_apart_more_often_than_chance() -> None:
    rng, num_off = random.Random(4), 0
    for _ in range(400):
        arm = ControlArm(random.Random(0))
        fill(arm, rng, loaded_s=1.0, computed_s=1.0, num=30)
        num_off += arm.intervals()[0].is_off

    assert num_off / 400 < 0.05


def test_the_mean_of_equal_weights_follows_a_change() -> None:
    mean = DecayingMean()
    for _ in range(100):
        mean.add(1.0)
    for _ in range(64):
        mean.add(3.0)

    assert mean.mean == pytest.approx(3.0, abs=0.15)
    assert mean.num == 164


def test_equal_numbers_have_no_variance() -> None:
    differences = DecayingMean()
    for _ in range(5):
        differences.add(3.0)

    assert find_interval(differences) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 1023, 1024, 65_536, 10**6])
def test_a_hit_belongs_to_the_last_class_that_begins_at_or_below_it(num_tokens: int) -> None:
    assert bucket_of(num_tokens) == max(begin for begin in BUCKETS if begin <= num_tokens)
