"""With every kind of mask, tokens after a hit are those of plain ``generate``, or the model is refused at start."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from tests.cache_name import CACHE_NAME
from tests.engines.transformers.architectures import (
    IMAGE_TOKEN_ID,
    MakeModel,
    make_bart,
    make_bert,
    make_bloom,
    make_gemma,
    make_gemma3,
    make_gemma3_with_images,
    make_llama,
    make_llama4,
    make_mistral,
    make_paligemma,
    make_roberta,
)
from tests.engines.transformers.conftest import Expected, MakeEngine, Plain, make_prompt

from kvtier.engines.transformers import GenerationResult
from kvtier.errors import ConfigError, ModelError

NUM_NEW_TOKENS = 8
TEXT = [token_id for token_id in make_prompt(5, 160) if token_id < IMAGE_TOKEN_ID][:110]
SHORT, LONG = 42, 110

AssertSame = Callable[[GenerationResult, Expected], None]

SERVED: dict[str, MakeModel] = {
    "causal": partial(make_llama, "default"),
    "causal, a decoder of encoder design": partial(make_bert, is_decoder=True),
    "causal, Gemma": partial(make_gemma, is_bidirectional=False),
    "causal, ALiBi": make_bloom,
    "sliding window": make_mistral,
    "sliding window beside full attention": make_gemma3,
    "chunked attention beside full attention": make_llama4,
    "causal, image tokens that see each other": make_gemma3_with_images,
}
REFUSED: dict[str, tuple[MakeModel, str]] = {
    "BERT as an encoder": (partial(make_bert, is_decoder=False), "bidirectional attention.*is_decoder=True"),
    "RoBERTa as an encoder": (partial(make_roberta, is_decoder=False), "bidirectional attention"),
    "Gemma as an encoder": (partial(make_gemma, is_bidirectional=True), "use_bidirectional_attention=False"),
    "Gemma-3 as an encoder": (partial(make_gemma3, is_bidirectional=True), "bidirectional attention"),
    "a prefix that sees itself": (make_paligemma, "bidirectional attention"),
    "encoder and decoder": (make_bart, "has an encoder"),
    "positions that generate counts otherwise": (
        partial(make_roberta, is_decoder=True),
        "other keys and values in model.generate",
    ),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("first", "second"), [(SHORT, LONG), (LONG, SHORT)])
def test_a_causal_mask_gives_plain_tokens_after_a_hit(
    name: str, first: int, second: int, plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    model = SERVED[name]()
    engine = make_engine(model)

    engine.run(TEXT[:first], 1)
    result = engine.run(TEXT[:second], NUM_NEW_TOKENS, return_logits=True)

    assert result.num_cached_tokens == 40
    assert_same(result, plain(model, TEXT[:second], NUM_NEW_TOKENS))


@pytest.mark.parametrize("name", SERVED)
def test_these_models_answer_otherwise_when_one_cached_block_is_wrong(
    name: str,
    make_engine: MakeEngine,
    difference: Callable[[GenerationResult, Expected], float],
    plain: Plain,
) -> None:
    model = SERVED[name]()
    engine = make_engine(model)
    # Within the window and the chunk of the last tokens, or nobody would look at it.
    prompt = TEXT[:LONG]
    with engine.cache_for(prompt) as cache:
        cast("Any", model)(
            torch.tensor([prompt]), **{CACHE_NAME: cache}
        )  # Any: a module's call is not annotated
        for layer in cache.sequence_layers:
            layer.key_buffer[96:104].neg_()
            layer.value_buffer[96:104].neg_()

    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)

    assert result.num_cached_tokens == 104
    assert difference(result, plain(model, prompt, NUM_NEW_TOKENS)) > 100


@pytest.mark.parametrize("name", REFUSED)
def test_a_mask_that_looks_ahead_is_refused_at_start(name: str, make_engine: MakeEngine) -> None:
    make_model, message = REFUSED[name]

    with pytest.raises(ModelError, match=message):
        make_engine(make_model())


def test_a_model_that_looks_ahead_in_its_last_layer_alone_is_refused(make_engine: MakeEngine) -> None:
    def look_ahead(_module: torch.nn.Module, inputs: object, options: dict[str, torch.Tensor]) -> object:
        hidden = options["hidden_states"]
        return inputs, options | {"hidden_states": hidden + hidden.mean(dim=1, keepdim=True)}

    model = make_llama("default")
    last = [module for module in model.modules() if hasattr(module, "is_causal")][-1]
    cast("Any", last).register_forward_pre_hook(
        look_ahead, with_kwargs=True
    )  # Any: torch wants its own tuple

    with pytest.raises(ModelError, match="bidirectional attention"):
        make_engine(model)


def test_a_prompt_with_a_place_for_an_image_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(make_gemma3_with_images())
    prompt = [*TEXT[:20], IMAGE_TOKEN_ID, *TEXT[20:30]]

    with pytest.raises(ConfigError, match=f"token_ids={IMAGE_TOKEN_ID}: is a placeholder of an image"):
        engine.generate(prompt, 1)
    with pytest.raises(ConfigError, match="ids do not identify"):
        engine.cache_for(prompt)


def test_the_checks_at_start_leave_the_models_own_settings_of_generate(make_engine: MakeEngine) -> None:
    model = make_llama("default")
    cast("Any", model).generation_config.num_beams = 4  # Any: transformers annotates it as absent too
    before = cast("Any", model).generation_config

    make_engine(model)

    assert cast("Any", model).generation_config is before
    assert before.num_beams == 4
