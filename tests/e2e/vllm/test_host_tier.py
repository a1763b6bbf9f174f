"""A Llama whose prompts overflow the device pool answers from host memory what it answers without kvtier."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import assert_clearly_other, assert_same
from tests.e2e.vllm.conftest import NUM_PROMPTS, Controls
from tests.e2e.vllm.engine_host import BLOCK_TOKENS, WHOLE_PROMPTS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, SEEDED, WHOLE_TOKENS, make_cycle

PROMPTS = make_cycle(NUM_PROMPTS)
NUM_PROMPT_BLOCKS = WHOLE_TOKENS // BLOCK_TOKENS
"""Slots that a prompt takes; those of an empty primary are given out in order."""

HOST_ONLY = {"cpu_bytes_to_use": "512MiB"}


@pytest.fixture(scope="module")
def engine(llama: str) -> Iterator[EngineProcess]:
    """Return an engine whose pool holds nine of the twelve prompts."""
    with EngineProcess(EngineOptions(llama, HOST_ONLY, num_device_blocks=300)) as engine:
        yield engine


def test_controls_agree_at_any_concurrency(llama_controls: Controls) -> None:
    assert_same(llama_controls.in_turn, llama_controls.together)


def test_one_request_at_a_time_is_answered_from_host_memory(
    engine: EngineProcess, llama_controls: Controls
) -> None:
    first = engine.call("generate_in_turn", PROMPTS, GREEDY)
    again = engine.call("generate_in_turn", PROMPTS, GREEDY)

    assert_same(first, llama_controls.in_turn)
    assert_same(again, llama_controls.in_turn)
    assert [answer.num_cached_tokens for answer in first] == [0] * NUM_PROMPTS
    assert [answer.num_cached_tokens for answer in again] == [WHOLE_TOKENS] * NUM_PROMPTS


def test_eight_requests_at_a_time_are_answered_from_host_memory(
    engine: EngineProcess, llama_controls: Controls
) -> None:
    assert engine.call("forget_device")

    answers = engine.call("generate", PROMPTS, GREEDY)

    assert_same(answers, llama_controls.together)
    assert [answer.num_cached_tokens for answer in answers] == [WHOLE_TOKENS] * NUM_PROMPTS


def test_seeded_sampling_draws_the_same_tokens(llama: str, llama_controls: Controls) -> None:
    options = EngineOptions(llama, HOST_ONLY, engine_arguments=WHOLE_PROMPTS)
    with EngineProcess(options) as engine:
        first = engine.call("generate", PROMPTS[:4], SEEDED)
        again = engine.call("generate", PROMPTS[:4], SEEDED)

    assert_same(first, llama_controls.seeded)
    assert_same(again, llama_controls.seeded)
    assert [answer.num_cached_tokens for answer in again] == [WHOLE_TOKENS] * 4


def test_the_comparison_sees_one_wrong_block(llama: str, llama_controls: Controls) -> None:
    with EngineProcess(EngineOptions(llama, HOST_ONLY)) as engine:
        engine.call("generate_in_turn", PROMPTS[:4], GREEDY)
        engine.call("zero_slot", 5)
        # Two blocks of different prompts: attention does not mind the order of blocks of one prompt.
        engine.call("swap_slots", NUM_PROMPT_BLOCKS + 10, 2 * NUM_PROMPT_BLOCKS + 10)

        zeroed, swapped = engine.call("generate_in_turn", PROMPTS[:2], GREEDY)

    assert [zeroed.num_cached_tokens, swapped.num_cached_tokens] == [WHOLE_TOKENS] * 2
    assert_clearly_other([zeroed], llama_controls.in_turn[:1])
    assert_clearly_other([swapped], llama_controls.in_turn[1:2])
