"""Other architectures and data types are served like Llama in float32."""

from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvtier.engines.transformers import GenerationResult, KVTierEngine

HOST = {"cpu_bytes_to_use": "2MiB"}
WAIT_S = 30.0
NUM_NEW_TOKENS = 12

MakeEngine = Callable[..., KVTierEngine]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
AssertSame = Callable[[GenerationResult, Expected], None]


class Tiny(Protocol):
    """The models that conftest.py builds."""

    def llama(self) -> LlamaForCausalLM: ...

    def gpt2(self) -> PreTrainedModel: ...


def make_qwen2() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_gpt_neox() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=512,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_sliding_mistral() -> PreTrainedModel:
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=20,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


@pytest.mark.parametrize("make_model", [make_qwen2, make_gpt_neox, make_sliding_mistral])
def test_other_architectures_are_served_from_the_host_too(
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    make_model: Callable[[], PreTrainedModel],
    assert_same: AssertSame,
) -> None:
    model = make_model()
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = make_engine(model, extra_config=HOST)
    assert engine.run(prompt, NUM_NEW_TOKENS).tokens == expected[0]
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"host": 72, "computed": 3}
    assert_same(result, expected)


def test_half_precision_is_served_from_the_host(
    tiny: Tiny,
    prompt: list[int],
    make_engine: MakeEngine,
) -> None:
    model = tiny.llama()
    torch.nn.Module.to(model, torch.bfloat16)
    engine = make_engine(model, extra_config=HOST)
    first = engine.run(prompt, 1, return_logits=True)
    assert engine.drain(WAIT_S)
    from_device = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    engine.drop_device_cache()
    from_host = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert first.sources == {"computed": 75}
    assert from_host.sources == {"host": 72, "computed": 3}
    assert from_host.tokens == from_device.tokens
    assert from_host.logits is not None
    assert from_device.logits is not None
    assert torch.equal(from_host.logits, from_device.logits)


def test_learned_positions_are_counted_from_the_cached_prefix(
    tiny: Tiny, prompt: list[int], plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    model = tiny.gpt2()
    expected = plain(model, prompt, NUM_NEW_TOKENS)
    engine = make_engine(model)
    engine.run(prompt, 1)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"device": 72, "computed": 3}
    assert_same(result, expected)
