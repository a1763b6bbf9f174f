"""Bytes that two workers both hold are kept once in host memory alone, and answers stay the same, also of latents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
from tests.e2e.vllm import recurrent
from tests.e2e.vllm.answers import Answer, assert_clearly_other, assert_same
from tests.e2e.vllm.checkpoints import save_deepseek, save_one_headed, save_qwen3_next
from tests.e2e.vllm.engine_host import BLOCK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle, make_prompt
from tests.e2e.vllm.settings import settings_with
from tests.e2e.vllm.test_tensor_parallel import ONE_CORE_EACH, TWO_WORKERS, num_computed

from kvtier.cpu.region_file import SHARED_MEMORY_DIRECTORY
from kvtier.limits import count_usable_cores

PROMPTS = make_cycle(4)
HOST_ONLY = {"cpu_bytes_to_use": "128MiB", "instance_id": "test-shared-parts"}
TOKEN_BYTES = 4 * 2 * 64 * 4
"""Bytes of keys and values of four layers with one head of 64 float32: what each worker holds of a token."""

LATENT_BLOCK_TOKENS = 16
"""vLLM's attention for latents on CPUs has no other block."""

LATENT_TOKEN_BYTES = 2 * (512 + 64) * 4
"""Bytes of a token in two layers of latents with their rotated key, float32."""

LATENT_TOKENS = 10 * LATENT_BLOCK_TOKENS
LATENT_PROMPTS = [make_prompt(seed, LATENT_TOKENS + 1) for seed in range(4)]
"""Whole blocks and one token: the only rest that vLLM's attention for latents on CPUs computes behind held tokens. That
kernel and the one for prompts differ by more than rounding, so answers are compared with those of the same kernel."""

pytestmark = pytest.mark.skipif(count_usable_cores() < 2, reason="two workers need two cores")


@pytest.fixture(scope="module")
def one_headed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint whose only KV head both workers hold."""
    return str(save_one_headed(tmp_path_factory.mktemp("one-headed") / "model"))


@pytest.fixture(scope="module")
def control(one_headed: str) -> list[Answer]:
    """Return what vLLM answers without kvtier, with two workers."""
    options = EngineOptions(one_headed, engine_arguments=TWO_WORKERS, environment=ONE_CORE_EACH)
    with EngineProcess(options) as engine:
        answers: list[Answer] = engine.call("generate_in_turn", PROMPTS, GREEDY)
    return answers


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that an engine that has ended leaves no shared memory."""
    yield
    assert not [path for path in SHARED_MEMORY_DIRECTORY.iterdir() if "test-shared-parts" in path.name]


