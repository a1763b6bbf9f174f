"""Answers follow the caller's arguments and the model's generation_config, as those of model.generate do."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.engines.transformers import GenerationResult, KVTierEngine
from kvtier.engines.transformers.sampling import Sampler, SamplingParams
from kvtier.errors import ConfigError, UnknownNameError

NUM_NEW_TOKENS = 12

MakeEngine = Callable[..., KVTierEngine]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
Model = Any  # Any: the annotations of transformers do not fit its models


class Tiny(Protocol):
    """The models that conftest.py builds."""

    def llama(self) -> LlamaForCausalLM: ...


@pytest.fixture
def model(tiny: Tiny) -> Model:
    """A model whose generation settings a test may change."""
    return tiny.llama()


def test_the_distribution_is_that_of_generate_with_the_same_arguments(
    model: Model, prompt: list[int]
) -> None:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=True,
        temperature=1.7,
        top_p=0.8,
        top_k=30,
        pad_token_id=0,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
    )
    sampler = Sampler(SamplingParams(1, temperature=1.7, top_p=0.8, top_k=30))
    for logits, scores in zip(output.logits, output.scores, strict=True):
        assert 1 < int(scores[0].isfinite().sum()) <= 30
        assert torch.equal(sampler.filter(logits[0]), scores[0])


def test_the_model_s_sampling_applies_where_the_caller_gives_nothing(
    model: Model, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(model)
    spelled_out = {"temperature": 1.5, "top_p": 0.9, "top_k": 20}
    expected = engine.run(prompt, NUM_NEW_TOKENS, seed=3, **spelled_out).tokens  # type: ignore[arg-type]  # one dict
    greedy = engine.run(prompt, NUM_NEW_TOKENS, seed=3).tokens
    for name, value in {"do_sample": True, **spelled_out}.items():
        setattr(model.generation_config, name, value)
    assert engine.run(prompt, NUM_NEW_TOKENS, seed=3).tokens == expected
    assert engine.run(prompt, NUM_NEW_TOKENS, seed=4).tokens != expected
    assert engine.run(prompt, NUM_NEW_TOKENS, do_sample=False).tokens == greedy != expected


def test_the_model_s_end_tokens_end_an_answer_as_generate_ends_it(
    model: Model, prompt: list[int], plain: Plain, make_engine: MakeEngine
) -> None:
    tokens, _ = plain(model, prompt, NUM_NEW_TOKENS)
    engine = make_engine(model)
    model.generation_config.eos_token_id = [50_256, tokens[4]]
    answer = engine.run(prompt, NUM_NEW_TOKENS).tokens
    ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, pad_token_id=0)
    assert answer == output[0, len(prompt) :].tolist() == tokens[: tokens.index(tokens[4]) + 1]
    assert engine.run(prompt, NUM_NEW_TOKENS, eos_token_id=[]).tokens == tokens
    assert (
        engine.run(prompt, NUM_NEW_TOKENS, eos_token_id=tokens[2]).tokens
        == tokens[: tokens.index(tokens[2]) + 1]
    )


def test_run_and_stream_take_the_same_arguments(
    model: Model, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(model)

    def stream() -> GenerationResult:
        with engine.generate(prompt, max_tokens=8, temperature=1.5, top_p=0.7, seed=11) as tokens:
            list(tokens)
        return tokens.result

    ran = engine.run(prompt, max_tokens=8, temperature=1.5, top_p=0.7, seed=11)
    assert stream().tokens == stream().tokens == ran.tokens
    assert len(ran.tokens) == 8


def test_a_bad_or_unknown_argument_is_refused_before_the_request_begins(
    model: Model, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(model)
    with pytest.raises(ConfigError, match="top_p=0"):
        engine.run(prompt, 4, top_p=0)
    with pytest.raises(ConfigError, match=r"eos_token_id=97: .*below 97"):
        engine.generate(prompt, 4, eos_token_id=97)
    with pytest.raises(UnknownNameError, match="did you mean 'temperature'"):
        engine.run(prompt, 4, temprature=0.5)  # type: ignore[call-arg]  # the point
    assert engine.run(prompt, 4).sources == {"computed": len(prompt)}


def test_what_the_engine_cannot_apply_is_said_once(
    model: Model, prompt: list[int], make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    model.generation_config.repetition_penalty = 1.3
    engine = make_engine(model)
    with caplog.at_level(logging.WARNING):
        engine.run(prompt, 2)
        engine.run(prompt, 2)
    said = [record.getMessage() for record in caplog.records if "repetition_penalty" in record.getMessage()]
    assert len(said) == 1
    assert "generation_config.repetition_penalty=1.3 of LlamaForCausalLM has no effect" in said[0]
