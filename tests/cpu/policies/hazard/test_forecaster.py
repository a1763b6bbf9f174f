"""The learner without a cache: what it expects follows from what it saw, in bounded memory, until it is cleared."""

from collections.abc import Callable

import pytest

from kvtier.base import OffloadKey
from kvtier.cpu.policies.hazard import HazardCachePolicy
from kvtier.cpu.policies.hazard.forecaster import HazardForecaster
from kvtier.cpu.policies.learning import ArrivedRequest, ReuseForecast, ReuseForecaster
from kvtier.testing.policy_suite import key_of

PERIOD_S = 50.0
"""After this time the chats of these tests go on."""


MakeLearner = Callable[[], HazardForecaster | HazardCachePolicy]


def keys_of(*numbers: int) -> list[OffloadKey]:
    return [key_of(number) for number in numbers]


def arrived(number: float, *numbers: int, req_id: str = "r") -> ArrivedRequest:
    return ArrivedRequest(req_id, (keys_of(*numbers),), number)


def teach(learner: ReuseForecaster | HazardCachePolicy, until_s: int = 2_000, first_s: int = 0) -> None:
    """Let short prompts come again after PERIOD_S, once, and long ones never."""
    for second in range(first_s, until_s, 2):
        learner.note_request(arrived(second, 100 * second, 100 * second + 1))
        if second >= PERIOD_S:
            chat = 100 * (second - int(PERIOD_S))
            learner.note_request(arrived(second, chat, chat + 1, chat + 2))
        learner.note_request(arrived(second + 1, *range(100 * second + 10, 100 * second + 50)))


def expected(forecast: ReuseForecast, *numbers: int, horizon_s: float = 1_000.0) -> list[float]:
    found = forecast.reuse_probabilities(keys_of(*numbers), horizon_s)
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("make", [lambda: HazardForecaster(10_000), lambda: HazardCachePolicy(2_500)])
def test_what_comes_back_is_expected_and_what_does_not_is_not(make: MakeLearner) -> None:
    forecaster = make()
    teach(forecaster)
    chat, scan = 100 * 1_998, 100 * 1_998 + 10
    likely, unlikely = expected(forecaster, chat, scan)
    assert likely > 0.6
    assert unlikely < 0.1


def test_it_is_expected_within_the_time_that_it_takes_and_not_sooner() -> None:
    forecaster = HazardForecaster(10_000)
    teach(forecaster)
    (soon,) = expected(forecaster, 100 * 1_998, horizon_s=20.0)
    (late,) = expected(forecaster, 100 * 1_998, horizon_s=100.0)
    assert soon < 0.2
    assert late > 0.6


def test_before_the_first_fit_and_of_unknown_blocks_nothing_is_told() -> None:
    forecaster = HazardForecaster(10_000)
    teach(forecaster, until_s=10)
    assert forecaster.reuse_probabilities(keys_of(0, 1), 1_000.0) == [None, None]
    teach(forecaster, first_s=10)
    assert forecaster.reuse_probabilities(keys_of(10**7), 1_000.0) == [None]


def test_it_remembers_no_more_blocks_than_it_may() -> None:
    forecaster = HazardForecaster(100)
    teach(forecaster, until_s=400)
    assert len(forecaster) <= 100


def test_a_clear_forgets_blocks_and_what_was_learned() -> None:
    forecaster = HazardForecaster(10_000)
    teach(forecaster)
    forecaster.clear()
    assert len(forecaster) == 0
    teach(forecaster, until_s=10)
    assert forecaster.reuse_probabilities(keys_of(0), 1_000.0) == [None]


def test_the_blocks_of_an_answer_are_known_once_they_are_stored() -> None:
    forecaster = HazardForecaster(10_000)
    teach(forecaster)
    forecaster.note_request(arrived(2_000.0, 1, 2, 3, req_id="chat"))
    assert forecaster.reuse_probabilities(keys_of(4), 1_000.0) == [None]

    forecaster.on_stored(keys_of(1, 2, 3, 4, 5), "chat")

    assert expected(forecaster, 4) == expected(forecaster, 3)
    assert 0 < expected(forecaster, 5)[0] < 1


def test_after_its_end_a_request_adds_nothing() -> None:
    forecaster = HazardForecaster(10_000)
    teach(forecaster)
    forecaster.note_request(arrived(2_000.0, 1, 2, 3, req_id="chat"))
    forecaster.on_finished("chat")
    forecaster.on_stored(keys_of(4), "chat")
    assert forecaster.reuse_probabilities(keys_of(4), 1_000.0) == [None]
