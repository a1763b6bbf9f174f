"""A Qwen3-Next, most layers of which keep a recurrent state, answers from kvtier what it answers without."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.e2e.vllm.answers import Answer, assert_clearly_other, assert_same
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.recurrent import (
    FOUND,
    GREEDY,
    PROMPTS,
    assert_same_or_replayed,
    found_of,
    options_with,
)
from tests.e2e.vllm.test_failed_loads import FAULTY
from tests.e2e.vllm.test_fs_tier import settings_with

pytestmark = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a recurrent state"
)

STATE_GROUPS = (0, 1, 2)
HIGH_BYTE = 4_000 * 4 + 3
"""A byte of sign and exponent of one number in a state, behind its 3,072 bytes of convolution."""


@pytest.fixture(scope="module")
def engine(qwen3_next: str) -> Iterator[EngineProcess]:
    """Return an engine with a host tier, whose pool holds a part of the prompts."""
    with EngineProcess(options_with(qwen3_next, {"cpu_bytes_to_use": "256MiB"})) as engine:
        yield engine


def test_prompts_that_left_the_pool_are_answered_from_host_memory(
    engine: EngineProcess, recurrent_controls: list[Answer]
) -> None:
    first = engine.call("generate_in_turn", PROMPTS, GREEDY)
    again = engine.call("generate_in_turn", PROMPTS, GREEDY)
    engine.call("forget_device")
    together = engine.call("generate", PROMPTS, GREEDY)
    engine.call("check")
    stats = engine.call("stats")

    assert_same(first, recurrent_controls)
    assert_same(again, recurrent_controls)
    assert_same(together, recurrent_controls)
    assert found_of(first) == [0] * len(PROMPTS)
    assert found_of(again) == found_of(together) == FOUND
    assert stats["connector.loaded_tokens.CPU"] >= sum(FOUND)


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

    assert_same(after_abort, recurrent_controls)
    assert_same(after_reset, recurrent_controls)
    assert_same(again, recurrent_controls)
    assert found_of(after_reset) == [0] * len(PROMPTS)
    assert found_of(again) == FOUND
    assert engine.call("stats")["connector.open_jobs"] == 0


def test_the_comparison_sees_one_wrong_byte_of_a_state(
    engine: EngineProcess, recurrent_controls: list[Answer]
) -> None:
    engine.call("generate_in_turn", PROMPTS[:2], GREEDY)
    engine.call("forget_device")
    engine.call("flip_held_byte", PROMPTS[0], STATE_GROUPS[1], FOUND[0] - 1, HIGH_BYTE)

    spoiled, intact = engine.call("generate_in_turn", PROMPTS[:2], GREEDY)
    engine.call("reset")

    assert_clearly_other([spoiled], recurrent_controls[:1])
    assert_same([intact], recurrent_controls[1:2])


def test_a_shared_beginning_whose_state_was_passed_over_names_the_group_that_is_short(
    engine: EngineProcess, recurrent_controls: list[Answer]
) -> None:
    engine.call("reset")
    engine.call("generate_in_turn", PROMPTS[:1], GREEDY)
    engine.call("forget_device")
    before = engine.call("stats")

    # Its first 1,000 tokens are held by attention; of the state there is only the one after 1,792.
    branch = PROMPTS[0][:1000] + make_prompt(8, 100)
    answers = engine.call("generate_in_turn", [branch], GREEDY)
    after = engine.call("stats")

    assert found_of(answers) == [0]
    name = "connector.missed_tokens.group_short"
    assert after[name] - before.get(name, 0.0) == 768


def test_a_pre_empted_request_goes_on_from_its_state(qwen3_next: str) -> None:
    prompts = [make_prompt(300 + seed, 1010) for seed in range(6)]
    sampling = {"temperature": 0.0, "max_tokens": 40}
    with EngineProcess(options_with(qwen3_next, None, num_device_blocks=200)) as engine:
        expected = engine.call("generate", prompts, sampling)

    tight = options_with(qwen3_next, {"cpu_bytes_to_use": "128MiB"}, num_device_blocks=46)
    with EngineProcess(tight) as engine:
        answers = engine.call("generate", prompts, sampling)
        again = engine.call("generate", prompts, sampling)
        engine.call("check")
        num_preemptions = engine.call("num_preemptions")

    assert num_preemptions > 0
    assert_same_or_replayed(answers, expected, num_preemptions)
    assert_same_or_replayed(again, expected, num_preemptions)


def test_a_failed_load_is_computed_from_the_first_token(
    qwen3_next: str, recurrent_controls: list[Answer]
) -> None:
    faults = CopyFaults(fail_every_load=2, spoil="last")
    options = options_with(qwen3_next, FAULTY, environment=faults.to_environment())
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


def test_a_restarted_engine_is_answered_from_disk_and_computes_what_is_damaged_there(
    qwen3_next: str, recurrent_controls: list[Answer], tmp_path: Path
) -> None:
    options = options_with(qwen3_next, settings_with(tmp_path / "blocks"))
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
        keys = [
            [engine.call("key_of", prompt, group, found - 1) for group in STATE_GROUPS]
            for prompt, found in zip(PROMPTS[:3], FOUND, strict=False)
        ]

    files = {path.stem: path for path in (tmp_path / "blocks").rglob("*") if path.is_file()}
    truncated, swapped, other = (files[of_prompt[0].hex()] for of_prompt in keys)
    truncated.write_bytes(truncated.read_bytes()[:5000])
    state, swap = swapped.read_bytes(), other.read_bytes()
    swapped.write_bytes(swap)
    other.write_bytes(state)

    with EngineProcess(options) as engine:
        answers = engine.call("generate", PROMPTS, GREEDY)
        stats = engine.call("stats")
        engine.call("check")

    assert_same(answers, recurrent_controls)
    assert found_of(answers) == [0, 0, 0, *FOUND[3:]]
    assert stats["connector.loaded_tokens.fs"] == sum(FOUND[3:])
