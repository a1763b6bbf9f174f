"""A Gemma-3 with sliding windows answers from host memory and disk what it answers without kvtier."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import assert_clearly_other, assert_same
from tests.e2e.vllm.conftest import NUM_PROMPTS, Controls
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle
from tests.e2e.vllm.test_fs_tier import settings_with

PROMPTS = make_cycle(NUM_PROMPTS)
HOST_ONLY = {"cpu_bytes_to_use": "512MiB"}
POOL_BLOCKS = 400


def test_a_hybrid_model_is_answered_from_host_memory(gemma: str, gemma_controls: Controls) -> None:
    with EngineProcess(EngineOptions(gemma, HOST_ONLY, POOL_BLOCKS)) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        in_turn = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        together = engine.call("generate", PROMPTS, GREEDY)
        engine.call("check")

    assert_same(first, gemma_controls.in_turn)
    assert_same(in_turn, gemma_controls.in_turn)
    assert_same(together, gemma_controls.together)
    assert [answer.num_cached_tokens for answer in in_turn] == [WHOLE_TOKENS] * NUM_PROMPTS
    assert [answer.num_cached_tokens for answer in together] == [WHOLE_TOKENS] * NUM_PROMPTS


def test_a_restarted_hybrid_is_answered_from_disk(
    gemma: str, gemma_controls: Controls, tmp_path: Path
) -> None:
    options = EngineOptions(gemma, settings_with(tmp_path / "blocks"), POOL_BLOCKS)
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", PROMPTS[:4], GREEDY)
        engine.call("settle")

    with EngineProcess(options) as engine:
        answers = engine.call("generate_in_turn", PROMPTS[:4], GREEDY)
        stats = engine.call("stats")
        engine.call("check")

    assert_same(answers, gemma_controls.in_turn[:4])
    assert [answer.num_cached_tokens for answer in answers] == [WHOLE_TOKENS] * 4
    assert stats["connector.loaded_tokens.fs"] == 4 * WHOLE_TOKENS


def test_the_comparison_sees_one_wrong_window_block(gemma: str, gemma_controls: Controls) -> None:
    with EngineProcess(EngineOptions(gemma, HOST_ONLY, POOL_BLOCKS)) as engine:
        engine.call("generate_in_turn", PROMPTS[:2], GREEDY)
        engine.call("forget_device")
        engine.call("zero_held_block", PROMPTS[0], 1, WHOLE_TOKENS - 1)

        spoiled, intact = engine.call("generate_in_turn", PROMPTS[:2], GREEDY)

    assert_clearly_other([spoiled], gemma_controls.in_turn[:1])
    assert_same([intact], gemma_controls.in_turn[1:2])