def test_host_memory_alone_has_the_bytes_once_through_abort_reset_and_restart(
    one_headed: str, control: list[Answer]
) -> None:
    options = EngineOptions(one_headed, HOST_ONLY, engine_arguments=TWO_WORKERS, environment=ONE_CORE_EACH)
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        from_host = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
        stats = engine.call("stats")
        num_blocks, row_bytes = engine.call("host_rows")
        engine.call("forget_device")
        was_loading = engine.call("abort_while_loading", PROMPTS[0])
        engine.call("forget_device")
        after_abort = engine.call("generate", PROMPTS, GREEDY)
        engine.call("check")
        engine.call("reset")
        after_reset = engine.call("generate_in_turn", PROMPTS[:2], GREEDY)
        engine.call("check")
    with EngineProcess(options, is_new_interpreter=True) as engine:
        restarted = engine.call("generate_in_turn", PROMPTS[:1], GREEDY)
        engine.call("forget_device")
        loaded = engine.call("generate_in_turn", PROMPTS[:1], GREEDY)

    assert was_loading
    for answers in (first, from_host, after_abort, after_reset, restarted, loaded):
        assert_same(answers, control[: len(answers)])
    for answers in (from_host, after_abort, loaded):
        assert [answer.num_cached_tokens for answer in answers] == [WHOLE_TOKENS] * len(answers)
    for answers in (first, after_reset, restarted):
        assert [answer.num_cached_tokens for answer in answers] == [0] * len(answers)
    # The first worker stores, with a block that each answer has filled; both load. A row is one worker's block.
    assert stats["connector.store_bytes"] == 4 * (WHOLE_TOKENS + BLOCK_TOKENS) * TOKEN_BYTES
    assert stats["connector.load_bytes"] == 2 * 4 * WHOLE_TOKENS * TOKEN_BYTES
    assert row_bytes == BLOCK_TOKENS * TOKEN_BYTES
    assert num_blocks == 2**27 // row_bytes


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_fails_stores_and_loads_of_what_both_share(
    one_headed: str, control: list[Answer], rank: int
) -> None:
    faults = CopyFaults(rank=rank, fail_every_load=2, fail_every_store=4, spoil="middle")
    settings = {
        **HOST_ONLY,
        "spec_name": "FaultyHostSpec",
        "spec_module_path": "tests.e2e.vllm.faulty_spec",
    }
    options = EngineOptions(
        one_headed,
        settings,
        engine_arguments=TWO_WORKERS,
        environment=ONE_CORE_EACH | faults.to_environment(),
    )
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        again = engine.call("generate", PROMPTS, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(first, control)
    assert_same(again, control)
    assert stats["connector.failed_store_jobs"] > 0
    assert stats["connector.failed_load_jobs"] > 0
    assert num_computed(again) > 0


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint with latent attention."""
    return str(save_deepseek(tmp_path_factory.mktemp("deepseek") / "model"))


@pytest.fixture(scope="module")
def latents_of_the_device(deepseek: str) -> tuple[list[Answer], list[Answer]]:
    """Return the answers without kvtier: computed, then behind what the device holds."""
    with EngineProcess(with_latents(deepseek, None, **TWO_WORKERS)) as engine:
        computed = engine.call("generate_in_turn", LATENT_PROMPTS, GREEDY)
        return computed, engine.call("generate_in_turn", LATENT_PROMPTS, GREEDY)


def with_latents(
    model: str, settings: dict[str, Any] | None, **arguments: Any
) -> EngineOptions:  # Any: vLLM's own
    """Return how to start an engine that keeps prefixes of latents."""
    return EngineOptions(
        model,
        settings,
        num_device_blocks=160,
        engine_arguments={
            "block_size": LATENT_BLOCK_TOKENS,
            "max_num_batched_tokens": 2048,
            "attention_backend": "CPU_MLA",  # with AMX tiles vLLM takes one that refuses float32
            **arguments,
        },
        environment=ONE_CORE_EACH if arguments else {},
        keeps_prefix_caching=True,
    )


@pytest.mark.parametrize("has_tiers", [False, True])
def test_latents_are_kept_once_and_answer_as_those_of_the_device_do(
    deepseek: str,
    latents_of_the_device: tuple[list[Answer], list[Answer]],
    tmp_path: Path,
    *,
    has_tiers: bool,
) -> None:
    computed, from_device = latents_of_the_device
    settings = settings_with(tmp_path / "blocks") if has_tiers else HOST_ONLY
    with EngineProcess(with_latents(deepseek, settings, **TWO_WORKERS)) as engine:
        first = engine.call("generate_in_turn", LATENT_PROMPTS, GREEDY)
        engine.call("settle")
        stored = engine.call("stats")
        engine.call("forget_device")
        from_host = engine.call("generate_in_turn", LATENT_PROMPTS, GREEDY)
        engine.call("settle")
        stats = engine.call("stats")
        engine.call("check")
    answers_of = [from_host]
    if has_tiers:
        with EngineProcess(with_latents(deepseek, settings, **TWO_WORKERS)) as engine:
            answers_of.append(engine.call("generate_in_turn", LATENT_PROMPTS, GREEDY))
            engine.call("check")

    assert_same(first, computed)
    assert [answer.num_cached_tokens for answer in from_device] == [LATENT_TOKENS] * 4
    for answers in answers_of:
        assert_same(answers, from_device)
        assert [answer.num_cached_tokens for answer in answers] == [LATENT_TOKENS] * 4
    # A prompt's last token and all but the last of its answer fill one more block.
    assert stored["connector.store_bytes"] == 4 * (LATENT_TOKENS + LATENT_BLOCK_TOKENS) * LATENT_TOKEN_BYTES
    assert stats["connector.load_bytes"] == 2 * 4 * LATENT_TOKENS * LATENT_TOKEN_BYTES


def test_the_comparison_sees_a_wrong_block_of_latents(deepseek: str) -> None:
    with EngineProcess(with_latents(deepseek, HOST_ONLY)) as engine:
        engine.call("generate_in_turn", LATENT_PROMPTS[:1], GREEDY)
        from_device = engine.call("generate_in_turn", LATENT_PROMPTS[:1], GREEDY)
        engine.call("forget_device")
        from_host = engine.call("generate_in_turn", LATENT_PROMPTS[:1], GREEDY)
        engine.call("forget_device")
        engine.call("zero_held_block", LATENT_PROMPTS[0], 0, 5 * LATENT_BLOCK_TOKENS)
        spoiled = engine.call("generate_in_turn", LATENT_PROMPTS[:1], GREEDY)

    assert_same(from_host, from_device)
    assert from_host[0].num_cached_tokens == spoiled[0].num_cached_tokens == LATENT_TOKENS
    assert_clearly_other(spoiled, from_device)


@pytest.mark.skipif(
    vllm.__version_tuple__[:2] < (0, 32), reason="this vLLM does not say which blocks hold a state"
)
def test_beside_states_of_their_own_each_worker_keeps_its_copy_of_the_head_that_both_hold(
    tmp_path: Path,
) -> None:
    def options(settings: dict[str, Any] | None) -> EngineOptions:  # Any: a user's JSON
        arguments = {**recurrent.ARGUMENTS, **TWO_WORKERS}
        return EngineOptions(model, settings, 90, engine_arguments=arguments, environment=ONE_CORE_EACH)

    model = str(save_qwen3_next(tmp_path / "model", num_kv_heads=1))
    prompts, found = recurrent.PROMPTS[:4], recurrent.FOUND[:4]
    with EngineProcess(options(None)) as engine:
        alone = engine.call("generate_in_turn", prompts, recurrent.GREEDY)
    with EngineProcess(options(HOST_ONLY)) as engine:
        first = engine.call("generate_in_turn", prompts, recurrent.GREEDY)
        engine.call("forget_device")
        from_host = engine.call("generate_in_turn", prompts, recurrent.GREEDY)
        parts = engine.call("row_parts")
        engine.call("check")

    assert_same(first, alone)
    assert_same(from_host, alone)
    assert [answer.num_cached_tokens for answer in from_host] == found
    # Three groups of states, of which each worker has its own, and attention, of which both have the same.
    assert parts == ([False, False, False, True], 2)
