"""A median of ratios is known when its interval is narrow, in every operation and against everybody."""

import numpy as np
import pytest

from benchmarks.harness.measurement import FLOOR, OURS
from benchmarks.harness.precision import MAX_WIDTH, is_known, width_of

STEADY = (100.0,) * 8
NOISY = (100.0, 60.0, 140.0, 80.0, 120.0, 100.0, 70.0, 130.0)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({}, True),
        ({"put": {OURS: STEADY}}, True),
        ({"put": {OURS: NOISY}}, True),
        ({"put": {FLOOR: STEADY, "sealed": NOISY}}, True),
        ({"put": {OURS: STEADY, FLOOR: STEADY}}, True),
        ({"put": {OURS: NOISY, FLOOR: NOISY}}, True),
        ({"put": {OURS: NOISY, FLOOR: STEADY}}, False),
        ({"put": {OURS: STEADY, FLOOR: NOISY}}, False),
        ({"put": {OURS: STEADY, FLOOR: STEADY, "peer": NOISY}}, False),
        ({"put": {OURS: STEADY, FLOOR: STEADY}, "get": {OURS: STEADY, FLOOR: NOISY}}, False),
    ],
)
def test_each_ratio_of_ours_must_be_known(
    measured: dict[str, dict[str, tuple[float, ...]]], expected: bool
) -> None:
    assert is_known(measured) is expected


def test_equal_values_span_nothing() -> None:
    assert width_of(STEADY, STEADY) == 0.0


@pytest.mark.slow
def test_two_known_medians_of_one_machine_are_rarely_further_apart_than_two_runs_may_be() -> None:
    draw = np.random.default_rng(0)

    def known_median() -> float:
        ratios = [*draw.normal(1.0, 0.2, 12)]
        while width_of(ratios, [1.0] * len(ratios)) > MAX_WIDTH:
            ratios.extend(draw.normal(1.0, 0.2, 12))
        return float(np.median(ratios))

    medians = [known_median() for _ in range(40)]
    pairs = list(zip(medians[::2], medians[1::2], strict=True))

    assert max(max(pair) / min(pair) for pair in pairs) < 1.15
