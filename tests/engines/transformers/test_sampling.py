"""Tokens are chosen from the logits and the request's own random numbers alone."""

import resource
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TopPLogitsWarper

from kvtier.engines.transformers.sampling import ParamsReader, Sampler, SamplingParams
from kvtier.errors import ConfigError, UnknownNameError

LOGITS = torch.tensor([0.0, 3.0, 1.0])
VOCABULARY = 10

GREEDY = SamplingParams(4)
NOTHING: dict[str, object] = {}


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
        ("temperature", True),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_p", True),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("max_new_tokens", True),
        ("seed", False),
    ],
)
def test_what_is_no_such_number_is_refused_by_name(setting: str, value: object) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 1} | {setting: value}
    with pytest.raises(ConfigError, match=setting):
        SamplingParams(**arguments)


def test_the_most_likely_token_needs_no_random_number_of_a_system_without_a_descriptor_left() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert Sampler(SamplingParams(1)).choose(LOGITS) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", range(5))
def test_top_p_keeps_the_fewest_tokens_that_reach_it_as_transformers_does(top_p: float, seed: int) -> None:
    logits = 3 * torch.randn(200, generator=torch.Generator().manual_seed(seed))
    kept = Sampler(SamplingParams(1, temperature=0.7, top_p=top_p)).filter(logits).isfinite()
    warper: Any = TopPLogitsWarper(top_p)  # Any: transformers' class is not annotated
    assert torch.equal(kept, warper(None, (logits / 0.7)[None])[0].isfinite())
    likeliest_first = torch.softmax(logits / 0.7, -1).sort(descending=True).values
    num_needed = int((likeliest_first.cumsum(-1) < top_p - 1e-6).sum()) + 1
    assert int(kept.sum()) == min(num_needed, 200)


@pytest.mark.parametrize(
    ("arguments", "drawn"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 9}, {0, 1, 2}),
        ({"top_p": 0.1}, {1}),
        ({"top_p": 0.99}, {1, 2, 0}),
        ({"top_k": 2, "top_p": 0.5}, {1}),
    ],
)
def test_draws_are_among_the_kept_tokens_and_equal_seeds_draw_equal_ones(
    arguments: Mapping[str, Any], drawn: set[int]
) -> None:
    one, other = (Sampler(SamplingParams(1, temperature=3.0, seed=5, **arguments)) for _ in range(2))
    first = [one.choose(LOGITS) for _ in range(200)]
    assert set(first) == drawn
    assert [other.choose(LOGITS) for _ in range(200)] == first


def read(arguments: Mapping[str, object], **defaults: object) -> SamplingParams:
    make_config: Any = GenerationConfig  # Any: the annotations of transformers do not fit its class
    config = make_config()
    for name, value in defaults.items():
        setattr(config, name, value)  # as a file may have it: transformers' own checks are not ours
    return ParamsReader("tiny", VOCABULARY).read(arguments, config)


SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
"""What chat models have in their files."""


@pytest.mark.parametrize(
    ("arguments", "defaults", "expected"),
    [
        (NOTHING, NOTHING, GREEDY),
        ({"do_sample": False}, NOTHING, GREEDY),
        ({"temperature": 0}, NOTHING, GREEDY),
        ({"do_sample": True}, NOTHING, SamplingParams(4, 1.0)),
        ({"temperature": 0.5, "seed": 3}, NOTHING, SamplingParams(4, 0.5, 3)),
        ({"top_p": 0.5}, NOTHING, SamplingParams(4, 1.0, top_p=0.5)),
        (NOTHING, SAMPLED, SamplingParams(4, 0.6, top_p=0.9, top_k=20)),
        (NOTHING, {**SAMPLED, "do_sample": False, "top_p": 0.0}, GREEDY),
        ({"do_sample": False}, SAMPLED, GREEDY),
        ({"temperature": 0.0}, SAMPLED, GREEDY),
        ({"temperature": 0.2, "top_p": 1.0, "top_k": 0}, SAMPLED, SamplingParams(4, 0.2)),
        ({"temperature": None, "top_p": None}, SAMPLED, SamplingParams(4, 0.6, top_p=0.9, top_k=20)),
        ({"do_sample": True}, {"temperature": 0.0}, SamplingParams(4, 1.0)),
        (NOTHING, {"eos_token_id": 7}, SamplingParams(4, eos_token_ids=frozenset({7}))),
        (NOTHING, {"eos_token_id": [7, 50_256]}, SamplingParams(4, eos_token_ids=frozenset({7, 50_256}))),
        ({"eos_token_id": 3}, {"eos_token_id": [7]}, SamplingParams(4, eos_token_ids=frozenset({3}))),
        ({"eos_token_id": []}, {"eos_token_id": [7]}, GREEDY),
        ({"eos_token_id": torch.tensor([3, 4])}, NOTHING, SamplingParams(4, eos_token_ids=frozenset({3, 4}))),
    ],
)
def test_what_the_caller_leaves_open_comes_from_the_model_s_generation_config(
    arguments: Mapping[str, object], defaults: Mapping[str, object], expected: SamplingParams
) -> None:
    assert read({"max_new_tokens": 4, **arguments}, **defaults) == expected


