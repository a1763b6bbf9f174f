"""Two workers in two processes: a job counts when both have ended it, and one failure fails it for both."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import Answer, assert_same
from tests.e2e.vllm.engine_host import BLOCK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle
from tests.e2e.vllm.settings import FAULTY, settings_with

from kvtier.limits import count_usable_cores

PROMPTS = make_cycle(4)
TWO_WORKERS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "tests.e2e.vllm.without_tiles.WithoutTiles",
}
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def num_computed(answers: list[Answer]) -> int:
    """Return how many prompts were not answered from a cache."""
    return sum(answer.num_cached_tokens < WHOLE_TOKENS for answer in answers)


pytestmark = pytest.mark.skipif(count_usable_cores() < 2, reason="two workers need two cores")


def test_two_workers_answer_from_host_memory_and_from_disk(
    llama: str, llama_controls: list[Answer], tmp_path: Path
) -> None:
    options = EngineOptions(
        llama,
        settings_with(tmp_path / "blocks"),
        engine_arguments=TWO_WORKERS,
        environment=ONE_CORE_EACH,
    )
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        from_host = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
    with EngineProcess(options) as engine:
        from_disk = engine.call("generate_in_turn", PROMPTS, GREEDY)
        stats = engine.call("stats")
        engine.call("check")

    for answers in (first, from_host, from_disk):
        assert_same(answers, llama_controls[:4])
    assert [answer.num_cached_tokens for answer in from_host] == [WHOLE_TOKENS] * 4
    assert [answer.num_cached_tokens for answer in from_disk] == [WHOLE_TOKENS] * 4
    assert stats["connector.loaded_tokens.fs"] == 4 * WHOLE_TOKENS


def test_two_workers_with_the_same_bytes_keep_them_once(tmp_path: Path) -> None:
    from tests.e2e.vllm.checkpoints import save_one_headed

    options = EngineOptions(
        str(save_one_headed(tmp_path / "model")),
        settings_with(tmp_path / "blocks"),
        engine_arguments=TWO_WORKERS,
        environment=ONE_CORE_EACH,
    )
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        from_host = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
        stats = engine.call("stats")
    with EngineProcess(options) as engine:
        from_disk = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("check")

    for answers in (from_host, from_disk):
        assert_same(answers, first)
        assert [answer.num_cached_tokens for answer in answers] == [WHOLE_TOKENS] * 4
    # Keys and values of four layers with one head of 64 float32: one worker stores them, with a block that each answer
    # has filled; both load them.
    token_bytes = 4 * 2 * 64 * 4
    assert stats["connector.store_bytes"] == 4 * (WHOLE_TOKENS + BLOCK_TOKENS) * token_bytes
    assert stats["connector.load_bytes"] == 2 * 4 * WHOLE_TOKENS * token_bytes


def test_one_worker_of_two_fails_stores_and_loads(llama: str, llama_controls: list[Answer]) -> None:
    faults = CopyFaults(rank=1, fail_every_load=2, fail_every_store=4, spoil="middle")
    options = EngineOptions(
        llama,
        FAULTY,
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

    assert_same(first, llama_controls[:4])
    assert_same(again, llama_controls[:4])
    assert stats["connector.failed_store_jobs"] > 0
    assert stats["connector.failed_load_jobs"] > 0
    assert num_computed(again) > 0
