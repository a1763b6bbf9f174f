"""A real engine computes hits again and compares: batches and chunks are no fault, zeroed blocks are."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle

AUDITED = {"cpu_bytes_to_use": "512MiB", "audit_ratio": 1.0}
NUM_BLOCKS = WHOLE_TOKENS // 32
"""Whole blocks of a prompt."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_in_a_batch_is_no_fault(llama: str, dtype: str) -> None:
    prompts = make_cycle(6)
    options = EngineOptions(
        llama,
        AUDITED,
        num_device_blocks=400,
        engine_arguments={"dtype": dtype, "max_num_batched_tokens": 384},
    )
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", prompts, GREEDY)
        engine.call("settle")
        for _ in range(2):
            engine.call("forget_device")
            engine.call("generate", prompts, GREEDY)
            engine.call("settle")
        stats = engine.call("stats")
        engine.call("check")

    assert stats["audit.requests"] == 12
    assert stats["audit.equal_blocks"] + stats["audit.close_blocks"] == 12 * NUM_BLOCKS
    assert stats["audit.wrong_blocks"] == 0
    assert stats["connector.missed_tokens.audited"] == 12 * WHOLE_TOKENS


def test_zeroed_blocks_are_found_and_loads_stop(llama: str) -> None:
    prompts = make_cycle(1)
    with EngineProcess(EngineOptions(llama, {**AUDITED, "audit_limit": 1})) as engine:
        engine.call("generate", prompts, GREEDY)
        engine.call("settle")
        for slot in range(3):
            engine.call("zero_slot", slot)
        engine.call("forget_device")
        engine.call("generate", prompts, GREEDY)
        engine.call("settle")
        stats = engine.call("stats")

    assert stats["audit.wrong_blocks"] == 3
    assert stats["audit.loads_stopped"] == 1


def test_of_the_first_hits_after_a_start_one_in_sixteen_is_audited(llama: str) -> None:
    prompts = make_cycle(1)
    settings = {
        "cpu_bytes_to_use": "64MiB",
        "audit_ratio": 1e-9,
        "audit_seed": 1,
    }  # its first draw is the fifth hit
    with EngineProcess(EngineOptions(llama, settings)) as engine:
        engine.call("generate", prompts, GREEDY)
        engine.call("settle")
        cached = []
        for _ in range(10):
            engine.call("forget_device")
            cached += [answer.num_cached_tokens for answer in engine.call("generate", prompts, GREEDY)]
            engine.call("settle")
        stats = engine.call("stats")

    assert stats["audit.requests"] == 1
    assert stats["audit.wrong_blocks"] == 0
    assert [number for number, num_tokens in enumerate(cached) if not num_tokens] == [4]