def test_the_number_of_tokens_has_two_names_and_the_model_s_own_stands_without_either() -> None:
    assert read({"max_tokens": 4}) == read({"max_new_tokens": 4}) == read({}, max_new_tokens=4) == GREEDY
    assert read({"max_tokens": 4, "max_new_tokens": 4}, max_new_tokens=9) == GREEDY
    with pytest.raises(ConfigError, match=r"max_tokens=5: differs from max_new_tokens=4"):
        read({"max_tokens": 5, "max_new_tokens": 4})
    with pytest.raises(ConfigError, match=r"max_new_tokens.* neither the call nor the model"):
        read({})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "temperature=-1: must be a number"),
        ({"temperature": -1, "do_sample": False}, "temperature=-1: must be a number"),
        ({"temperature": 0, "do_sample": True}, "temperature=0: with do_sample=True must be above zero"),
        ({"do_sample": 1}, "do_sample=1: must be True or False"),
        ({"top_p": 0}, "top_p=0: must be a number above 0"),
        ({"eos_token_id": 10}, "eos_token_id=10: .*from 0, below 10"),
        ({"eos_token_id": -1}, "eos_token_id=-1"),
        ({"eos_token_id": True}, "eos_token_id=True"),
        ({"eos_token_id": [3, 99]}, "eos_token_id=99"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_with_what_would(
    arguments: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read({"max_new_tokens": 4, **arguments})


def test_a_value_of_the_model_s_files_that_cannot_work_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.top_k=-1: .*give top_k in the call"):
        read({"max_new_tokens": 4}, do_sample=True, top_k=-1)
    assert read({"max_new_tokens": 4, "top_k": 5}, do_sample=True, top_k=-1).top_k == 5


@pytest.mark.parametrize(
    ("name", "nearest"), [("temprature", "temperature"), ("top_P", "top_p"), ("max_length", None)]
)
def test_an_unknown_argument_names_the_nearest_known(name: str, nearest: str | None) -> None:
    with pytest.raises(UnknownNameError, match=r"engine\.cache_for") as caught:
        read({"max_new_tokens": 4, name: 1})
    assert nearest is None or caught.value.nearest == nearest


def test_a_field_that_has_no_effect_is_named_once_with_its_value(caplog: pytest.LogCaptureFixture) -> None:
    make_config: Any = GenerationConfig  # Any: as above
    config = make_config(
        repetition_penalty=1.2,
        num_beams=1,
        typical_p=1.0,
        no_repeat_ngram_size=0,
        max_length=30,
        pad_token_id=0,
        use_cache=True,
        forced_bos_token_id=0,
        suppress_tokens=[],
        eos_token_id=2,
    )
    reader = ParamsReader("tiny", VOCABULARY)
    for _ in range(2):
        reader.read({"max_new_tokens": 4}, config)
    assert [record.args and record.args[:2] for record in caplog.records] == [  # type: ignore[index]  # a tuple
        ("repetition_penalty", 1.2),
        ("forced_bos_token_id", 0),
    ]
    assert "engine.cache_for" in caplog.text


def test_transformers_own_defaults_are_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    make_config: Any = GenerationConfig  # Any: as above
    config = make_config(**make_config._get_default_generation_params())
    ParamsReader("tiny", VOCABULARY).read({"max_new_tokens": 4}, config)
    assert not caplog.records
