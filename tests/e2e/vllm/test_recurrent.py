"""A Qwen3-Next, most layers of which keep a recurrent state, answers from kvtier what it answers without.

The lengths end inside a block, at its end, and a token to each side of it; the state of a prompt is found at the last
end of a block before its last token.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.e2e.vllm.answers import LOGPROB_TOLERANCE, Answer, assert_clearly_other, assert_same
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults
from tests.e2e.vllm.prompts import make_prompt
from tests.e2e.vllm.test_failed_loads import FAULTY
from tests.e2e.vllm.test_fs_tier import settings_with

pytestmark = pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a recurrent state"
)

BLOCK_TOKENS = 256
"""Tokens of a block, so that a page of attention is not smaller than one of a state."""

LENGTHS = (1900, 1024, 1025, 1023, 600, 513, 300, 256, 1300, 200)
PROMPTS = [make_prompt(100 + length, length) for length in LENGTHS]
FOUND = [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in LENGTHS]
"""Of each prompt the tokens whose attention and state are kept."""

GREEDY = {"temperature": 0.0, "max_tokens": 16}

ARGUMENTS = {
    "dtype": "bfloat16",
    "block_size": BLOCK_TOKENS,
    "mamba_cache_mode": "align",
    "enable_prefix_caching": True,
}
POOL_BLOCKS = 90
"""Each of the ten prompts takes up to eight blocks of attention and six of states, two for each layer: not all fit."""

REPLAY_TOLERANCE = 0.25
"""Largest difference of a log-probability when a pre-empted request computes in chunks what it had computed token by
token, in bfloat16: vLLM without kvtier shows 0.09. A state that is zeroed changes most by more, and the first token."""

STATE_GROUPS = (0, 1, 2)
HIGH_BYTE = 4_000 * 4 + 3
"""A byte of sign and exponent of one number in a state, behind its 3,072 bytes of convolution."""


def options_with(
    model: str,
    settings: dict[str, Any] | None,  # Any: a user's JSON
    num_device_blocks: int = POOL_BLOCKS,
    environment: dict[str, str] | None = None,
) -> EngineOptions:
    """Return how to start an engine that runs ten requests at a time."""
    return EngineOptions(model, settings, num_device_blocks, 10, ARGUMENTS, environment or {})


def assert_same_or_replayed(answers: list[Answer], others: list[Answer], num_replayed: int) -> None:
    """Fail unless all but so many answers are the same, and those agree up to where rounding made another token."""
    num_other = 0
    for answer, other in zip(answers, others, strict=True):
        pairs = list(zip(answer.tokens, other.tokens, strict=True))
        num_same = next((at for at, (one, two) in enumerate(pairs) if one != two), len(pairs) - 1)
        logprobs = zip(answer.logprobs[: num_same + 1], other.logprobs, strict=False)
        largest = max(abs(one - two) for one, two in logprobs)
        num_other += largest > LOGPROB_TOLERANCE
        assert largest < REPLAY_TOLERANCE
    assert num_other <= num_replayed


def found_of(answers: list[Answer]) -> list[int]:
    """Return how many tokens of each prompt were not computed."""
    return [answer.num_cached_tokens for answer in answers]


@pytest.fixture(scope="module")
def controls(qwen3_next: str) -> list[Answer]:
    """Return the answers of vLLM without kvtier, one request at a time, nothing cached."""
    with EngineProcess(options_with(qwen3_next, None)) as engine:
        answers: list[Answer] = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        assert_same(engine.call("generate", PROMPTS, GREEDY), answers)
        return answers


@pytest.fixture(scope="module")
def engine(qwen3_next: str) -> Iterator[EngineProcess]:
    """Return an engine with a host tier, whose pool holds a part of the prompts."""
    with EngineProcess(options_with(qwen3_next, {"cpu_bytes_to_use": "256MiB"})) as engine:
        yield engine


def test_prompts_that_left_the_pool_are_answered_from_host_memory(
    engine: EngineProcess, controls: list[Answer]
) -> None:
    first = engine.call("generate_in_turn", PROMPTS, GREEDY)
    again = engine.call("generate_in_turn", PROMPTS, GREEDY)
    engine.call("forget_device")
    together = engine.call("generate", PROMPTS, GREEDY)
    engine.call("check")
    stats = engine.call("stats")

    assert_same(first, controls)
    assert_same(again, controls)
    assert_same(together, controls)
    assert found_of(first) == [0] * len(PROMPTS)
    assert found_of(again) == found_of(together) == FOUND
    assert stats["connector.loaded_tokens.CPU"] >= sum(FOUND)


def test_an_abort_and_a_reset_leave_nothing_wrong_behind(
    engine: EngineProcess, controls: list[Answer]
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

    assert_same(after_abort, controls)
    assert_same(after_reset, controls)
    assert_same(again, controls)
    assert found_of(after_reset) == [0] * len(PROMPTS)
    assert found_of(again) == FOUND
    assert engine.call("stats")["connector.open_jobs"] == 0


def test_the_comparison_sees_one_wrong_byte_of_a_state(engine: EngineProcess, controls: list[Answer]) -> None:
    engine.call("generate_in_turn", PROMPTS[:2], GREEDY)
    engine.call("forget_device")
    engine.call("flip_held_byte", PROMPTS[0], STATE_GROUPS[1], FOUND[0] - 1, HIGH_BYTE)

    spoiled, intact = engine.call("generate_in_turn", PROMPTS[:2], GREEDY)
    engine.call("reset")

    assert_clearly_other([spoiled], controls[:1])
    assert_same([intact], controls[1:2])


def test_a_shared_beginning_whose_state_was_passed_over_names_the_group_that_is_short(
    engine: EngineProcess, controls: list[Answer]
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


def test_a_failed_load_is_computed_from_the_first_token(qwen3_next: str, controls: list[Answer]) -> None:
    faults = CopyFaults(fail_every_load=2, spoil="last")
    options = options_with(qwen3_next, FAULTY, environment=faults.to_environment())
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        again = engine.call("generate", PROMPTS, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(again, controls)
    assert stats["connector.failed_load_jobs"] == sum(found > 0 for found in FOUND) // 2
    assert stats["connector.open_jobs"] == 0


def test_a_restarted_engine_is_answered_from_disk_and_computes_what_is_damaged_there(
    qwen3_next: str, controls: list[Answer], tmp_path: Path
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

    assert_same(answers, controls)
    assert found_of(answers) == [0, 0, 0, *FOUND[3:]]
    assert stats["connector.loaded_tokens.fs"] == sum(FOUND[3:])
