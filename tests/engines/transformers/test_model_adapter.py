"""Models are read by what they do, and those without a cache that can be shared are refused."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cache_name import CACHE_NAME
from tests.engines.transformers.tiny_models import build_tiny_model
from tests.engines.transformers.trial import Outcome, try_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    cache_utils,
)
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, LinearAttentionLayer

from kvtier.engines.transformers import model_adapter, sequence_cache
from kvtier.engines.transformers.model_adapter import EMPTY_LAYER_NAMES, ModelAdapter
from kvtier.errors import ModelError


def test_shapes_are_what_the_model_hands_to_its_cache(llama: LlamaForCausalLM) -> None:
    shape = ModelAdapter(llama).shape
    assert [(layer.num_key_heads, layer.key_dim) for layer in shape.layers] == [(2, 12)] * 3
    assert shape.dtype == torch.float32
    assert shape.token_bytes == 3 * 2 * 2 * 12 * 4


def test_a_release_of_transformers_without_empty_layers_can_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The environment of vLLM 0.32 has transformers 5.19, which has none."""
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)
    spec = importlib.util.spec_from_file_location("anew", model_adapter.__file__)
    assert spec is not None
    assert spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "anew", anew)  # dataclasses look their module up
    spec.loader.exec_module(anew)

    assert anew.EMPTY_LAYER_TYPES == ()
    assert None not in anew.SERVED_LAYER_TYPES


def test_layers_that_keep_nothing_are_served_by_a_release_without_empty_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Release 5.19 of transformers gives a layer of an MLP or of experts a cache for states that stays empty."""
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "dummy", LinearAttentionLayer)
    monkeypatch.setattr(model_adapter, "EMPTY_LAYER_TYPES", ())
    monkeypatch.setattr(sequence_cache, "EmptyLayer", LinearAttentionLayer)
    model = build_tiny_model("nemotron_h")
    assert EMPTY_LAYER_NAMES & set(model.config.layer_types)

    trial = try_model(model, tmp_path, block_size_tokens=8, state_interval_tokens=16)

    assert (trial.outcome, trial.reason) == (Outcome.SERVED, "")


def make_t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )


def make_headless() -> PreTrainedModel:
    return LlamaModel(
        LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (make_t5, "encoder"),
        (make_headless, "cannot generate"),
    ],
)
def test_models_without_a_cache_to_share_are_refused(
    make_model: Callable[[], PreTrainedModel], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ModelAdapter(make_model())


class ForgetfulLlama(LlamaForCausalLM):  # type: ignore[no-untyped-call]  # transformers is not annotated
    """Takes a cache and does not use it."""

    def forward(self, *args: object, **kwargs: object) -> object:
        kwargs.pop(CACHE_NAME)
        return super().forward(*args, **kwargs)


def test_a_model_that_leaves_its_cache_empty_is_refused(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match="left its KV cache empty"):
        ModelAdapter(ForgetfulLlama(llama.config))


def test_a_model_in_training_mode_is_switched_to_evaluation(llama: LlamaForCausalLM) -> None:
    model = LlamaForCausalLM(llama.config)
    model.train()
    ModelAdapter(model)
    assert not model.training


@pytest.mark.parametrize(("model_type", "reason"), [("blt", "into patches"), ("moshi", "sliding window")])
def test_models_whose_answer_depends_on_the_cut_into_passes_are_refused_with_the_reason(
    model_type: str, reason: str
) -> None:
    model = build_tiny_model(model_type)

    # The refusal goes when this fails: transformers has mended the model then.
    assert change_by_cut(model) > 0.1
    assert change_by_cut(build_tiny_model("mistral")) < 1e-5
    with pytest.raises(ModelError, match=f"{reason}.*how a prompt is cut into passes"):
        ModelAdapter(model)


def change_by_cut(model: PreTrainedModel) -> float:
    """Return how far the logits of a prompt in two passes are from those in one, relative to these."""
    ids = torch.randint(3, 90, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(input_ids=ids, **{CACHE_NAME: make_cache(model)}, use_cache=True).logits[0, -1]
        cache = make_cache(model)
        model(input_ids=ids[:, :24], **{CACHE_NAME: cache}, use_cache=True)
        parts = model(input_ids=ids[:, 24:], **{CACHE_NAME: cache}, use_cache=True).logits[0, -1]
    return float((whole - parts).norm() / whole.norm())


def make_cache(model: PreTrainedModel) -> Cache:
    """Return an empty cache as the model makes it."""
    if model.config.model_type == "blt":
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache(config=model.config)
