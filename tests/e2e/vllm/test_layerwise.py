"""A Llama that computes while its prefix is loaded answers what it answers without kvtier, also when a load fails."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.answers import assert_same
from tests.e2e.vllm.conftest import NUM_PROMPTS, Controls
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.faulty_spec import CopyFaults, Spoil
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle

PROMPTS = make_cycle(NUM_PROMPTS)

HOST_ONLY = {"cpu_bytes_to_use": "512MiB", "layerwise_load": True}

FAULTY = {
    "cpu_bytes_to_use": "128MiB",
    "layerwise_load": True,
    "secondary_tiers": [],
    "spec_name": "FaultySpec",
    "spec_module_path": "tests.e2e.vllm.faulty_spec",
}

SKIP_LOAD = {"kv_transfer_params": {"skip_load": True}}

SYNCHRONOUS = {"async_scheduling": False}


@pytest.fixture(scope="module")
def engine(llama: str) -> Iterator[EngineProcess]:
    """Return an engine whose pool holds nine of the twelve prompts."""
    options = EngineOptions(llama, HOST_ONLY, num_device_blocks=300, engine_arguments=SYNCHRONOUS)
    with EngineProcess(options) as engine:
        yield engine


def test_one_request_at_a_time_computes_while_it_is_loaded(
    engine: EngineProcess, llama_controls: Controls
) -> None:
    first = engine.call("generate_in_turn", PROMPTS, GREEDY)
    again = engine.call("generate_in_turn", PROMPTS, GREEDY)

    stats = engine.call("stats")
    assert_same(first, llama_controls.in_turn)
    assert_same(again, llama_controls.in_turn)
    assert [answer.num_cached_tokens for answer in again] == [WHOLE_TOKENS] * NUM_PROMPTS
    assert stats["connector.layerwise_load_jobs"] == NUM_PROMPTS
    assert stats["connector.failed_load_jobs"] == 0
    assert stats["connector.loaded_tokens.CPU"] == NUM_PROMPTS * WHOLE_TOKENS


def test_of_eight_at_a_time_one_computes_while_the_others_wait(
    engine: EngineProcess, llama_controls: Controls
) -> None:
    assert engine.call("forget_device")
    before = engine.call("stats")

    answers = engine.call("generate", PROMPTS, GREEDY)

    stats = engine.call("stats")
    assert_same(answers, llama_controls.together)
    assert [answer.num_cached_tokens for answer in answers] == [WHOLE_TOKENS] * NUM_PROMPTS
    assert stats["connector.load_jobs"] - before["connector.load_jobs"] == NUM_PROMPTS
    by_layer = stats["connector.layerwise_load_jobs"] - before["connector.layerwise_load_jobs"]
    assert 1 <= by_layer < NUM_PROMPTS


def test_whoever_shares_the_blocks_of_a_load_waits_for_its_end(
    engine: EngineProcess, llama_controls: Controls
) -> None:
    assert engine.call("forget_device")
    before = engine.call("stats")

    answers = engine.call("generate", [PROMPTS[0]] * 4, GREEDY)

    stats = engine.call("stats")
    assert_same(answers, [llama_controls.in_turn[0]] * 4)
    assert stats["connector.load_jobs"] - before["connector.load_jobs"] == 1
    assert stats["connector.requests"] == stats["connector.open_jobs"] == 0


@pytest.mark.parametrize("spoil", ["first", "middle", "last"])
def test_what_was_computed_with_a_failed_load_is_computed_anew(
    llama: str, llama_controls: Controls, spoil: Spoil
) -> None:
    faults = CopyFaults(fail_every_load=2, spoil=spoil)
    environment = faults.to_environment()
    options = EngineOptions(llama, FAULTY, engine_arguments=SYNCHRONOUS, environment=environment)
    with EngineProcess(options) as engine:
        first = engine.call("generate_in_turn", PROMPTS[:4], GREEDY)
        engine.call("forget_device")
        again = engine.call("generate_in_turn", PROMPTS[:4], GREEDY)
        # The same prompt several times over: they share the device blocks of a load that fails.
        shared = engine.call("generate", [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3, GREEDY)
        engine.call("settle")
        engine.call("check")
        stats = engine.call("stats")

    assert_same(first, llama_controls.in_turn[:4])
    assert_same(again, llama_controls.in_turn[:4])
    assert_same(shared, [llama_controls.in_turn[0]] * 3 + [llama_controls.in_turn[1]] * 3)
    assert stats["connector.layerwise_load_jobs"] >= 4
    assert stats["connector.failed_load_jobs"] >= 2
    assert stats["connector.open_jobs"] == 0


def test_an_abort_in_the_step_of_a_failed_load_leaves_no_wrong_block_on_the_device(
    llama: str, llama_controls: Controls
) -> None:
    environment = CopyFaults(fail_every_load=1).to_environment()
    options = EngineOptions(llama, FAULTY, engine_arguments=SYNCHRONOUS, environment=environment)
    with EngineProcess(options) as engine:
        engine.call("generate_in_turn", PROMPTS[:2], GREEDY)
        engine.call("forget_device")
        engine.call("abort_while_computing", PROMPTS[0])
        stats = engine.call("stats")

        # It asks for what the device holds first: were it anything of the aborted request's, it would be wrong.
        (answer,) = engine.call("generate", [PROMPTS[0]], {**GREEDY, "extra_args": SKIP_LOAD})

    assert stats["connector.layerwise_load_jobs"] == stats["connector.failed_load_jobs"] == 1
    assert_same([answer], llama_controls.in_turn[:1])
    assert answer.num_cached_tokens == 0


def test_an_engine_that_does_not_call_the_hook_computes_anew_and_then_waits_for_whole_loads(
    llama: str, llama_controls: Controls
) -> None:
    with EngineProcess(EngineOptions(llama, HOST_ONLY, engine_arguments=SYNCHRONOUS)) as engine:
        engine.call("generate_in_turn", PROMPTS[:4], GREEDY)
        engine.call("forget_device")
        engine.call("lose_layer_hook")

        again = engine.call("generate_in_turn", PROMPTS[:4], GREEDY)
        stats = engine.call("stats")

    assert_same(again, llama_controls.in_turn[:4])
    assert stats["connector.layerwise_load_jobs"] == stats["connector.failed_load_jobs"] == 1
    assert stats["connector.load_jobs"] == 4
