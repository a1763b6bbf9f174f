"""The engine answers like plain transformers, wherever keys and values came from."""

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
)

from kvtier.engines.transformers import GenerationResult, KVTierEngine
from kvtier.errors import ConfigError, DevicePoolError

HOST = {"cpu_bytes_to_use": "2MiB"}
WAIT_S = 30.0
NUM_NEW_TOKENS = 12

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]
Expected = tuple[list[int], torch.Tensor]
Plain = Callable[[PreTrainedModel, list[int], int], Expected]
AssertSame = Callable[[GenerationResult, Expected], None]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 32, 512])
def test_a_prompt_that_nobody_holds_is_computed_in_chunks_of_any_size(
    llama: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    chunk_tokens: int,
    assert_same: AssertSame,
) -> None:
    expected = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama, prefill_chunk_tokens=chunk_tokens)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"computed": 75}
    assert_same(result, expected)


def test_a_prompt_on_the_device_is_answered_from_there(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    expected = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama)
    engine.run(prompt, 1)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"device": 72, "computed": 3}
    assert_same(result, expected)


def test_of_a_wholly_known_prompt_one_token_is_computed(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    whole = prompt[:72]
    expected = plain(llama, whole, NUM_NEW_TOKENS)
    engine = make_engine(llama)
    engine.run(whole, 1)
    engine.run(prompt[1:20], 1)  # leaves other logits behind
    result = engine.run(whole, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"device": 71, "computed": 1}
    assert_same(result, expected)


def test_what_left_the_device_comes_back_from_the_host(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    expected = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama, extra_config=HOST)
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"host": 72, "computed": 3}
    assert_same(result, expected)


def test_a_device_pool_of_one_request_spills_and_comes_back_in_every_turn(
    llama: LlamaForCausalLM,
    prompt_of: PromptOf,
    plain: Plain,
    make_engine: MakeEngine,
    assert_same: AssertSame,
) -> None:
    engine = make_engine(llama, num_device_blocks=11, extra_config=HOST)
    conversations = [prompt_of(seed, 40) for seed in range(4)]
    for turn in range(3):
        for index, conversation in enumerate(conversations):
            expected = plain(llama, conversation, 6)
            result = engine.run(conversation, 6, return_logits=True)
            assert_same(result, expected)
            known = (len(conversation) - 6) // 8 * 8 if turn else 0
            assert result.sources.get("host", 0) + result.sources.get("device", 0) == known
            if turn:
                assert result.sources["host"] > 0
            conversations[index] = conversation + expected[0] + prompt_of(100 * turn + index, 6)
            conversations[index] = conversations[index][: 40 + 12 * (turn + 1)]
        engine._device.pool.check()


def test_device_and_host_share_a_prefix(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    expected = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama, extra_config=HOST)
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    engine.run(prompt[:30], 1)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"device": 24, "host": 48, "computed": 3}
    assert_same(result, expected)


def test_offloaded_blocks_may_be_larger_than_device_blocks(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, assert_same: AssertSame
) -> None:
    expected = plain(llama, prompt, NUM_NEW_TOKENS)
    engine = make_engine(llama, extra_config=HOST | {"block_size": 32})
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    engine.run(prompt[:17], 1)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"device": 16, "host": 48, "computed": 11}
    assert_same(result, expected)


def test_draws_with_a_seed_do_not_depend_on_where_the_prompt_came_from(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    without = make_engine(llama).run(prompt, 30, temperature=1.0, seed=7)
    engine = make_engine(llama, extra_config=HOST)
    computed = engine.run(prompt, 30, temperature=1.0, seed=7)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    loaded = engine.run(prompt, 30, temperature=1.0, seed=7)
    assert loaded.sources == {"host": 72, "computed": 3}
    assert loaded.tokens == computed.tokens == without.tokens
    assert engine.run(prompt, 30, temperature=1.0, seed=8).tokens != loaded.tokens


def test_an_end_token_ends_the_output_and_is_part_of_it(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine
) -> None:
    tokens, _ = plain(llama, prompt, NUM_NEW_TOKENS)
    end = tokens[4]
    result = make_engine(llama).run(prompt, NUM_NEW_TOKENS, eos_token_id=[end])
    assert result.tokens == tokens[: tokens.index(end) + 1]


def test_salted_engines_share_no_block_in_one_host_tier(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    one, other = make_engine(llama, salt="a"), make_engine(llama, salt="b")
    digests = [engine._server.make_request(prompt).block_hashes for engine in (one, other)]
    assert not set(digests[0]) & set(digests[1])


def test_a_request_that_fits_the_pool_exactly_is_served(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine
) -> None:
    tokens, _ = plain(llama, prompt, 6)
    assert make_engine(llama, num_device_blocks=10, extra_config=HOST).run(prompt, 6).tokens == tokens


def test_a_request_larger_than_the_pool_is_refused_with_the_remedy(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, num_device_blocks=9)
    with pytest.raises(DevicePoolError, match=r"num_device_blocks=9.*raise num_device_blocks"):
        engine.generate(prompt, 6)
    assert engine.run(prompt[:60], 2).sources == {"computed": 60}


def test_the_result_is_there_with_the_last_token(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama)
    stream = engine.generate(prompt, 3)
    tokens = [next(stream) for _ in range(3)]
    assert stream.result.tokens == tokens
    assert 0 < stream.result.time_to_first_token_s <= stream.result.total_time_s
    assert list(stream) == []


def test_after_a_reset_nothing_is_found(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine
) -> None:
    tokens, _ = plain(llama, prompt, 4)
    engine = make_engine(llama, extra_config=HOST)
    engine.run(prompt, 4)
    engine.reset()
    result = engine.run(prompt, 4)
    assert result.sources == {"computed": 75}
    assert result.tokens == tokens
    # A block whose store of before the reset is under way is not stored again until that has ended.
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    engine.run(prompt, 4)
    assert engine.drain(WAIT_S)
    engine.drop_device_cache()
    assert engine.run(prompt, 4).sources == {"host": 72, "computed": 3}


def test_the_last_stores_of_a_request_are_begun_before_its_last_token_is_out(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine
) -> None:
    engine = make_engine(llama, extra_config=HOST)
    engine.run(prompt, 1)
    assert engine._halves is not None
    assert not engine._halves.worker._deferred_stores
    assert engine.stats()["connector.store_jobs"] > 0


@pytest.mark.parametrize("prompt", ["text", None, 5, [None], [[1, 2], [3]], [1.5], [True], torch.rand(3), []])
def test_a_prompt_that_is_no_sequence_of_tokens_is_refused(
    llama: LlamaForCausalLM, make_engine: MakeEngine, prompt: Sequence[int]
) -> None:
    with pytest.raises(ConfigError, match="token_ids"):
        make_engine(llama).run(prompt, max_new_tokens=1)
