"""Tokens are chosen from the logits and the request's own random numbers alone."""

import resource
from typing import Any

import pytest
import torch

from kvtier.engines.transformers.sampling import Sampler, SamplingParams
from kvtier.errors import ConfigError

LOGITS = torch.tensor([0.0, 3.0, 1.0])


def test_temperature_zero_takes_the_most_likely() -> None:
    assert Sampler(SamplingParams(1)).choose(LOGITS) == 1


def test_equal_seeds_draw_equal_tokens_whatever_else_draws() -> None:
    one, other = (Sampler(SamplingParams(1, temperature=2.0, seed=3)) for _ in range(2))
    first = [one.choose(LOGITS) for _ in range(50)]
    torch.rand(10)
    assert [other.choose(LOGITS) for _ in range(50)] == first
    assert set(first) == {0, 1, 2}


def test_a_request_ends_at_its_length_or_its_end_token() -> None:
    params = SamplingParams(3, eos_token_ids=frozenset({7}))
    assert [params.is_last(5, 2), params.is_last(5, 3), params.is_last(7, 1)] == [False, True, True]


@pytest.mark.parametrize("arguments", [{"max_new_tokens": 0}, {"max_new_tokens": 1, "temperature": -1.0}])
def test_impossible_parameters_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SamplingParams(**arguments)  # type: ignore[arg-type]  # bad values are the point


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_new_tokens", 2.5),
        ("max_new_tokens", "3"),
        ("max_new_tokens", float("nan")),
        ("temperature", float("nan")),
        ("temperature", 1e-42),
        ("temperature", "warm"),
        ("seed", 1.5),
        ("seed", -1),
        ("seed", 2**70),
        ("eos_token_ids", frozenset({"end"})),
    ],
)
def test_what_is_no_such_number_is_refused_by_name(setting: str, value: object) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 1} | {setting: value}
    with pytest.raises(ConfigError, match=setting.removesuffix("s")):
        SamplingParams(**arguments)


def test_the_most_likely_token_needs_no_random_number_of_a_system_without_a_descriptor_left() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert Sampler(SamplingParams(1)).choose(LOGITS) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
