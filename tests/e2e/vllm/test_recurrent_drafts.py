"""A Qwen3-Next with speculative decoding answers the same with kvtier and without: n-grams and MTP.

vLLM's CPU backend lacks kernels for this; ``state_kernels`` has stand-ins. The first tests show that vLLM with the
stand-ins answers as it does without drafts, the others that kvtier changes nothing. Answers may only have one or two
different tokens, so that drafts are accepted; log-probabilities are those of the model, and reveal a wrong state.

The tests load states of prompts, and states at the ends of blocks that answers have filled: vLLM has moved those there
after a step whose drafts went past the end of the block.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.e2e.vllm.answers import Answer, assert_clearly_other, assert_same
from tests.e2e.vllm.checkpoints import DRAFTED_TOKEN, save_drafting_qwen3_next
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_pool import EnginePool
from tests.e2e.vllm.engine_process import EngineFailedError, EngineProcess
from tests.e2e.vllm.families import FAMILIES, save_family
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.recurrent import (
    EACH_BLOCK,
    REPLAY_TOLERANCE,
    assert_same_or_replayed,
    found_of,
    options_with,
)
from tests.e2e.vllm.settings import NGRAM, settings_with

pytestmark = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a recurrent state"
)

NO_NGRAM = {
    "speculative_config": {**NGRAM["speculative_config"], "prompt_lookup_max": 200, "prompt_lookup_min": 200}
}
"""An engine that may draft and never does: no prompt repeats so many tokens."""

MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}

WHOLE_MTP = {"speculative_config": {**MTP["speculative_config"], "disable_eagle_block_drop": True}}
"""vLLM takes a block back from each hit of its own cache, for better drafts. This one does not, as kvtier does not: so
it goes on from the same states."""

PROMPTS = [make_prompt(500 + length, length) for length in (200, 250, 450, 511, 512, 700)]

CROWD = [make_prompt(300 + seed, 1010) for seed in range(6)]
"""Prompts of which a tight pool pre-empts some."""

LONG, MEDIUM, SHORT = 72, 60, 24

HOST = {"cpu_bytes_to_use": "256MiB"}

ROOMY_POOL_BLOCKS, TIGHT_POOL_BLOCKS = 200, 60


@dataclass(frozen=True, slots=True)
class Drafting:
    """How an engine drafts.

    Attributes:
        arguments: of vLLM.
        alone: those of the engine without kvtier that answers are compared with.
        tokens: what answers are made of.
        num_tight_blocks: of a pool in which six requests of four blocks cannot all go on.
        changed: the turns whose states are damaged, and the last token of those states, which answers have computed.
    """

    arguments: dict[str, Any]
    alone: dict[str, Any]
    tokens: tuple[int, ...]
    num_tight_blocks: int
    changed: tuple[int, int, int]

    def sampling(self, num_tokens: int) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": num_tokens, "allowed_token_ids": list(self.tokens)}


METHODS = {
    "n-grams": Drafting(NGRAM, NGRAM, (7, 8), 36, (0, 1, 255)),
    "MTP": Drafting(MTP, WHOLE_MTP, (DRAFTED_TOKEN, 8), 35, (2, 3, 511)),
}


def options_of(
    model: str,
    arguments: dict[str, Any],
    settings: dict[str, Any] | None = None,
    num_device_blocks: int = ROOMY_POOL_BLOCKS,
    *,
    is_asynchronous: bool = False,
) -> EngineOptions:
    options = options_with(
        model,
        settings,
        num_device_blocks,
        is_asynchronous=is_asynchronous,
        engine_arguments={**EACH_BLOCK, **arguments},
    )
    return replace(options, has_state_kernels=True)


def make_turns(answers: list[Answer]) -> list[list[int]]:
    """Return conversations that go on behind the answers to ``PROMPTS``."""
    return [[*prompt, *answer.tokens, 5] for prompt, answer in zip(PROMPTS, answers, strict=True)]


@dataclass(frozen=True, slots=True)
class WithoutKvtier:
    """What vLLM answers without kvtier.

    Attributes:
        drafting: how it drafts.
        model: folder of the checkpoint.
        answers: to ``PROMPTS``, one after the other.
        turns: conversations that go on behind them.
        expected: the answers to those, from states on the device.
        to_crowd: the answers to ``CROWD``, all at once in a roomy pool.
    """

    drafting: Drafting
    model: str
    answers: list[Answer]
    turns: list[list[int]]
    expected: list[Answer]
    to_crowd: list[Answer]

    def options(self, settings: dict[str, Any], num_device_blocks: int = ROOMY_POOL_BLOCKS) -> EngineOptions:
        return options_of(self.model, self.drafting.arguments, settings, num_device_blocks)


@pytest.fixture(scope="module")
def drafting_qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a Qwen3-Next that has a layer to draft with."""
    return str(save_drafting_qwen3_next(tmp_path_factory.mktemp("drafting-qwen3-next")))


