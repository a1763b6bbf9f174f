"""Schedulers as people run them: two steps under way, drafts of several tokens. Hits are counted in each.

Greedy drafting changes no token, so answers are compared with those of vLLM without kvtier and without drafts.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import assert_same
from tests.e2e.vllm.conftest import Controls
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle
from tests.e2e.vllm.test_failed_loads import FAULTY

PROMPTS = make_cycle(4)

NUM_DRAFT_TOKENS = 3

NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFT_TOKENS,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
}
"""Drafts from the prompt's own tokens: no model, and nearly all are rejected by one of random weights."""


@pytest.mark.parametrize(("model", "num_blocks"), [("llama", 72), ("gemma", 300)])
def test_with_two_steps_under_way_hits_come_back_and_failed_loads_are_computed(
    model: str, num_blocks: int, request: pytest.FixtureRequest
) -> None:
    # vllm-project/vllm#57938: block numbers of a failed load of several groups end the engine; requests are reported.
    controls: Controls = request.getfixturevalue(f"{model}_controls")
    options = EngineOptions(
        request.getfixturevalue(model),
        FAULTY,
        num_blocks,
        environment=CopyFaults(fail_every_load=3).to_environment(),
        is_asynchronous=True,
    )
    with EngineProcess(options) as engine:
        assert engine.call("scheduler") == ("AsyncScheduler", 2)
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        in_turn = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        together = engine.call("generate", PROMPTS, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")
        assert engine.call("num_known_requests") == 0

    for answers in (first, in_turn, together):
        assert_same(answers, controls.in_turn[:4])
    cached = [answer.num_cached_tokens for answer in (*in_turn, *together)]
    assert stats["connector.failed_load_jobs"] == 2
    assert cached.count(WHOLE_TOKENS) == len(cached) - 2


def test_with_drafts_of_several_tokens_hits_come_back_and_rejected_ones_leave_nothing(
    llama: str, llama_controls: Controls
) -> None:
    long_answers = GREEDY | {"max_tokens": 6 * 32}  # several blocks of answer are stored beside drafts
    options = EngineOptions(llama, {"cpu_bytes_to_use": "256MiB"}, engine_arguments=NGRAM)
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        again = engine.call("generate", PROMPTS, GREEDY)
        (long_answer,) = engine.call("generate", PROMPTS[:1], long_answers)
        prompt_and_answer = [*PROMPTS[0], *long_answer.tokens[:-1]]
        engine.call("forget_device")
        (found,) = engine.call("generate", [prompt_and_answer], GREEDY)
        assert engine.call("reset")
        (computed,) = engine.call("generate", [prompt_and_answer], GREEDY)
        settled = engine.call("speculation")
        # Answers of one token over and over are what n-grams foresee: here drafts are accepted.
        (foreseen,) = engine.call("generate", PROMPTS[1:2], long_answers | {"allowed_token_ids": [7]})
        prompt_and_sevens = [*PROMPTS[1], *foreseen.tokens[:-1]]
        drafts = engine.call("speculation")
        engine.call("forget_device")
        (found_sevens,) = engine.call("generate", [prompt_and_sevens], GREEDY)
        assert engine.call("reset")
        (computed_sevens,) = engine.call("generate", [prompt_and_sevens], GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(first, llama_controls.in_turn[:4])
    assert_same(again, llama_controls.in_turn[:4])
    assert_same([found], [computed])
    assert [answer.num_cached_tokens for answer in again] == [WHOLE_TOKENS] * 4
    assert found.num_cached_tokens >= WHOLE_TOKENS + 4 * 32
    assert computed.num_cached_tokens == 0
    assert stats["connector.loaded_tokens.CPU"] >= 5 * WHOLE_TOKENS
    assert settled["draft_tokens"] >= NUM_DRAFT_TOKENS * settled["drafts"] > 0
    assert settled["accepted_tokens"] < settled["draft_tokens"]
    assert drafts["accepted_tokens"] - settled["accepted_tokens"] > 2 * 32
    assert_same([found_sevens], [computed_sevens])
    assert found_sevens.num_cached_tokens >= WHOLE_TOKENS + 4 * 32
    assert computed_sevens.num_cached_tokens == 0
