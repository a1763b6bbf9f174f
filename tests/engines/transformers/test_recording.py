"""The embedded engine records what it is asked: runs, streams that are closed early, and prompts of caches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cache_name import CACHE_NAME
from tests.engines.transformers.conftest import MakeEngine
from transformers import LlamaForCausalLM

from kvtier.connector.common import StopReason
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.trace import TraceRequest

BLOCK_TOKENS = 8

Recorded = Callable[[], tuple[TraceRequest, ...]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def settings(path: Path) -> dict[str, object]:
    return {"cpu_bytes_to_use": "1MiB", "record_trace": str(path)}


def test_lengths_and_shared_blocks_of_requests_are_recorded(
    make_engine: MakeEngine,
    llama: LlamaForCausalLM,
    prompt: list[int],
    path: Path,
    settings: dict[str, object],
) -> None:
    engine = make_engine(llama, extra_config=settings)
    engine.run(prompt, max_new_tokens=20)
    engine.run([*prompt[:40], *reversed(prompt[:40])], max_new_tokens=1)
    engine.shutdown()

    trace = read_trace(path)

    first, second = trace.requests
    assert trace.block_tokens == BLOCK_TOKENS
    assert (first.num_prompt_tokens, first.num_output_tokens, len(first.hash_ids)) == (75, 20, 9)
    assert (second.num_prompt_tokens, second.num_output_tokens, len(second.hash_ids)) == (80, 1, 10)
    assert first.hash_ids[:5] == second.hash_ids[:5]
    assert not set(first.hash_ids[5:]) & set(second.hash_ids[5:])
    assert first.arrival_s < second.arrival_s


def test_why_an_answer_ended_is_recorded_where_the_model_ended_it(
    make_engine: MakeEngine,
    llama: LlamaForCausalLM,
    prompt: list[int],
    path: Path,
    settings: dict[str, object],
) -> None:
    engine = make_engine(llama, extra_config=settings)
    tokens = engine.run(prompt, max_new_tokens=6).tokens
    ended = engine.run(prompt, max_new_tokens=6, eos_token_id=tokens[1])
    engine.shutdown()

    by_length, by_model = read_trace(path).requests
    assert (by_length.stop, by_model.stop) == (StopReason.UNKNOWN, StopReason.END_TURN)
    assert by_model.num_output_tokens == len(ended.tokens)


def test_a_stream_that_is_closed_early_is_recorded_as_far_as_it_got(
    make_engine: MakeEngine,
    llama: LlamaForCausalLM,
    prompt: list[int],
    path: Path,
    settings: dict[str, object],
) -> None:
    engine = make_engine(llama, extra_config=settings)
    stream = engine.generate(prompt, max_new_tokens=20)
    next(stream)
    next(stream)
    stream.close()
    engine.shutdown()

    (aborted,) = read_trace(path).requests
    assert (aborted.num_prompt_tokens, aborted.num_output_tokens) == (75, 2)
    assert aborted.stop is StopReason.UNKNOWN


def test_a_prompt_whose_cache_is_filled_and_given_back_is_one_request(
    make_engine: MakeEngine,
    llama: LlamaForCausalLM,
    prompt: list[int],
    path: Path,
    settings: dict[str, object],
) -> None:
    engine = make_engine(llama, extra_config=settings)
    with engine.cache_for(prompt) as cache, torch.no_grad():
        llama(torch.tensor([prompt]), **{CACHE_NAME: cache}, use_cache=True)
    engine.shutdown()

    (request,) = read_trace(path).requests
    assert (request.num_prompt_tokens, len(request.hash_ids)) == (75, 9)
