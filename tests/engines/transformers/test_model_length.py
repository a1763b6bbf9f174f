"""Beyond its last position a model's request is refused before anything is computed, beyond its length warned of."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from tests.engines.transformers.tiny_models import build_tiny_model
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.engines.transformers import GenerationResult, KVTierEngine
from kvtier.engines.transformers.rope import ModelLength
from kvtier.errors import SequenceLengthError

MAX_POSITIONS = 512

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
AssertSame = Callable[[GenerationResult, Expected], None]

TABLES = {
    **dict.fromkeys(
        ("gpt2", "gpt_neo", "openai-gpt", "opt", "bart", "blenderbot", "biogpt", "bert"), MAX_POSITIONS
    ),
    **dict.fromkeys(("marian", "roformer", "trocr"), MAX_POSITIONS),  # computed at the start, as modules
    **dict.fromkeys(("gptj", "codegen", "ctrl"), MAX_POSITIONS),  # computed at the start, as tensors
    "roberta": MAX_POSITIONS - 1,
    "mpt": MAX_POSITIONS,
}
"""Models that have positions for so many tokens alone."""


class Tiny(Protocol):
    """The models that conftest.py builds."""

    def gpt2(self) -> PreTrainedModel: ...

    def llama(self) -> LlamaForCausalLM: ...


def compute(model: PreTrainedModel, num_tokens: int) -> None:
    run: Any = model  # Any: the annotations of transformers do not fit its models
    with torch.no_grad():
        run(input_ids=torch.full((1, num_tokens), 5), use_cache=False)


@pytest.mark.parametrize("model_type", TABLES)
def test_the_last_position_is_the_one_after_which_the_model_fails(model_type: str) -> None:
    model = build_tiny_model(model_type)
    last = ModelLength(model, "tiny").last_tokens
    assert last == TABLES[model_type]
    compute(model, last)
    with pytest.raises((IndexError, RuntimeError)):
        compute(model, last + 1)


@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba2", "xglm", "moss_transcribe_diarize"])
def test_a_model_without_a_table_has_no_last_position(model_type: str) -> None:
    model = build_tiny_model(model_type)
    assert ModelLength(model, "tiny").last_tokens is None
    compute(model, MAX_POSITIONS + 8)


def test_a_table_of_positions_is_used_to_its_end_and_not_beyond(
    tiny: Tiny, prompt_of: PromptOf, plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    model, prompt = tiny.gpt2(), prompt_of(0, 505)
    engine = make_engine(model, 80, extra_config={"cpu_bytes_to_use": "2MiB"})
    with pytest.raises(
        SequenceLengthError, match=r"prompt of 505 .* 8 computed .* 512 .*at most 8 new tokens"
    ):
        engine.generate(prompt, 9)
    with pytest.raises(SequenceLengthError, match="shorten the prompt"):
        engine.cache_for(prompt_of(0, 513))
    # The last token of an answer has no position.
    result = engine.run(prompt, 8, return_logits=True)
    assert result.sources == {"computed": 505}
    assert_same(result, plain(model, prompt, 8))


def test_a_length_that_the_model_was_not_made_for_is_served_and_said_once(
    tiny: Tiny,
    prompt_of: PromptOf,
    plain: Plain,
    make_engine: MakeEngine,
    assert_same: AssertSame,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, prompt = tiny.llama(), prompt_of(0, 505)
    engine = make_engine(model, 80)
    with caplog.at_level(logging.WARNING):
        engine.run(prompt, 8)
        assert "max_position_embeddings" not in caplog.text
        result = engine.run(prompt, 12, return_logits=True)
        engine.run(prompt, 12)
    said = [
        record.getMessage() for record in caplog.records if "max_position_embeddings" in record.getMessage()
    ]
    assert len(said) == 1
    assert "prompt of 505 tokens and 11 computed after it exceed max_position_embeddings=512" in said[0]
    assert_same(result, plain(model, prompt, 12))
