"""A copy that fails costs a hit: the request is computed, nobody waits, the engine lives."""

from collections.abc import Sequence

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import Answer, assert_same
from tests.e2e.vllm.conftest import Controls
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults, Spoil
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle

PROMPTS = make_cycle(4)

FAULTY = {
    "cpu_bytes_to_use": "128MiB",
    "secondary_tiers": [],
    "spec_name": "FaultySpec",
    "spec_module_path": "tests.e2e.vllm.faulty_spec",
}

TIGHT_POOL_BLOCKS = 36
"""A prompt and its answer take 33 device blocks; one is vLLM's own."""

SHORT_CONTEXT = {"max_model_len": 1056}
"""vLLM wants a pool that holds one request of this length."""


def serve(options: EngineOptions) -> tuple[list[Answer], list[Answer], dict[str, float]]:
    """Answer the prompts, empty the device, answer them again."""
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        again = engine.call("generate", PROMPTS, GREEDY)
        engine.call("settle")
        engine.call("check")
        assert engine.call("num_known_requests") == 0
        return first, again, engine.call("stats")


def num_computed(answers: Sequence[Answer]) -> int:
    """Return how many prompts were not answered from a cache."""
    return sum(answer.num_cached_tokens < WHOLE_TOKENS for answer in answers)


@pytest.mark.parametrize("spoil", ["first", "middle", "last"])
def test_a_spoiled_block_is_computed_wherever_it_is(
    llama: str, llama_controls: Controls, spoil: Spoil
) -> None:
    faults = CopyFaults(fail_every_load=2, spoil=spoil)
    first, again, stats = serve(EngineOptions(llama, FAULTY, environment=faults.to_environment()))

    assert_same(first, llama_controls.in_turn[:4])
    assert_same(again, llama_controls.in_turn[:4])
    assert stats["connector.failed_load_jobs"] == 2
    assert num_computed(again) == 2


def test_loads_fail_in_a_pool_of_barely_one_request(llama: str, llama_controls: Controls) -> None:
    faults = CopyFaults(fail_every_load=2)
    options = EngineOptions(
        llama,
        FAULTY,
        TIGHT_POOL_BLOCKS,
        engine_arguments=SHORT_CONTEXT,
        environment=faults.to_environment(),
    )
    first, again, stats = serve(options)

    assert_same(first, llama_controls.in_turn[:4])
    assert_same(again, llama_controls.in_turn[:4])
    assert stats["connector.failed_load_jobs"] >= 1


@pytest.mark.parametrize("spoil", ["first", "middle", "last"])
def test_a_hybrid_model_is_computed_after_a_failed_load(
    gemma: str, gemma_controls: Controls, spoil: Spoil
) -> None:
    faults = CopyFaults(fail_every_load=2, spoil=spoil)
    options = EngineOptions(gemma, FAULTY, 300, environment=faults.to_environment())
    first, again, stats = serve(options)

    assert_same(first, gemma_controls.in_turn[:4])
    assert_same(again, gemma_controls.in_turn[:4])
    assert stats["connector.failed_load_jobs"] == 2
    assert num_computed(again) == 2


def test_failed_stores_are_misses_later(llama: str, llama_controls: Controls) -> None:
    faults = CopyFaults(fail_every_store=2)
    first, again, stats = serve(EngineOptions(llama, FAULTY, environment=faults.to_environment()))

    assert_same(first, llama_controls.in_turn[:4])
    assert_same(again, llama_controls.in_turn[:4])
    assert stats["connector.failed_store_jobs"] > 0
    assert num_computed(again) > 0


def test_an_abort_in_flight_lets_everything_go(llama: str, llama_controls: Controls) -> None:
    with EngineProcess(EngineOptions(llama, FAULTY)) as engine:
        engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("forget_device")
        assert engine.call("abort_while_loading", PROMPTS[0])

        answers = engine.call("generate", PROMPTS, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(answers, llama_controls.in_turn[:4])
    assert [answer.num_cached_tokens for answer in answers] == [WHOLE_TOKENS] * 4
    assert stats["connector.requests"] == 0
    assert stats["connector.open_jobs"] == 0
