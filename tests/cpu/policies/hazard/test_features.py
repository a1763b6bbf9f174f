"""The class of a block says what was known of it, and can be taken apart again."""

import numpy as np
import pytest

from kvtier.cpu.policies.hazard.features import (
    FACTOR_LEVELS,
    NUM_SHAPES,
    RequestFeatures,
    class_code,
    request_code,
    split_codes,
)


@pytest.mark.parametrize(
    ("num_children", "num_seen", "factors", "levels"),
    [
        (0, 1, RequestFeatures(0, 1, None, 1), [0, 0, 0, 0, 0, 0]),
        (1, 2, RequestFeatures(1, 4, 0.0, 2), [1, 1, 1, 1, 1, 1]),
        (2, 5, RequestFeatures(4, 31, 59.0, 10), [1, 3, 3, 2, 4, 2]),
        (3, 9, RequestFeatures(5, 32, 60.0, 11), [2, 4, 4, 3, 5, 3]),
        (99, 10, RequestFeatures(99, 96, 1e6, 31), [2, 5, 4, 4, 6, 4]),
        (99, 11, RequestFeatures(99, 999, 1e9, 99), [2, 5, 4, 4, 6, 4]),
    ],
)
def test_a_class_is_made_of_its_levels(
    num_children: int, num_seen: int, factors: RequestFeatures, levels: list[int]
) -> None:
    code = class_code(num_children, num_seen, request_code(factors))

    stratum, found = split_codes(np.array([code]))

    assert [stratum[0], *(level[0] for level in found)] == [*levels, 0, 0]


@pytest.mark.slow
def test_classes_are_as_many_as_combinations_of_levels() -> None:
    codes = np.arange(NUM_SHAPES * int(np.prod(FACTOR_LEVELS)))

    stratum, levels = split_codes(codes)

    assert len(set(zip(stratum, *levels, strict=True))) == len(codes)
    assert [int(level.max()) + 1 for level in levels] == list(FACTOR_LEVELS)
