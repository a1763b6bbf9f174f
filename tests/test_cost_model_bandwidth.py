"""A link's rate is learned from a few loads, believed soon, and not shaken by one that stuttered."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cost_model import MAX_LOAD_SAMPLES, BandwidthEstimator, LinkRate

SIZES = (10, 40, 20, 80, 160, 15, 30)


def feed(estimator: BandwidthEstimator, link: LinkRate, num_loads: int = len(SIZES)) -> None:
    """Let the estimator see loads of several sizes over a link."""
    for number in range(num_loads):
        size = SIZES[number % len(SIZES)]
        estimator.observe(size, link.time_s(size))


def known(estimator: BandwidthEstimator) -> LinkRate:
    """Return the rate, which must be known."""
    rate = estimator.rate()
    assert rate is not None
    return rate


def test_before_the_first_load_nothing_is_known() -> None:
    assert BandwidthEstimator().rate() is None


def test_one_load_is_taken_for_bytes_without_latency() -> None:
    estimator = BandwidthEstimator()

    estimator.observe(100, 2.0)

    assert known(estimator) == LinkRate(50.0)


def test_loads_of_several_sizes_tell_latency_from_rate() -> None:
    estimator = BandwidthEstimator()

    feed(estimator, LinkRate(20.0, 3.0))

    assert known(estimator).bytes_per_s == pytest.approx(20.0)
    assert known(estimator).latency_s == pytest.approx(3.0)


def test_loads_of_one_size_foretell_loads_of_that_size() -> None:
    estimator = BandwidthEstimator()
    for _ in range(5):
        estimator.observe(100, 7.0)

    assert known(estimator).time_s(100) == pytest.approx(7.0)


def test_larger_loads_that_were_no_slower_make_no_negative_rate() -> None:
    estimator = BandwidthEstimator()
    estimator.observe(10, 1.0)
    estimator.observe(20, 0.9)

    assert known(estimator).bytes_per_s > 0


def test_one_load_that_stuttered_changes_little() -> None:
    estimator = BandwidthEstimator()
    feed(estimator, LinkRate(20.0))

    estimator.observe(20, 100.0)

    assert known(estimator).time_s(100) == pytest.approx(5.0, rel=0.2)


def test_two_slow_loads_in_a_row_are_believed() -> None:
    estimator = BandwidthEstimator()
    feed(estimator, LinkRate(20.0))

    estimator.observe(20, 100.0)
    estimator.observe(40, 200.0)

    assert known(estimator).time_s(20) == pytest.approx(100.0)


def test_two_stutters_with_a_good_load_between_are_not() -> None:
    estimator = BandwidthEstimator()
    feed(estimator, LinkRate(20.0))

    for size, time_s in ((20, 100.0), (20, 1.0), (20, 100.0)):
        estimator.observe(size, time_s)

    assert known(estimator).time_s(100) < 10.0


def test_one_load_twice_as_fast_is_believed_at_once() -> None:
    estimator = BandwidthEstimator()
    feed(estimator, LinkRate(1.0))

    estimator.observe(20, 1.0)

    assert known(estimator) == LinkRate(20.0)


@pytest.mark.parametrize(("num_bytes", "time_s"), [(0, 1.0), (1, 0.0), (1, -1.0), (0, 0.0)])
def test_a_load_without_bytes_or_time_says_nothing(num_bytes: int, time_s: float) -> None:
    estimator = BandwidthEstimator()

    estimator.observe(num_bytes, time_s)

    assert estimator.rate() is None


def test_what_is_remembered_is_bounded() -> None:
    estimator = BandwidthEstimator()

    feed(estimator, LinkRate(5.0, 1.0), num_loads=100)

    assert len(estimator) == MAX_LOAD_SAMPLES


@given(st.floats(1e-3, 1e9), st.floats(0, 10), st.integers(0, 99))
def test_a_link_with_noise_of_a_tenth_is_foretold_within_a_half(
    bytes_per_s: float, latency_s: float, seed: int
) -> None:
    link, estimator, rng = LinkRate(bytes_per_s, latency_s), BandwidthEstimator(), random.Random(seed)
    for number in range(20):
        size = SIZES[number % len(SIZES)]
        estimator.observe(size, link.time_s(size) * rng.uniform(0.9, 1.1))

    assert known(estimator).time_s(50) == pytest.approx(link.time_s(50), rel=0.5)
