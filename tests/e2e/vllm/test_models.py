"""Models with full attention, sliding windows and recurrent states, each in every way that blocks come back.

A Llama, a Gemma-3 and a Qwen3-Next answer what vLLM answers without kvtier: from host memory, behind failed copies,
aborts, resets and pre-emption, from disk after a restart, and with two steps under way as vLLM schedules on GPUs. There
a step is planned before the last one's tokens are known, so a block of an answer ends a step before vLLM can name it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.e2e.vllm import recurrent
from tests.e2e.vllm.answers import Answer, assert_clearly_other, assert_same
from tests.e2e.vllm.conftest import CONTROL_POOL_BLOCKS
from tests.e2e.vllm.engine_host import BLOCK_TOKENS, WHOLE_PROMPTS, EngineOptions
from tests.e2e.vllm.engine_pool import Alone, EnginePool
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults, Spoil
from tests.e2e.vllm.prompts import GREEDY, SEEDED, WHOLE_TOKENS, make_cycle, make_prompt
from tests.e2e.vllm.recurrent import EACH_BLOCK, assert_same_or_replayed, found_of, options_with
from tests.e2e.vllm.settings import FAULTY, NGRAM, NUM_DRAFT_TOKENS, settings_with

CYCLE = make_cycle(10)
FOUR = CYCLE[:4]

needs_states = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a recurrent state"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A model and how its engines are started.

    Attributes:
        checkpoint: the fixture that returns its folder.
        prompts: what it is asked.
        found: of each prompt the tokens that are found again.
        sampling: how it answers.
        num_device_blocks: of an engine that is asked for all of them; without states it holds a part.
        num_copied_blocks: of an engine that is asked for ``copied``.
        copied: the prompts of tests about copies.
        is_asynchronous: whether two steps are under way.
    """

    checkpoint: str
    prompts: list[list[int]]
    found: list[int]
    sampling: dict[str, Any]  # Any: arguments of vLLM's SamplingParams
    num_device_blocks: int
    num_copied_blocks: int
    copied: int = 4
    is_asynchronous: bool = False

    @property
    def has_states(self) -> bool:
        return self.checkpoint == "qwen3_next"

    @property
    def others(self) -> list[list[int]]:
        """Prompts that push the others out of a pool that holds them all, as several requests with states take."""
        return [make_prompt(900 + seed, 1900) for seed in range(8)] if self.has_states else []


ATTENTION = (CYCLE, [WHOLE_TOKENS] * len(CYCLE), GREEDY)
STATES = (recurrent.PROMPTS, recurrent.FOUND, recurrent.GREEDY, recurrent.POOL_BLOCKS, recurrent.POOL_BLOCKS)
NUM_STATES_COPIED = len(recurrent.PROMPTS)

