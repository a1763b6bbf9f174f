"""``model.generate`` with a KVTierCache gives the same tokens and computes only what no tier holds."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.cache_name import CACHE_NAME
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.engines.transformers import KVTierCache, KVTierEngine
from kvtier.errors import ConfigError, DevicePoolError, ModelError

HOST = {"cpu_bytes_to_use": "2MiB"}
WAIT_S = 30.0
TOLERANCE = 1e-4
NUM_NEW_TOKENS = 12

MakeEngine = Callable[..., KVTierEngine]
Plain = Callable[[PreTrainedModel, list[int], int], tuple[list[int], torch.Tensor]]


def generate(
    model: LlamaForCausalLM, prompt: list[int], cache: KVTierCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole output and the logits of its new tokens."""
    output = cast("Any", model).generate(  # Any: the annotations of transformers do not fit its models
        torch.tensor([prompt]),
        **{CACHE_NAME: cache},
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences, torch.cat(output.logits)


def test_the_second_call_gets_its_prompt_from_the_host(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine
) -> None:
    tokens, logits = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama, extra_config=HOST)
    first = engine.cache_for(torch.tensor([prompt]))
    output, _ = generate(llama, prompt, first)
    assert output[0].tolist() == prompt + tokens
    assert first.sources == {"computed": 75}
    assert first.commit(output) == 75 + NUM_NEW_TOKENS - 1
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    second = engine.cache_for(torch.tensor([prompt]))
    output, again = generate(llama, prompt, second)
    assert second.sources == {"host": 72, "computed": 3}
    assert output[0].tolist() == prompt + tokens
    assert float((again - logits).abs().max()) < TOLERANCE


def test_the_next_turn_finds_the_answer_too(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    cache = engine.cache_for(prompt)
    output, _ = generate(llama, prompt, cache)
    cache.commit(output)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    following = [*output[0].tolist(), 5, 6, 7]
    tokens, _ = plain(llama, following, NUM_NEW_TOKENS)
    with engine.cache_for(following) as cache:
        output, _ = generate(llama, following, cache)
    assert cache.sources == {"host": 80, "computed": 10}
    assert output[0].tolist() == following + tokens


def test_engine_and_cache_find_what_the_other_has_stored(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine
) -> None:
    tokens, _ = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama)
    with engine.cache_for(prompt) as cache:
        generate(llama, prompt, cache)
    assert engine.run(prompt, NUM_NEW_TOKENS).sources == {"device": 72, "computed": 3}
    cache = engine.cache_for(prompt + tokens)
    assert cache.sources == {"device": 80, "computed": 7}


def test_leaving_the_block_by_an_error_keeps_nothing(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama)
    with pytest.raises(ZeroDivisionError), engine.cache_for(prompt):
        raise ZeroDivisionError
    assert engine.stats()["device.cached_blocks"] == 0


def test_a_cache_nobody_used_commits_nothing(
    prompt: list[int], llama: LlamaForCausalLM, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama)
    assert engine.cache_for(prompt).commit() == 0


def test_an_output_of_another_prompt_is_refused(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    cache = make_engine(llama).cache_for(prompt)
    with pytest.raises(ConfigError, match="must begin with the prompt"):
        cache.commit([1, *prompt])


def test_a_batch_is_refused(llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine) -> None:
    engine = make_engine(llama)
    with pytest.raises(ConfigError, match="one sequence"):
        engine.cache_for(torch.tensor([prompt, prompt]))
    with pytest.raises(ModelError, match="batch of 2"):
        llama(torch.tensor([prompt, prompt]), **{CACHE_NAME: engine.cache_for(prompt)})


def test_a_sequence_larger_than_the_pool_is_refused_at_commit(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, num_device_blocks=10)
    cache = engine.cache_for(prompt)
    output, _ = generate(llama, prompt, cache)
    with pytest.raises(DevicePoolError, match="raise num_device_blocks"):
        cache.commit(output)
    assert cache.commit() == 75


def test_a_cache_from_before_a_reset_keeps_nothing(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    cache = engine.cache_for(prompt)
    output, _ = generate(llama, prompt, cache)
    engine.reset()
    assert cache.commit(output) == 0
    assert engine.run(prompt, max_new_tokens=1).sources == {"computed": len(prompt)}


def test_a_cache_that_was_rolled_back_takes_no_more(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    cache = make_engine(llama, extra_config=HOST).cache_for(prompt)
    generate(llama, prompt, cache)
    cache.crop(0)
    cache.crop(-2)
    with pytest.raises(ModelError, match="assisted decoding"):
        generate(llama, [*prompt, 1, 2, 3], cache)
    with pytest.raises(ModelError, match="negative"):
        cache.crop(3)


@pytest.mark.parametrize("is_warm", [False, True])
def test_prompt_lookup_is_refused_or_right(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, is_warm: bool
) -> None:
    tokens, _ = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama, extra_config=HOST)
    if is_warm:
        with engine.cache_for(prompt) as first:
            generate(llama, prompt, first)
    cache = engine.cache_for(prompt)
    try:
        output = cast("Any", llama).generate(  # Any: as above
            torch.tensor([prompt]),
            **{CACHE_NAME: cache},
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW_TOKENS,
            prompt_lookup_num_tokens=3,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    except ModelError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert output[0].tolist() == prompt + tokens
    assert refusal == "" or "prompt lookup" in refusal
