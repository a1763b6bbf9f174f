"""The hazard model: a fit recovers planted hazards, the index looks ahead."""

import numpy as np
import pytest

from kvtier.cpu.policies.hazard.features import RequestFeatures, class_code, request_code
from kvtier.cpu.policies.hazard.model import (
    CLASSES_AT_ONCE,
    EDGES_S,
    FEW_CLASSES,
    NUM_BINS,
    STARTS_S,
    WIDTHS_S,
    Floats,
    HazardModel,
    ReuseIntervals,
    ReuseIntervalTable,
    gittins_indices,
)

NOBODY = ReuseIntervals([], [], [], [])


def code_of(*, turn: int = 0, num_children: int = 0) -> int:
    return class_code(num_children, 1, request_code(RequestFeatures(turn, 5, None, 5)))


def flat_hazard(hazard: float = 1e-4) -> Floats:
    return np.full((1, NUM_BINS), hazard)


def plant(model: HazardModel, code: int, hazard: float, num: int, seed: int) -> None:
    """Record waits that end at a constant rate, or unended after 100 s."""
    for age_s in np.random.default_rng(seed).exponential(1 / hazard, num):
        model.record(code, min(float(age_s), 100.0), 1, is_reuse=bool(age_s < 100.0))


def bins_between(first_s: float, last_s: float) -> list[int]:
    return [number for number in range(NUM_BINS) if STARTS_S[number] >= first_s and STARTS_S[number] < last_s]


def test_a_fit_recovers_planted_hazards() -> None:
    model = HazardModel()
    plant(model, code_of(turn=0), 0.01, 6_000, seed=1)
    plant(model, code_of(turn=1), 0.03, 6_000, seed=2)

    model.fit(NOBODY)

    rare, often = model.hazards([code_of(turn=0), code_of(turn=1)])
    bins = bins_between(5.0, 60.0)
    assert np.average(rare[bins], weights=WIDTHS_S[bins]) == pytest.approx(0.01, rel=0.1)
    assert np.average(often[bins], weights=WIDTHS_S[bins]) == pytest.approx(0.03, rel=0.1)


def test_a_level_seen_seldom_stays_near_the_others() -> None:
    model = HazardModel()
    plant(model, code_of(turn=0), 0.01, 6_000, seed=1)
    model.record(code_of(turn=1), 1.0, 1, is_reuse=True)

    model.fit(NOBODY)

    usual, seldom = model.hazards([code_of(turn=0), code_of(turn=1)])
    assert seldom[10] / usual[10] == pytest.approx(1.0, rel=0.1)


def test_blocks_that_still_wait_lower_the_hazard() -> None:
    code = code_of()
    impatient, patient = HazardModel(), HazardModel()
    for model in (impatient, patient):
        for _ in range(20):
            model.record(code, 10.0, 1, is_reuse=True)
    impatient.fit(NOBODY)
    patient.fit(ReuseIntervals([code], [20.0], [180], [0]))

    number = int(np.searchsorted(EDGES_S, 10.0, side="right"))

    assert patient.hazards([code])[0][number] < 0.2 * impatient.hazards([code])[0][number]


def test_exposure_is_the_time_spent_in_each_bin() -> None:
    table = ReuseIntervalTable()

    table.add(ReuseIntervals([code_of(), code_of(turn=1)], [0.5, 3.0], [2, 1], [2, 0]))

    assert table.exposure_s[0].sum() == pytest.approx(1.0)
    assert table.exposure_s[1].sum() == pytest.approx(3.0)
    assert table.exposure_s[1][:2] == pytest.approx(WIDTHS_S[:2])
    assert table.reused[0][0] == 2
    assert table.reused.sum() == 2


def test_each_class_has_a_row_however_many_there_are() -> None:
    table = ReuseIntervalTable()

    assert [table.row_of(code) for code in range(200)] == list(range(200))
    assert len(table.reused) >= 200


def test_the_index_of_a_constant_hazard_is_that_hazard() -> None:
    assert gittins_indices(flat_hazard(0.02))[0] == pytest.approx(np.full(NUM_BINS, 0.02), rel=1e-3)


