"""Conversations that share prefixes, eight at a time in a pool of barely one request: pre-emption and eviction.

Request by request the answers are those of vLLM without kvtier in the same pool.
"""

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import assert_same
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.test_fs_tier import settings_with

NUM_CONVERSATIONS = 10
NUM_TURNS = 3
ANSWER_TOKENS = 12
POOL_BLOCKS = 68
"""Device blocks of each KV group: a request of the longest context takes 64, and vLLM refuses less."""

SAMPLING = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS}


def make_turns() -> list[list[int]]:
    """Return prompts: every conversation grows by each turn, all begin with the same system prompt; shuffled turns."""
    rng = random.Random(5)
    system = make_prompt(1000, 200)
    conversations = [[*system, *make_prompt(seed, 500)] for seed in range(NUM_CONVERSATIONS)]
    turns: list[list[int]] = []
    for turn in range(NUM_TURNS):
        order = list(range(NUM_CONVERSATIONS))
        rng.shuffle(order)
        for conversation in order:
            conversations[conversation] += make_prompt(100 * turn + conversation, rng.randrange(50, 150))
            turns.append(list(conversations[conversation]))
    return turns


@pytest.mark.parametrize("model_name", ["llama", "gemma"])
def test_every_answer_is_the_same_in_a_tight_pool(
    model_name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(model_name)
    turns = make_turns()
    num_groups = 6 if model_name == "gemma" else 1
    pool_blocks = POOL_BLOCKS * num_groups

    with EngineProcess(EngineOptions(model, None, pool_blocks)) as engine:
        expected = engine.call("generate", turns, SAMPLING)
    with EngineProcess(EngineOptions(model, settings_with(tmp_path / "blocks"), pool_blocks)) as engine:
        answers = engine.call("generate", turns, SAMPLING)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(answers, expected)
    assert sum(answer.num_cached_tokens for answer in answers) > 2 * sum(
        answer.num_cached_tokens for answer in expected
    )
    assert stats["connector.loaded_tokens.CPU"] + stats.get("connector.loaded_tokens.fs", 0) > 0
    assert stats["connector.requests"] == 0
    assert stats["connector.open_jobs"] == 0
