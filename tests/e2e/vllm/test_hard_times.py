"""Failed copies, pre-emption, tight pools and drafts: each costs hits at most, and no answer changes."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm import recurrent
from tests.e2e.vllm.answers import Answer, assert_same
from tests.e2e.vllm.bench import FOUR, LONGER, Bench, each, needs_states
from tests.e2e.vllm.conftest import CONTROL_POOL_BLOCKS
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults, Spoil
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_prompt
from tests.e2e.vllm.recurrent import EACH_BLOCK, assert_same_or_replayed, found_of, options_with
from tests.e2e.vllm.settings import FAULTY, NGRAM, NUM_DRAFT_TOKENS, settings_with

TIGHT_POOL_BLOCKS = 36
"""A prompt and its answer take 33 device blocks; one is vLLM's own."""

SHORT_CONTEXT = {"max_model_len": 1056}
"""vLLM wants a pool that holds one request of this length."""


def serve(
    bench: Bench, options: EngineOptions, faults: CopyFaults
) -> tuple[list[Answer], list[Answer], dict[str, float]]:
    """Answer the prompts, empty the device, answer them again."""
    prompts, sampling = bench.kind.prompts[: bench.kind.copied], bench.kind.sampling
    with bench.engines.borrow(options) as engine:
        engine.call("plan_faults", faults)
        first = engine.call("generate_in_turn", prompts, sampling)
        engine.call("forget_device")
        again = engine.call("generate", prompts, sampling)
        engine.call("settle")
        engine.call("check")
        assert engine.call("num_known_requests") == 0
        stats = engine.call("stats")
    assert_same(first, bench.expected(len(prompts)))
    assert_same(again, bench.expected(len(prompts)))
    assert stats["connector.open_jobs"] == 0
    return first, again, stats


def num_computed(answers: Sequence[Answer], found: Sequence[int]) -> int:
    """Return how many prompts were not answered from a cache."""
    return sum(answer.num_cached_tokens < num for answer, num in zip(answers, found, strict=False))


SPOILED = [(name, spoil) for name in ("Llama", "Gemma") for spoil in ("first", "middle", "last")]


@pytest.mark.parametrize(
    ("bench", "spoil"),
    [
        *SPOILED,
        pytest.param("Qwen", "last", marks=needs_states),
        pytest.param("Qwen, two steps", "last", marks=needs_states),
    ],
    indirect=["bench"],
)
def test_a_failed_load_is_computed_whichever_block_it_spoils(bench: Bench, spoil: Spoil) -> None:
    faults = CopyFaults(fail_every_load=2, spoil=spoil)
    _, again, stats = serve(bench, bench.options(FAULTY, bench.kind.num_copied_blocks), faults)

    num_loads = sum(found > 0 for found in bench.kind.found[: bench.kind.copied])
    assert stats["connector.failed_load_jobs"] == num_loads // 2
    assert num_computed(again, bench.kind.found) == num_loads // 2


def test_loads_fail_in_a_pool_of_barely_one_request(bench: Bench) -> None:
    options = bench.options(FAULTY, TIGHT_POOL_BLOCKS, **SHORT_CONTEXT)
    _, _, stats = serve(bench, options, CopyFaults(fail_every_load=2))

    assert stats["connector.failed_load_jobs"] >= 1


def test_failed_stores_are_misses_later(bench: Bench) -> None:
    options = bench.options(FAULTY, bench.kind.num_copied_blocks)
    _, again, stats = serve(bench, options, CopyFaults(fail_every_store=2))

    assert stats["connector.failed_store_jobs"] > 0
    assert num_computed(again, bench.kind.found) > 0


