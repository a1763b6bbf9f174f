"""What left the device comes back from host memory, and from disk after a restart, as vLLM alone would answer.

A Llama, a Gemma-3 and a Qwen3-Next, some with two steps under way as vLLM schedules on GPUs. There a step is planned
before the last one's tokens are known, so a block of an answer ends a step before vLLM can name it.
"""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import assert_clearly_other, assert_same
from tests.e2e.vllm.bench import FOUR, LONGER, Bench, each
from tests.e2e.vllm.conftest import CONTROL_POOL_BLOCKS
from tests.e2e.vllm.engine_host import BLOCK_TOKENS, WHOLE_PROMPTS
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, SEEDED, WHOLE_TOKENS, make_prompt
from tests.e2e.vllm.recurrent import found_of
from tests.e2e.vllm.settings import settings_with
from tests.tiering.fs.slots import stored_blocks


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

    blocks = {block.name: block for block in stored_blocks(tmp_path / "blocks")}
    torn, swapped, other = (blocks[of_prompt[0]] for of_prompt in keys)
    torn.write(torn.read()[:5000].ljust(torn.geometry.slot_bytes, b"\0"))
    state, swap = swapped.read(), other.read()
    swapped.write(swap)
    other.write(state)

    with EngineProcess(options) as engine:
        answers = engine.call("generate", kind.prompts, kind.sampling)
        stats = engine.call("stats")
        engine.call("check")

    assert_same(answers, bench.expected())
    assert found_of(answers) == [0, 0, 0, *kind.found[3:]]
    assert stats["connector.loaded_tokens.fs"] == sum(kind.found[3:])
