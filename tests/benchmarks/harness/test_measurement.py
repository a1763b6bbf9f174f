"""Ratios are taken round by round and are larger when ours is better; a bar says what it was held against."""

import pytest

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement, Spread, spread_of


def measured(
    ours: tuple[float, ...],
    floor: tuple[float, ...] | None = None,
    *,
    better: Better = Better.HIGHER,
    bar: Bar | None = None,
) -> Measurement:
    """Return a line of ours, and of a floor where there is one."""
    values = {OURS: ours} | ({} if floor is None else {FLOOR: floor})
    return Measurement({"operation": "put"}, "s", better, values, bar)


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_the_medians() -> None:
    measurement = measured((1.0, 10.0, 100.0), (2.0, 10.0, 50.0))

    assert measurement.ratio(FLOOR) == Spread(median=1.0, low=0.75, high=1.5)
    assert measured((1.0, 10.0, 100.0), (100.0, 1.0, 10.0)).ratio(FLOOR) == Spread(10.0, 5.005, 10.0)


def test_twice_as_fast_is_two_whether_rates_or_times_were_measured() -> None:
    rates = measured((4.0,), (2.0,), better=Better.HIGHER).ratio(FLOOR)
    times = measured((2.0,), (4.0,), better=Better.LOWER).ratio(FLOOR)

    assert rates == times == Spread(2.0, 2.0, 2.0)


def test_quartiles_lie_within_the_values_and_around_the_median() -> None:
    assert spread_of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(median=3.0, low=2.0, high=4.0)
    assert spread_of([1.0, 2.0]) == Spread(median=1.5, low=1.25, high=1.75)
    assert spread_of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_rounds_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        measured((1.0, 2.0), (1.0,)).ratio(FLOOR)


def test_who_did_not_take_part_has_neither_median_nor_ratio() -> None:
    measurement = measured((1.0,))

    assert measurement.median(FLOOR) is None
    assert measurement.ratio(FLOOR) is None
    assert measurement.peers == ()


def test_peers_are_neither_ours_nor_the_floor() -> None:
    values = {FLOOR: (1.0,), "vllm": (1.0,), OURS: (1.0,), "sealed floor": (1.0,)}

    assert Measurement({}, "s", Better.LOWER, values).peers == ("vllm", "sealed floor")


@pytest.mark.parametrize(
    ("ours", "better", "is_met"),
    [
        (0.9, Better.LOWER, True),
        (1.0, Better.LOWER, True),
        (1.1, Better.LOWER, False),
        (0.9, Better.HIGHER, False),
        (1.0, Better.HIGHER, True),
        (1.1, Better.HIGHER, True),
    ],
)
def test_a_bar_on_our_value_is_reached_from_the_better_side(
    ours: float, better: Better, is_met: bool
) -> None:
    assert measured((ours,), better=better, bar=Bar(None, 1.0)).is_met is is_met


@pytest.mark.parametrize("better", list(Better))
def test_a_bar_against_somebody_counts_the_ratio(better: Better) -> None:
    def meets(bar: float) -> bool | None:
        return measured((2.0, 2.0), (2.0, 2.0), better=better, bar=Bar(FLOOR, bar)).is_met

    assert (meets(0.99), meets(1.0), meets(1.01)) == (True, True, False)


def test_a_bar_counts_the_median_round_not_the_best() -> None:
    assert measured((9.0, 1.0, 1.0), (2.0, 2.0, 2.0), bar=Bar(FLOOR, 1.0)).is_met is False
    assert measured((9.0, 1.0, 1.0), bar=Bar(None, 2.0)).is_met is False


def test_nobody_is_held_to_a_bar_that_could_not_be_measured() -> None:
    assert measured((1.0,)).is_met is None
    assert measured((1.0,), bar=Bar("vllm", 5.0)).is_met is None