@pytest.fixture(scope="module", params=METHODS)
def alone(request: pytest.FixtureRequest, drafting_qwen3_next: str, engines: EnginePool) -> WithoutKvtier:
    drafting = METHODS[request.param]
    options = options_of(drafting_qwen3_next, drafting.alone)
    with engines.borrow(options) as engine:
        answers = engine.call("generate_in_turn", PROMPTS, drafting.sampling(LONG))
        turns = make_turns(answers)
        expected = engine.call("generate_in_turn", turns, drafting.sampling(SHORT))
        engine.call("forget_device")
        to_crowd = engine.call("generate", CROWD, drafting.sampling(SHORT))
    return WithoutKvtier(drafting, drafting_qwen3_next, answers, turns, expected, to_crowd)


def only(token: int) -> dict[str, Any]:
    """Return how to sample one token: rounding leads to no other, and its log-probability says what the model saw."""
    return {"temperature": 0.0, "max_tokens": MEDIUM, "allowed_token_ids": [token]}


@pytest.fixture(scope="module")
def undrafted(drafting_qwen3_next: str, engines: EnginePool) -> dict[int, list[Answer]]:
    """Return the answers of one token, by that token, of an engine without drafts."""
    answers = {}
    with engines.borrow(options_of(drafting_qwen3_next, {})) as engine:
        for token in (7, 8, DRAFTED_TOKEN):
            answers[token] = engine.call("generate_in_turn", PROMPTS, only(token))
            engine.call("forget_device")
    return answers


@pytest.mark.parametrize(
    ("arguments", "token", "is_accepted"),
    [(NGRAM, 7, True), (MTP, DRAFTED_TOKEN, True), (MTP, 8, False)],
    ids=["n-grams", "MTP accepted", "MTP rejected"],
)
def test_vllm_alone_answers_with_the_stand_ins_as_without_drafts(
    drafting_qwen3_next: str,
    undrafted: dict[int, list[Answer]],
    arguments: dict[str, Any],
    token: int,
    is_accepted: bool,
    engines: EnginePool,
) -> None:
    with engines.borrow(options_of(drafting_qwen3_next, arguments)) as engine:
        in_turn = engine.call("generate_in_turn", PROMPTS, only(token))
        engine.call("forget_device")
        together = engine.call("generate", PROMPTS, only(token))
        drafts = engine.call("speculation")

    for answers in (in_turn, together):
        for answer, other in zip(answers, undrafted[token], strict=True):
            pairs = zip(answer.logprobs, other.logprobs, strict=True)
            assert max(abs(one - two) for one, two in pairs) < REPLAY_TOLERANCE
    assert drafts["drafts"] > 100
    assert drafts["accepted_tokens"] == (drafts["draft_tokens"] if is_accepted else 0)


def test_vllm_alone_answers_with_drafts_as_an_engine_that_never_drafts(
    drafting_qwen3_next: str, engines: EnginePool
) -> None:
    # Both convolve alike, token by token: there is nothing to round, and drafts that are rejected leave nothing.
    sampling = METHODS["n-grams"].sampling(LONG)
    with engines.borrow(options_of(drafting_qwen3_next, NO_NGRAM)) as engine:
        expected = engine.call("generate_in_turn", PROMPTS, sampling)
        assert engine.call("speculation")["drafts"] == 0
    with engines.borrow(options_of(drafting_qwen3_next, NGRAM)) as engine:
        answers = engine.call("generate_in_turn", PROMPTS, sampling)
        drafts = engine.call("speculation")

    for answer, other in zip(answers, expected, strict=True):
        assert answer.tokens == other.tokens
        assert max(abs(one - two) for one, two in zip(answer.logprobs, other.logprobs, strict=True)) < 0.02
    assert 0 < drafts["accepted_tokens"] < drafts["draft_tokens"]


def test_states_of_answers_come_back_from_host_memory_and_from_disk(
    alone: WithoutKvtier, tmp_path: Path
) -> None:
    drafting, found = alone.drafting, found_of(alone.expected)
    options = alone.options(settings_with(tmp_path / "blocks"), TIGHT_POOL_BLOCKS)
    with EngineProcess(options) as engine:
        computed = engine.call("generate_in_turn", PROMPTS, drafting.sampling(LONG))
        engine.call("generate_in_turn", [make_prompt(seed, 1900) for seed in range(6)], drafting.sampling(1))
        before = engine.call("stats").get("connector.loaded_tokens.CPU", 0)
        pushed_out = engine.call("generate_in_turn", alone.turns, drafting.sampling(SHORT))
        after = engine.call("stats")["connector.loaded_tokens.CPU"]
        engine.call("forget_device")
        together = engine.call("generate", alone.turns, drafting.sampling(SHORT))
        drafts = engine.call("speculation")
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")
        assert engine.call("num_known_requests") == 0

    with EngineProcess(options) as engine:
        restarted = engine.call("generate_in_turn", alone.turns, drafting.sampling(SHORT))
        of_restart = engine.call("stats")
        drafts_of_restart = engine.call("speculation")

    assert_same(computed, alone.answers)
    assert_same(pushed_out, alone.expected)
    # Requests of one step round otherwise than one alone, and go on from later states than the first time.
    for answers in (together, restarted):
        assert_same_or_replayed(answers, alone.expected, len(alone.turns))
    assert found_of(pushed_out) == found
    assert after - before == sum(found) > 0
    assert found_of(restarted) == found_of(together)
    assert sum(found_of(together)) >= sum(found)
    assert of_restart["connector.loaded_tokens.fs"] == sum(found_of(restarted))
    assert stats["connector.open_jobs"] == 0
    for counted in (drafts, drafts_of_restart):
        assert 0 < counted["accepted_tokens"] < counted["draft_tokens"]


