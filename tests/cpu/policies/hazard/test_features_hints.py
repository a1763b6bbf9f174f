"""Hints of clients as levels of a class: each of its own, nothing changed without one, of use when right."""

import numpy as np
import pytest

from kvtier.cpu.policies.hazard import HazardCachePolicy
from kvtier.cpu.policies.hazard.features import (
    CONTINUES_LEVEL,
    ENDED_LEVEL,
    FACTOR_LEVELS,
    FIRST_HINT_FACTOR,
    FIRST_RETURN_LEVEL,
    NUM_HINT_LEVELS,
    NUM_HINTS,
    NUM_OUTPUT_LEVELS,
    NUM_SHAPES,
    NUM_STRATA,
    PRIORITY_LEVELS,
    RequestFeatures,
    class_code,
    hint_code,
    request_code,
    split_codes,
)
from kvtier.cpu.policies.hazard.forecaster import HazardForecaster
from kvtier.cpu.policies.hazard.model import HazardModel, ReuseIntervals
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.hints.values import RequestHints
from kvtier.testing.policy_suite import key_of

TOOL, READER = RequestHints(expected_stop="tool_use"), RequestHints(expected_stop="end_turn")
SOON, LATE = RequestHints(returns_in_s=5), RequestHints(returns_in_s=300)
GOES_ON, ENDS = RequestHints(continues=True), RequestHints(continues=False)
DEAR, CHEAP = RequestHints(priority=1), RequestHints(priority=-1)


def levels_of(hints: RequestHints) -> tuple[int, int, int]:
    """Return the levels of what is said of the end or the return, of the length, and of the priority."""
    code, priority = divmod(hint_code(hints), len(PRIORITY_LEVELS))
    said, output = divmod(code, NUM_OUTPUT_LEVELS)
    return said, output, priority


@pytest.mark.parametrize(
    ("hints", "levels"),
    [
        (RequestHints(), (0, 0, 0)),
        (RequestHints(session="a", tenant="b", pin_s=9), (0, 0, 0)),
        (TOOL, (1, 0, 0)),
        (RequestHints(expected_stop="end_turn", expected_output_tokens=0), (2, 1, 0)),
        (RequestHints(expected_output_tokens=127), (0, 1, 0)),
        (RequestHints(expected_output_tokens=128), (0, 2, 0)),
        (RequestHints(expected_output_tokens=10**9), (0, 4, 0)),
        (ENDS, (ENDED_LEVEL, 0, 0)),
        (GOES_ON, (CONTINUES_LEVEL, 0, 0)),
        (RequestHints(returns_in_s=0), (FIRST_RETURN_LEVEL, 0, 0)),
        (RequestHints(continues=True, returns_in_s=30), (FIRST_RETURN_LEVEL + 2, 0, 0)),
        (RequestHints(returns_in_s=1e6), (NUM_HINT_LEVELS - 1, 0, 0)),
        (RequestHints(continues=False, expected_stop="tool_use"), (ENDED_LEVEL, 0, 0)),
        (CHEAP, (0, 0, 1)),
        (DEAR, (0, 0, 2)),
    ],
)
def test_hints_are_levels(hints: RequestHints, levels: tuple[int, int, int]) -> None:
    assert levels_of(hints) == levels


def test_each_hint_is_a_class_of_its_own_and_none_leaves_classes_as_they_were() -> None:
    plain_shape, plain = split_codes(
        np.array([class_code(3, 4, request_code(RequestFeatures(2, 40, 7.0, 5)))])
    )
    found = set()
    for hint in range(NUM_HINTS):
        shape, levels = split_codes(
            np.array([class_code(3, 4, request_code(RequestFeatures(2, 40, 7.0, 5, hint)))])
        )
        assert shape[0] % NUM_STRATA == plain_shape[0]
        assert [level[0] for level in levels[:FIRST_HINT_FACTOR]] == [
            level[0] for level in plain[:FIRST_HINT_FACTOR]
        ]
        found.add((int(shape[0]), *(int(level[0]) for level in levels[FIRST_HINT_FACTOR:])))
    assert len(found) == NUM_HINTS
    assert max(shape for shape, *_ in found) < NUM_SHAPES
    assert len(FACTOR_LEVELS) == FIRST_HINT_FACTOR + 2


def test_the_level_of_no_hint_scales_nothing() -> None:
    model = HazardModel()
    code = class_code(0, 1, request_code(RequestFeatures(0, 5, None, 5)))
    for age_s in np.random.default_rng(1).exponential(50.0, 2_000):
        model.record(code, float(age_s), 1, is_reuse=True)
    model.fit(ReuseIntervals([], [], [], []))
    assert [multipliers[0] for multipliers in model._multipliers[FIRST_HINT_FACTOR:]] == [1.0, 1.0]


def arrived(first: int, at_s: float, hints: RequestHints, num: int = 4) -> ArrivedRequest:
    return ArrivedRequest("r", ([key_of(first + number) for number in range(num)],), at_s, hints)


def teach(learner: HazardForecaster | HazardCachePolicy, soon: RequestHints, late: RequestHints) -> None:
    """Let prompts with the hint ``soon`` come again after 5 s, and those with ``late`` after 300 s."""
    for second in range(0, 1_500, 5):
        for offset, delay_s, hints in ((0, 5, soon), (1, 300, late)):
            for born in (each for each in (second, second - delay_s) if each >= 0):
                learner.note_request(arrived(100 * born + 10 * offset, second, hints))


@pytest.mark.parametrize(
    ("soon", "late"), [(TOOL, READER), (SOON, LATE), (SOON, READER), (GOES_ON, ENDS), (DEAR, CHEAP)]
)
def test_what_is_said_to_return_soon_is_expected_sooner(soon: RequestHints, late: RequestHints) -> None:
    policy = HazardCachePolicy(2_000)
    forecaster = HazardForecaster(10_000)
    for learner in (policy, forecaster):
        teach(learner, soon, late)
        learner.note_request(arrived(10**7, 1_500.0, soon))
        learner.note_request(arrived(10**7 + 4, 1_500.0, late))
        likely, unlikely = learner.reuse_probabilities([key_of(10**7), key_of(10**7 + 4)], 20.0)
        assert likely is not None
        assert unlikely is not None
        assert likely > 2 * unlikely


def test_a_hint_is_worth_what_was_learned_and_not_what_it_says() -> None:
    forecaster = HazardForecaster(10_000)
    teach(forecaster, soon=ENDS, late=GOES_ON)
    forecaster.note_request(arrived(10**7, 1_500.0, ENDS))
    forecaster.note_request(arrived(10**7 + 4, 1_500.0, GOES_ON))
    said_to_end, said_to_go_on = forecaster.reuse_probabilities([key_of(10**7), key_of(10**7 + 4)], 20.0)
    assert said_to_end is not None
    assert said_to_go_on is not None
    assert said_to_end > 2 * said_to_go_on


def test_the_hints_of_a_tenant_that_lies_are_as_none() -> None:
    forecaster = HazardForecaster(10_000)
    for number in range(40):
        at_s = 10.0 * number
        said = RequestHints(session=f"s{number // 2}", tenant="liar", continues=False)
        forecaster.note_request(arrived(10 * (number // 2), at_s, said))
    lie = RequestHints(session="new", tenant="liar", returns_in_s=30)
    forecaster.note_request(arrived(10**7, 500.0, lie))
    forecaster.note_request(arrived(10**7 + 4, 500.0, RequestHints()))
    assert forecaster._shadow.tree.nodes[key_of(10**7)].cohort.code == (
        forecaster._shadow.tree.nodes[key_of(10**7 + 4)].cohort.code
    )