KINDS: Mapping[str, Kind] = {
    "Llama": Kind("llama", *ATTENTION, 270, 72),  # eight prompts and their answers, and two
    "Llama, two steps": Kind("llama", *ATTENTION, 270, 72, is_asynchronous=True),
    "Gemma": Kind("gemma", *ATTENTION, 400, 300),
    "Gemma, two steps": Kind("gemma", *ATTENTION, 400, 300, is_asynchronous=True),
    "Qwen": Kind("qwen3_next", *STATES, NUM_STATES_COPIED),
    "Qwen, two steps": Kind("qwen3_next", *STATES, NUM_STATES_COPIED, is_asynchronous=True),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What a test has of one kind.

    Attributes:
        kind: what it is.
        model: folder of its checkpoint.
        engines: those that it may borrow.
        alone: what vLLM answers without kvtier.
    """

    kind: Kind
    model: str
    engines: EnginePool
    alone: Alone

    def options(
        self,
        settings: dict[str, Any] | None,  # Any: a user's JSON
        num_device_blocks: int | None = None,
        **arguments: Any,  # Any: vLLM's own
    ) -> EngineOptions:
        """Return how to start an engine, with the kind's own pool unless a size is given."""
        blocks = self.kind.num_device_blocks if num_device_blocks is None else num_device_blocks
        is_asynchronous = self.kind.is_asynchronous and settings is not None
        if self.kind.has_states:
            return options_with(
                self.model, settings, blocks, is_asynchronous=is_asynchronous, engine_arguments=arguments
            )
        return EngineOptions(
            self.model, settings, blocks, engine_arguments=arguments, is_asynchronous=is_asynchronous
        )

    @property
    def on_host(self) -> EngineOptions:
        """Return how to start an engine with host memory for all prompts."""
        return self.options({"cpu_bytes_to_use": "256MiB" if self.kind.has_states else "512MiB"})

    def expected(self, num_prompts: int | None = None, method: str = "generate_in_turn") -> list[Answer]:
        """Return what vLLM answers without kvtier, one prompt at a time or all together."""
        blocks = recurrent.POOL_BLOCKS if self.kind.has_states else CONTROL_POOL_BLOCKS
        answers = self.alone.answers(
            self.options(None, blocks), method, self.kind.prompts, self.kind.sampling
        )
        return answers[:num_prompts]


@pytest.fixture
def bench(request: pytest.FixtureRequest, engines: EnginePool, alone: Alone) -> Bench:
    """Return what a test has of the kind that it is parametrized with; a Llama unless it says so."""
    kind = KINDS[getattr(request, "param", "Llama")]
    return Bench(kind, request.getfixturevalue(kind.checkpoint), engines, alone)


def each(*names: str) -> pytest.MarkDecorator:
    """Run a test with these kinds."""
    marked = [pytest.param(name, marks=needs_states if KINDS[name].has_states else ()) for name in names]
    return pytest.mark.parametrize("bench", marked, indirect=True)


@each("Llama", "Gemma", "Qwen")
def test_controls_agree_at_any_concurrency(bench: Bench) -> None:
    assert_same(bench.expected(), bench.expected(method="generate"))


@each("Llama", "Llama, two steps", "Gemma", "Qwen", "Qwen, two steps")
def test_prompts_that_left_the_pool_are_answered_from_host_memory(bench: Bench) -> None:
    kind = bench.kind
    with bench.engines.borrow(bench.on_host) as engine:
        scheduler = engine.call("scheduler")
        first = engine.call("generate_in_turn", kind.prompts, kind.sampling)
        engine.call("generate_in_turn", kind.others, {"temperature": 0.0, "max_tokens": 1})
        again = engine.call("generate_in_turn", kind.prompts, kind.sampling)
        from_host = engine.call("stats").get("connector.loaded_tokens.CPU", 0)
        engine.call("forget_device")
        in_turn = engine.call("generate_in_turn", kind.prompts[:4], kind.sampling)
        engine.call("forget_device")
        together = engine.call("generate", kind.prompts, kind.sampling)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")
        assert engine.call("num_known_requests") == 0

    assert scheduler == (("AsyncScheduler", 2) if kind.is_asynchronous else ("Scheduler", 1))
    for answers in (first, again, together):
        assert_same(answers, bench.expected())
    assert_same(in_turn, bench.expected(4))
    assert found_of(first) == [0] * len(kind.prompts)
    assert found_of(again) == found_of(together) == kind.found
    assert found_of(in_turn) == kind.found[:4]
    assert from_host > 0
    assert stats["connector.loaded_tokens.CPU"] >= sum(kind.found)


def test_seeded_sampling_draws_the_same_tokens(bench: Bench) -> None:
    host_only = {"cpu_bytes_to_use": "512MiB"}
    expected = bench.alone.answers(
        bench.options(None, CONTROL_POOL_BLOCKS, **WHOLE_PROMPTS), "generate", FOUR, SEEDED
    )
    with bench.engines.borrow(bench.options(host_only, 72, **WHOLE_PROMPTS)) as engine:
        first = engine.call("generate", FOUR, SEEDED)
        again = engine.call("generate", FOUR, SEEDED)

    assert_same(first, expected)
    assert_same(again, expected)
    assert found_of(again) == [WHOLE_TOKENS] * 4


LENGTHS = [num_blocks * BLOCK_TOKENS for num_blocks in (1, 2, 9, 30)]
WHOLE_BLOCKS = [make_prompt(seed, num_tokens) for seed, num_tokens in enumerate(LENGTHS)]


@each("Llama", "Gemma")
def test_prompts_of_whole_blocks_load_them_all_and_answer_the_same(bench: Bench) -> None:
    # A prompt of whole blocks is loaded with its last block: vLLM computes only the last token again.
    with bench.engines.borrow(bench.on_host) as engine:
        first = engine.call("generate_in_turn", WHOLE_BLOCKS, GREEDY)
        engine.call("forget_device")
        in_turn = engine.call("generate_in_turn", WHOLE_BLOCKS, GREEDY)
        engine.call("forget_device")
        together = engine.call("generate", WHOLE_BLOCKS, GREEDY)
        num_loaded_tokens = engine.call("stats")["connector.prompt_tokens.host"]
        from_device = engine.call("generate_in_turn", WHOLE_BLOCKS, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    for again in (in_turn, together, from_device):
        assert_same(again, first)
    # vLLM counts what was loaded, the token among it that it computed again.
    assert found_of(in_turn) == LENGTHS
    assert found_of(together) == LENGTHS
    assert num_loaded_tokens == 2 * (sum(LENGTHS) - len(LENGTHS))
    assert stats["connector.failed_load_jobs"] == 0
    if bench.kind.checkpoint == "llama":
        # The device holds all but the last block, which is too short to be loaded alone. Of a window it holds less.
        held = [num_tokens - BLOCK_TOKENS for num_tokens in LENGTHS]
        assert found_of(from_device)[1:] == held[1:]


def test_the_comparison_sees_a_zeroed_and_a_swapped_block(bench: Bench) -> None:
    with bench.engines.borrow(bench.on_host) as engine:
        engine.call("generate_in_turn", FOUR, GREEDY)
        engine.call("zero_held_block", FOUR[0], 0, 5 * BLOCK_TOKENS)
        # Two blocks of different prompts: attention does not mind the order of blocks of one prompt.
        engine.call("swap_held_blocks", FOUR[1], FOUR[2], 0, 10 * BLOCK_TOKENS)
        engine.call("forget_device")

        zeroed, swapped = engine.call("generate_in_turn", FOUR[:2], GREEDY)

    assert found_of([zeroed, swapped]) == [WHOLE_TOKENS] * 2
    assert_clearly_other([zeroed], bench.expected()[:1])
    assert_clearly_other([swapped], bench.expected()[1:2])


LONGER = {"temperature": 0.0, "max_tokens": 32}


@each("Gemma")
def test_the_comparison_sees_one_wrong_window_block(bench: Bench) -> None:
    # One layer of six sees the block, so that a short answer tells less than the comparison asks for.
    prompts = [make_prompt(seed, 1000) for seed in range(2)]
    expected = bench.alone.answers(
        bench.options(None, CONTROL_POOL_BLOCKS), "generate_in_turn", prompts, LONGER
    )
    with bench.engines.borrow(bench.on_host) as engine:
        engine.call("generate_in_turn", prompts, LONGER)
        engine.call("forget_device")
        engine.call("zero_held_block", prompts[0], 1, WHOLE_TOKENS - 1)

        spoiled, intact = engine.call("generate_in_turn", prompts, LONGER)

    assert_clearly_other([spoiled], expected[:1])
    assert_same([intact], expected[1:])


STATE_GROUPS = (0, 1, 2)
HIGH_BYTE = 4_000 * 4 + 3
"""A byte of sign and exponent of one number in a state, behind its 3,072 bytes of convolution."""


@each("Qwen")
def test_the_comparison_sees_one_wrong_byte_of_a_state(bench: Bench) -> None:
    prompts, end = bench.kind.prompts[:2], bench.kind.found[0]
    with bench.engines.borrow(bench.on_host) as engine:
        engine.call("generate_in_turn", prompts, bench.kind.sampling)
        engine.call("forget_device")
        engine.call("flip_held_byte", prompts[0], STATE_GROUPS[1], end - 1, HIGH_BYTE)

        spoiled, intact = engine.call("generate_in_turn", prompts, bench.kind.sampling)

    assert_clearly_other([spoiled], bench.expected()[:1])
    assert_same([intact], bench.expected()[1:2])


@each("Qwen")
def test_a_shared_beginning_whose_state_was_passed_over_names_the_group_that_is_short(bench: Bench) -> None:
    prompt = bench.kind.prompts[0]
    with bench.engines.borrow(bench.on_host) as engine:
        engine.call("generate_in_turn", [prompt], bench.kind.sampling)
        engine.call("forget_device")
        before = engine.call("stats")

        # Its first 1,000 tokens are held by attention; of the state there is only the one after 1,792.
        branch = prompt[:1000] + make_prompt(8, 100)
        answers = engine.call("generate_in_turn", [branch], bench.kind.sampling)
        after = engine.call("stats")

    assert found_of(answers) == [0]
    name = "connector.missed_tokens.group_short"
    assert after[name] - before.get(name, 0.0) == 768


@each("Llama", "Gemma", "Qwen", "Qwen, two steps")
def test_an_abort_and_a_reset_leave_nothing_wrong_behind(bench: Bench) -> None:
    kind = bench.kind
    with bench.engines.borrow(bench.on_host) as engine:
        engine.call("generate", kind.prompts, kind.sampling)
        engine.call("forget_device")
        assert engine.call("abort_while_loading", kind.prompts[0])
        after_abort = engine.call("generate", kind.prompts, kind.sampling)
        engine.call("abort_while_computing", make_prompt(7_000, 1900))
        assert engine.call("reset")
        after_reset = engine.call("generate", kind.prompts, kind.sampling)
        engine.call("forget_device")
        again = engine.call("generate", kind.prompts, kind.sampling)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    for answers in (after_abort, after_reset, again):
        assert_same(answers, bench.expected())
    assert found_of(after_reset) == [0] * len(kind.prompts)
    assert found_of(after_abort) == found_of(again) == kind.found
    assert stats["connector.requests"] == 0
    assert stats["connector.open_jobs"] == 0


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


@each("Llama", "Gemma")
def test_a_restarted_engine_is_answered_from_disk(bench: Bench, tmp_path: Path) -> None:
    options = bench.options(settings_with(tmp_path / "blocks"), bench.kind.num_copied_blocks)
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", FOUR, GREEDY)
        engine.call("settle")

    with EngineProcess(options, is_new_interpreter=bench.kind.checkpoint == "llama") as engine:
        answers = engine.call("generate_in_turn", FOUR, GREEDY)
        stats = engine.call("stats")
        engine.call("check")

    assert_same(answers, bench.expected(4))
    assert found_of(answers) == [WHOLE_TOKENS] * 4
    assert stats["connector.loaded_tokens.fs"] == 4 * WHOLE_TOKENS


@each("Qwen")
def test_a_restarted_engine_is_answered_from_disk_and_computes_what_is_damaged_there(
    bench: Bench, tmp_path: Path
) -> None:
    kind = bench.kind
    options = bench.options(settings_with(tmp_path / "blocks"))
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", kind.prompts, kind.sampling)
        engine.call("settle")
        keys = [
            [engine.call("key_of", prompt, group, found - 1) for group in STATE_GROUPS]
            for prompt, found in zip(kind.prompts[:3], kind.found, strict=False)
        ]

    files = {path.stem: path for path in (tmp_path / "blocks").rglob("*") if path.is_file()}
    truncated, swapped, other = (files[of_prompt[0].hex()] for of_prompt in keys)
    truncated.write_bytes(truncated.read_bytes()[:5000])
    state, swap = swapped.read_bytes(), other.read_bytes()
    swapped.write_bytes(swap)
    other.write_bytes(state)

    with EngineProcess(options) as engine:
        answers = engine.call("generate", kind.prompts, kind.sampling)
        stats = engine.call("stats")
        engine.call("check")

    assert_same(answers, bench.expected())
    assert found_of(answers) == [0, 0, 0, *kind.found[3:]]
    assert stats["connector.loaded_tokens.fs"] == sum(kind.found[3:])


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