def test_the_comparison_sees_a_zeroed_and_a_swapped_state(alone: WithoutKvtier, engines: EnginePool) -> None:
    sampling, (one, two, last) = alone.drafting.sampling(SHORT), alone.drafting.changed
    of_answer, other, intact = alone.turns[one], alone.turns[two], alone.turns[5]
    with engines.borrow(alone.options(HOST)) as engine:
        engine.call("generate_in_turn", PROMPTS, alone.drafting.sampling(LONG))
        engine.call("settle")
        groups = engine.call("state_groups")
        for group in groups:
            engine.call("swap_held_blocks", of_answer, other, group, last)
        engine.call("forget_device")
        swapped = engine.call("generate_in_turn", [of_answer, other, intact], sampling)
        for group in groups:
            engine.call("zero_held_block", of_answer, group, last)
        engine.call("forget_device")
        zeroed = engine.call("generate_in_turn", [of_answer, intact], sampling)

    expected = [alone.expected[position] for position in (one, two, 5)]
    assert found_of(swapped) == found_of(expected)
    assert_clearly_other(swapped[:1], expected[:1])
    assert_clearly_other(swapped[1:2], expected[1:2])
    assert_clearly_other(zeroed[:1], expected[:1])
    assert_same([swapped[2], zeroed[1]], [expected[2], expected[2]])


def test_an_abort_and_a_reset_leave_nothing_wrong_behind(alone: WithoutKvtier, engines: EnginePool) -> None:
    sampling = alone.drafting.sampling(SHORT)
    with engines.borrow(alone.options(HOST)) as engine:
        engine.call("generate_in_turn", PROMPTS, alone.drafting.sampling(LONG))
        engine.call("forget_device")
        assert engine.call("abort_while_loading", alone.turns[0])
        after_abort = engine.call("generate", alone.turns, sampling)
        engine.call("abort_while_computing", make_prompt(7, 1900))
        assert engine.call("reset")
        after_reset = engine.call("generate_in_turn", PROMPTS, alone.drafting.sampling(LONG))
        engine.call("forget_device")
        again = engine.call("generate_in_turn", alone.turns, sampling)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(after_abort, alone.expected)
    assert_same(after_reset, alone.answers)
    assert_same(again, alone.expected)
    assert found_of(after_reset) == [0] * len(PROMPTS)
    assert found_of(again) == found_of(alone.expected)
    assert stats["connector.open_jobs"] == 0


def test_a_pre_empted_request_goes_on_from_its_state(alone: WithoutKvtier) -> None:
    sampling = alone.drafting.sampling(SHORT)
    with EngineProcess(
        alone.options({"cpu_bytes_to_use": "128MiB"}, alone.drafting.num_tight_blocks)
    ) as engine:
        answers = engine.call("generate", CROWD, sampling)
        again = engine.call("generate", CROWD, sampling)
        engine.call("settle")
        engine.call("check")
        num_preemptions = engine.call("num_preemptions")
        drafts = engine.call("speculation")

    assert num_preemptions > 0
    assert drafts["accepted_tokens"] > 0
    assert_same_or_replayed(answers, alone.to_crowd, num_preemptions)
    assert_same_or_replayed(again, alone.to_crowd, num_preemptions)


def test_drafts_beside_states_with_two_steps_under_way_are_refused_at_start(drafting_qwen3_next: str) -> None:
    # vLLM 0.32 without kvtier: after a pre-emption log-probabilities are up to 4 apart from those of a roomy pool.
    options = options_of(drafting_qwen3_next, MTP, {"cpu_bytes_to_use": "64MiB"}, is_asynchronous=True)

    with pytest.raises(EngineFailedError, match=r"async_scheduling=True.*--no-async-scheduling"):
        EngineProcess(options).__enter__()


def test_drafts_beside_states_of_another_kind_are_refused_at_start(tmp_path: Path) -> None:
    model = str(save_family(FAMILIES["lfm2"], tmp_path))
    options = options_with(model, {"cpu_bytes_to_use": "64MiB"}, engine_arguments=NGRAM)

    with pytest.raises(
        EngineFailedError, match=r"speculative_config='ngram'.*recurrent states of kind SHORT_CONV"
    ):
        EngineProcess(options).__enter__()
