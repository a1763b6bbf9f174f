"""Hints of clients: read when they make sense, warned of once when not, of use when right, nothing when absent."""

import logging

import numpy as np
import pytest

from kvtier.cpu.policies.hazard import HazardCachePolicy
from kvtier.cpu.policies.hazard.features import (
    FACTOR_LEVELS,
    HINT_FACTOR,
    NUM_OUTPUT_LEVELS,
    NUM_SHAPES,
    NUM_STOP_LEVELS,
    NUM_STRATA,
    HintReader,
    RequestFeatures,
    class_code,
    request_code,
    split_codes,
)
from kvtier.cpu.policies.hazard.forecaster import HazardForecaster
from kvtier.cpu.policies.hazard.model import HazardModel, ReuseIntervals
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.testing.policy_suite import key_of


def read(**hints: object) -> tuple[int, int]:
    """Return the levels of stop and length that are read."""
    return divmod(HintReader().read(hints), NUM_OUTPUT_LEVELS)


@pytest.mark.parametrize(
    ("hints", "levels"),
    [
        ({}, (0, 0)),
        ({"max_store_tokens": 9}, (0, 0)),
        ({"expected_stop": "tool_use"}, (1, 0)),
        ({"expected_stop": "end_turn", "expected_output_tokens": 0}, (2, 1)),
        ({"expected_output_tokens": 127}, (0, 1)),
        ({"expected_output_tokens": 128}, (0, 2)),
        ({"expected_output_tokens": 10**9}, (0, 4)),
        ({"expected_stop": None, "expected_output_tokens": None}, (0, 0)),
    ],
)
def test_hints_are_read_as_levels(hints: dict[str, object], levels: tuple[int, int]) -> None:
    assert read(**hints) == levels


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expected_stop", "stop"),
        ("expected_stop", ["tool_use"]),
        ("expected_stop", 1),
        ("expected_output_tokens", -1),
        ("expected_output_tokens", "100"),
        ("expected_output_tokens", 1.5),
        ("expected_output_tokens", True),
    ],
)
def test_what_makes_no_sense_is_ignored_and_said_once_for_each_name(
    name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    reader = HintReader()
    with caplog.at_level(logging.WARNING):
        assert [reader.read({name: value}) for _ in range(3)] == [0, 0, 0]
        reader.read({"expected_stop": {}, "expected_output_tokens": {}})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert name in said[0]


def test_each_hint_is_a_class_of_its_own_and_none_leaves_classes_as_they_were() -> None:
    shapes = set()
    for hint in range(NUM_STOP_LEVELS * NUM_OUTPUT_LEVELS):
        factors = RequestFeatures(2, 40, 7.0, 5, hint)
        code = class_code(3, 4, request_code(factors))
        shape, levels = split_codes(np.array([code]))
        plain_shape, plain = split_codes(np.array([class_code(3, 4, request_code(factors._replace(hint=0)))]))
        assert shape[0] == hint // NUM_OUTPUT_LEVELS * NUM_STRATA + plain_shape[0]
        assert [level[0] for level in levels[:HINT_FACTOR]] == [level[0] for level in plain[:HINT_FACTOR]]
        assert levels[HINT_FACTOR][0] == hint % NUM_OUTPUT_LEVELS
        shapes.add(int(shape[0]))
    assert len(shapes) == NUM_STOP_LEVELS
    assert max(shapes) < NUM_SHAPES
    assert len(FACTOR_LEVELS) == HINT_FACTOR + 1


def test_the_level_of_no_hint_scales_nothing() -> None:
    model = HazardModel()
    code = class_code(0, 1, request_code(RequestFeatures(0, 5, None, 5)))
    for age_s in np.random.default_rng(1).exponential(50.0, 2_000):
        model.record(code, float(age_s), 1, is_reuse=True)
    model.fit(ReuseIntervals([], [], [], []))
    assert model._multipliers[HINT_FACTOR][0] == 1.0


def teach(learner: HazardForecaster | HazardCachePolicy) -> None:
    """Let prompts that are said to end in a tool call come again after 5 s, and their like after 300 s."""
    for second in range(0, 1_500, 5):
        for offset, delay_s, stop in ((0, 5, "tool_use"), (1, 300, "end_turn")):
            for born in (each for each in (second, second - delay_s) if each >= 0):
                keys = [key_of(100 * born + 10 * offset + number) for number in range(4)]
                hints = {"expected_stop": stop}
                learner.note_request(ArrivedRequest("r", (keys,), float(second), hints))


def likely_soon(forecaster: HazardForecaster, stop: str) -> float:
    """Return how likely a new prompt with this hint comes again within 20 s."""
    keys = [key_of(10**7 + number) for number in range(4)]
    forecaster.note_request(ArrivedRequest("r", (keys,), 1_500.0, {"expected_stop": stop}))
    (found,) = forecaster.reuse_probabilities(keys[:1], 20.0)
    assert found is not None
    return found


def test_what_is_said_to_end_in_a_tool_call_is_expected_sooner() -> None:
    tool, chat = HazardForecaster(10_000), HazardForecaster(10_000)
    teach(tool)
    teach(chat)
    assert likely_soon(tool, "tool_use") > 2 * likely_soon(chat, "end_turn")


def test_hints_reach_the_policy_of_host_memory_too() -> None:
    policy = HazardCachePolicy(2_000)
    teach(policy)
    keys = [key_of(number) for number in range(10**7, 10**7 + 8)]
    policy.note_request(ArrivedRequest("a", (keys[:4],), 1_500.0, {"expected_stop": "tool_use"}))
    policy.note_request(ArrivedRequest("b", (keys[4:],), 1_500.0, {"expected_stop": "end_turn"}))
    soon, late = policy.reuse_probabilities([keys[0], keys[4]], 20.0)
    assert soon is not None
    assert late is not None
    assert soon > 2 * late
