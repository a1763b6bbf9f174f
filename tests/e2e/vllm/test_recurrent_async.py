"""Recurrent states with two steps under way, as vLLM schedules on GPUs by default.

A step is planned before the last one's tokens are known, so a block of an answer ends a step before vLLM can name it.
vLLM's CPU backend switches this off, whatever a user asks for; ``schedule_asynchronously`` switches it on again.
"""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.e2e.vllm.answers import Answer, assert_same
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.recurrent import (
    BLOCK_TOKENS,
    FOUND,
    GREEDY,
    PROMPTS,
    assert_same_or_replayed,
    found_of,
    options_with,
)
from tests.e2e.vllm.test_failed_loads import FAULTY

pytestmark = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a recurrent state"
)

HOST = {"cpu_bytes_to_use": "256MiB"}

EACH_BLOCK = {"prefix_cache_retention_interval": BLOCK_TOKENS}
"""vLLM keeps the state at the end of each block that a step ends with, those of an answer among them."""


@pytest.fixture(scope="module")
def engine(qwen3_next: str) -> Iterator[EngineProcess]:
    """Return an engine with two steps under way and a host tier, whose pool holds a part of the prompts."""
    with EngineProcess(options_with(qwen3_next, HOST, is_asynchronous=True)) as engine:
        assert engine.call("scheduler") == ("AsyncScheduler", 2)
        yield engine


def test_prompts_that_left_the_pool_are_answered_from_host_memory(
    engine: EngineProcess, recurrent_controls: list[Answer]
) -> None:
    first = engine.call("generate_in_turn", PROMPTS, GREEDY)
    again = engine.call("generate_in_turn", PROMPTS, GREEDY)
    engine.call("forget_device")
    together = engine.call("generate", PROMPTS, GREEDY)
    engine.call("settle")
    engine.call("check")
    stats = engine.call("stats")

    for answers in (first, again, together):
        assert_same(answers, recurrent_controls)
    assert found_of(first) == [0] * len(PROMPTS)
    assert found_of(again) == found_of(together) == FOUND
    assert stats["connector.loaded_tokens.CPU"] >= sum(FOUND)
    assert engine.call("num_known_requests") == 0


def test_an_abort_and_a_reset_leave_nothing_wrong_behind(
    engine: EngineProcess, recurrent_controls: list[Answer]
) -> None:
    engine.call("generate_in_turn", PROMPTS[:1], GREEDY)
    engine.call("forget_device")
    assert engine.call("abort_while_loading", PROMPTS[0])
    after_abort = engine.call("generate", PROMPTS, GREEDY)
    engine.call("abort_while_computing", make_prompt(7, 1900))
    assert engine.call("reset")
    after_reset = engine.call("generate", PROMPTS, GREEDY)
    engine.call("forget_device")
    again = engine.call("generate", PROMPTS, GREEDY)
    engine.call("settle")
    engine.call("check")

    for answers in (after_abort, after_reset, again):
        assert_same(answers, recurrent_controls)
    assert found_of(after_reset) == [0] * len(PROMPTS)
    assert found_of(again) == FOUND
    assert engine.call("stats")["connector.open_jobs"] == 0


def test_a_pre_empted_request_goes_on_from_its_state(qwen3_next: str) -> None:
    prompts = [make_prompt(300 + seed, 1010) for seed in range(6)]
    sampling = {"temperature": 0.0, "max_tokens": 40}
    with EngineProcess(options_with(qwen3_next, None, num_device_blocks=200)) as engine:
        expected = engine.call("generate", prompts, sampling)

    tight = options_with(qwen3_next, HOST, num_device_blocks=46, is_asynchronous=True)
    with EngineProcess(tight) as engine:
        answers = engine.call("generate", prompts, sampling)
        again = engine.call("generate", prompts, sampling)
        engine.call("settle")
        engine.call("check")
        num_preemptions = engine.call("num_preemptions")

    assert num_preemptions > 0
    assert_same_or_replayed(answers, expected, num_preemptions)
    assert_same_or_replayed(again, expected, num_preemptions)


def test_a_failed_load_is_computed_from_the_first_token(
    qwen3_next: str, recurrent_controls: list[Answer]
) -> None:
    faults = CopyFaults(fail_every_load=2, spoil="last")
    options = options_with(qwen3_next, FAULTY, environment=faults.to_environment(), is_asynchronous=True)
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        again = engine.call("generate", PROMPTS, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(again, recurrent_controls)
    assert stats["connector.failed_load_jobs"] == sum(found > 0 for found in FOUND) // 2
    assert stats["connector.open_jobs"] == 0


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["one step", "two steps"])
def test_a_state_at_the_end_of_a_block_of_an_answer_is_the_one_that_vllm_keeps(
    qwen3_next: str, is_asynchronous: bool
) -> None:
    # The answers end a block that their prompts began. A state that was computed token by token is not rounded as one
    # of a chunk: what is compared is vLLM's own, which goes on from its device.
    prompts = [make_prompt(400 + length, length) for length in (200, 254, 255, 450)]
    sampling = {"temperature": 0.0, "max_tokens": 100}
    with EngineProcess(
        options_with(qwen3_next, None, is_asynchronous=is_asynchronous, engine_arguments=EACH_BLOCK)
    ) as engine:
        first = engine.call("generate_in_turn", prompts, sampling)
        turns = [[*prompt, *answer.tokens, 5] for prompt, answer in zip(prompts, first, strict=True)]
        expected = engine.call("generate_in_turn", turns, GREEDY)

    with EngineProcess(
        options_with(qwen3_next, HOST, is_asynchronous=is_asynchronous, engine_arguments=EACH_BLOCK)
    ) as engine:
        same = engine.call("generate_in_turn", prompts, sampling)
        engine.call("forget_device")
        found = engine.call("generate_in_turn", turns, GREEDY)
        engine.call("forget_device")
        together = engine.call("generate", turns, GREEDY)
        engine.call("settle")
        engine.call("check")

    assert_same(same, first)
    assert_same(found, expected)
    assert_same(together, expected)
    assert found_of(expected) == found_of(found) == [256, 256, 256, 512]
    assert found_of(together)[:4] == [256, 256, 256, 512]
