"""A prompt of whole blocks is loaded with its last block: vLLM computes only the last token again."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import assert_same
from tests.e2e.vllm.engine_host import BLOCK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, make_prompt

LENGTHS = [num_blocks * BLOCK_TOKENS for num_blocks in (1, 2, 9, 30)]
PROMPTS = [make_prompt(seed, num_tokens) for seed, num_tokens in enumerate(LENGTHS)]


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_prompts_of_whole_blocks_load_them_all_and_answer_the_same(
    model: str, request: pytest.FixtureRequest
) -> None:
    options = EngineOptions(
        request.getfixturevalue(model), {"cpu_bytes_to_use": "256MiB"}, num_device_blocks=200
    )
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        in_turn = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        together = engine.call("generate", PROMPTS, GREEDY)
        num_loaded_tokens = engine.call("stats")["connector.prompt_tokens.host"]
        from_device = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    for again in (in_turn, together, from_device):
        assert_same(again, first)
    # vLLM counts what was loaded, the token among it that it computed again.
    assert [answer.num_cached_tokens for answer in in_turn] == LENGTHS
    assert [answer.num_cached_tokens for answer in together] == LENGTHS
    assert num_loaded_tokens == 2 * (sum(LENGTHS) - len(LENGTHS))
    assert stats["connector.failed_load_jobs"] == 0
    if model == "llama":
        # The device holds all but the last block, which is too short to be loaded alone. Of a window it holds less.
        held = [num_tokens - BLOCK_TOKENS for num_tokens in LENGTHS]
        assert [answer.num_cached_tokens for answer in from_device[1:]] == held[1:]