@each("Llama, two steps", "Gemma, two steps")
def test_with_two_steps_under_way_hits_come_back_and_failed_loads_are_computed(bench: Bench) -> None:
    # vllm-project/vllm#57938: block numbers of a failed load of several groups end the engine; requests are reported.
    with bench.engines.borrow(bench.options(FAULTY, bench.kind.num_copied_blocks)) as engine:
        assert engine.call("scheduler") == ("AsyncScheduler", 2)
        engine.call("plan_faults", CopyFaults(fail_every_load=3))
        first = engine.call("generate_in_turn", FOUR, GREEDY)
        engine.call("forget_device")
        in_turn = engine.call("generate_in_turn", FOUR, GREEDY)
        engine.call("forget_device")
        together = engine.call("generate", FOUR, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")
        assert engine.call("num_known_requests") == 0

    for answers in (first, in_turn, together):
        assert_same(answers, bench.expected(4))
    cached = found_of([*in_turn, *together])
    assert stats["connector.failed_load_jobs"] == 2
    assert cached.count(WHOLE_TOKENS) == len(cached) - 2


@each("Qwen", "Qwen, two steps")
def test_a_pre_empted_request_goes_on_from_its_state(bench: Bench) -> None:
    prompts = [make_prompt(300 + seed, 1010) for seed in range(6)]
    sampling = {"temperature": 0.0, "max_tokens": 40}
    expected = bench.alone.answers(bench.options(None, 200), "generate", prompts, sampling)
    with bench.engines.borrow(bench.options({"cpu_bytes_to_use": "128MiB"}, 46)) as engine:
        answers = engine.call("generate", prompts, sampling)
        again = engine.call("generate", prompts, sampling)
        engine.call("settle")
        engine.call("check")
        num_preemptions = engine.call("num_preemptions")

    assert num_preemptions > 0
    assert_same_or_replayed(answers, expected, num_preemptions)
    assert_same_or_replayed(again, expected, num_preemptions)


@each("Qwen", "Qwen, two steps")
def test_a_state_at_the_end_of_a_block_of_an_answer_is_the_one_that_vllm_keeps(bench: Bench) -> None:
    # The answers end a block that their prompts began. A state that was computed token by token is not rounded as one
    # of a chunk: what is compared is vLLM's own, which goes on from its device.
    prompts = [make_prompt(400 + length, length) for length in (200, 254, 255, 450)]
    sampling = {"temperature": 0.0, "max_tokens": 80}
    is_asynchronous = bench.kind.is_asynchronous

    def options(settings: dict[str, Any] | None) -> EngineOptions:  # Any: a user's JSON
        return options_with(
            bench.model, settings, is_asynchronous=is_asynchronous, engine_arguments=EACH_BLOCK
        )

    with bench.engines.borrow(options(None)) as engine:
        first = engine.call("generate_in_turn", prompts, sampling)
        turns = [[*prompt, *answer.tokens, 5] for prompt, answer in zip(prompts, first, strict=True)]
        expected = engine.call("generate_in_turn", turns, recurrent.GREEDY)

    with bench.engines.borrow(options({"cpu_bytes_to_use": "256MiB"})) as engine:
        same = engine.call("generate_in_turn", prompts, sampling)
        engine.call("forget_device")
        found = engine.call("generate_in_turn", turns, recurrent.GREEDY)
        engine.call("forget_device")
        together = engine.call("generate", turns, recurrent.GREEDY)
        engine.call("settle")
        engine.call("check")

    assert_same(same, first)
    assert_same(found, expected)
    assert_same(together, expected)
    assert found_of(expected) == found_of(found) == [256, 256, 256, 512]
    assert found_of(together)[:4] == [256, 256, 256, 512]


def test_with_drafts_of_several_tokens_hits_come_back_and_rejected_ones_leave_nothing(bench: Bench) -> None:
    # Greedy drafting changes no token, so answers are compared with those of vLLM without kvtier and without drafts.
    prompts = [make_prompt(seed, 1000) for seed in range(4)]
    expected = bench.alone.answers(
        bench.options(None, CONTROL_POOL_BLOCKS), "generate_in_turn", prompts, LONGER
    )
    long_answers = LONGER | {"max_tokens": 6 * 32}  # several blocks of answer are stored beside drafts
    with bench.engines.borrow(bench.options({"cpu_bytes_to_use": "256MiB"}, 72, **NGRAM)) as engine:
        first = engine.call("generate_in_turn", prompts, LONGER)
        engine.call("forget_device")
        again = engine.call("generate", prompts, LONGER)
        (long_answer,) = engine.call("generate", prompts[:1], long_answers)
        prompt_and_answer = [*prompts[0], *long_answer.tokens[:-1]]
        engine.call("forget_device")
        (found,) = engine.call("generate", [prompt_and_answer], LONGER)
        assert engine.call("reset")
        (computed,) = engine.call("generate", [prompt_and_answer], LONGER)
        settled = engine.call("speculation")
        # Answers of one token over and over are what n-grams foresee: here drafts are accepted.
        (foreseen,) = engine.call("generate", prompts[1:2], long_answers | {"allowed_token_ids": [7]})
        prompt_and_sevens = [*prompts[1], *foreseen.tokens[:-1]]
        drafts = engine.call("speculation")
        engine.call("forget_device")
        (found_sevens,) = engine.call("generate", [prompt_and_sevens], LONGER)
        assert engine.call("reset")
        (computed_sevens,) = engine.call("generate", [prompt_and_sevens], LONGER)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(first, expected)
    assert_same(again, expected)
    assert_same([found], [computed])
    assert found_of(again) == [WHOLE_TOKENS] * 4
    assert found.num_cached_tokens >= WHOLE_TOKENS + 4 * 32
    assert computed.num_cached_tokens == 0
    assert stats["connector.loaded_tokens.CPU"] >= 5 * WHOLE_TOKENS
    assert settled["draft_tokens"] >= NUM_DRAFT_TOKENS * settled["drafts"] > 0
    assert settled["accepted_tokens"] < settled["draft_tokens"]
    assert drafts["accepted_tokens"] - settled["accepted_tokens"] > 2 * 32
    assert_same([found_sevens], [computed_sevens])
    assert found_sevens.num_cached_tokens >= WHOLE_TOKENS + 4 * 32
    assert computed_sevens.num_cached_tokens == 0


NUM_CONVERSATIONS = 10
NUM_TURNS = 3
ANSWER_TOKENS = 12
CONTEXT_POOL_BLOCKS = 68
"""Device blocks of each KV group: a request of the longest context takes 64, and vLLM refuses less."""


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


@each("Llama", "Gemma")
def test_conversations_that_share_prefixes_are_answered_the_same_in_a_tight_pool(
    bench: Bench, tmp_path: Path
) -> None:
    # Eight at a time in a pool of barely one request: pre-emption and eviction.
    turns, sampling = make_turns(), {"temperature": 0.0, "max_tokens": ANSWER_TOKENS}
    pool_blocks = CONTEXT_POOL_BLOCKS * (6 if bench.kind.checkpoint == "gemma" else 1)
    expected = bench.alone.answers(bench.options(None, pool_blocks), "generate", turns, sampling)
    with EngineProcess(bench.options(settings_with(tmp_path / "blocks"), pool_blocks)) as engine:
        answers = engine.call("generate", turns, sampling)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(answers, expected)
    assert sum(found_of(answers)) > 2 * sum(found_of(expected))
    assert stats["connector.loaded_tokens.CPU"] + stats.get("connector.loaded_tokens.fs", 0) > 0
    assert stats["connector.requests"] == 0
    assert stats["connector.open_jobs"] == 0