def test_the_index_prefers_a_hump_ahead_to_a_higher_hazard_now() -> None:
    falling, humped = flat_hazard(), flat_hazard()
    falling[0, bins_between(5.0, 10.0)] = 0.002
    humped[0, bins_between(30.0, 300.0)] = 0.02

    now = bins_between(5.0, 10.0)[0]

    assert falling[0, now] > humped[0, now]
    assert gittins_indices(humped)[0, now] > 2 * gittins_indices(falling)[0, now]
    assert gittins_indices(humped)[0, bins_between(1_000.0, 2_000.0)[0]] < 0.001


def test_the_index_never_falls_below_the_hazard_of_the_bin() -> None:
    hazards = np.random.default_rng(3).exponential(0.01, (50, NUM_BINS))

    assert (gittins_indices(hazards) >= hazards * (1 - 1e-6)).all()


def test_the_indices_of_many_classes_are_those_of_each_alone_to_the_last_bit() -> None:
    hazards = np.random.default_rng(4).exponential(0.01, (2 * FEW_CLASSES, NUM_BINS))
    hazards[0] = 60.0  # nobody survives the first bins, and later differences of survivals are nothing

    together = gittins_indices(hazards)

    assert np.array_equal(together, np.concatenate([gittins_indices(row[None]) for row in hazards]))


def test_a_fit_makes_a_row_of_each_class_however_many_there_are() -> None:
    model = HazardModel()
    codes = list(range(CLASSES_AT_ONCE + 3))
    model.fit(ReuseIntervals(codes, [1.0] * len(codes), [1] * len(codes), [0] * len(codes)))

    assert list(model.indices) == codes
    assert model.indices[codes[-1]] == gittins_indices(model.hazards(codes[-1:]))[0].tolist()


def test_before_the_first_fit_the_older_of_two_blocks_has_the_lower_index() -> None:
    row = HazardModel().indices[code_of()]

    assert row == sorted(row, reverse=True)


def test_a_fit_changes_the_rows_that_were_handed_out() -> None:
    model = HazardModel()
    indices = model.indices
    before = indices[code_of()]
    plant(model, code_of(), 0.5, 500, seed=4)

    model.fit(ReuseIntervals([code_of(turn=1)], [1.0], [1], [0]))

    assert indices[code_of()] != before


def test_returns_at_the_very_start_of_a_bin_make_no_boundless_hazard() -> None:
    model = HazardModel()
    for _ in range(100):
        model.record(code_of(), 1.0, 1, is_reuse=True)
        model.fit(NOBODY)

    assert model.hazards([code_of()]).max() < 20.0


@pytest.mark.parametrize(
    ("age_s", "horizon_s"), [(0.0, 10.0), (0.5, 0.2), (7.0, 60.0), (33.3, 60_000.0), (1e6, 5.0)]
)
def test_the_probability_of_reuse_is_that_of_the_hazard_between_two_ages(
    age_s: float, horizon_s: float
) -> None:
    model = HazardModel()
    plant(model, code_of(), 0.02, 2_000, seed=1)
    model.fit(NOBODY)
    hazards = model.hazards([code_of()])[0]
    ages = np.linspace(age_s, age_s + horizon_s, 200_001)
    bins = np.searchsorted(np.array(EDGES_S), (ages[1:] + ages[:-1]) / 2, side="right")
    expected = 1 - np.exp(-np.sum(hazards[bins] * np.diff(ages)))

    assert model.reuse_probability(code_of(), age_s, horizon_s) == pytest.approx(expected, rel=1e-3)


def test_a_planted_constant_hazard_gives_the_exponential_law() -> None:
    model = HazardModel()
    plant(model, code_of(), 0.02, 6_000, seed=3)
    model.fit(NOBODY)
    for age_s in (0.0, 20.0):
        found = model.reuse_probability(code_of(), age_s, 50.0)
        assert found == pytest.approx(1 - np.exp(-0.02 * 50), abs=0.04)


def test_the_probability_of_reuse_follows_a_new_fit() -> None:
    model = HazardModel()
    before = model.reuse_probability(code_of(), 10.0, 50.0)
    plant(model, code_of(), 1e-4, 6_000, seed=3)
    model.fit(NOBODY)
    assert model.reuse_probability(code_of(), 10.0, 50.0) < before / 2
