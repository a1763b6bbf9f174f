"""A real vLLM engine is seen and steered through its control socket while it serves, and while it is idle."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.e2e.vllm.engine_host import BLOCK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle
from tests.e2e.vllm.settings import settings_with

from kvtier.errors import ControlError
from kvtier.observe.control_client import EngineConnection, Instance, choose_instance, find_instances

PROMPTS = make_cycle(4)
NUM_PROMPT_BLOCKS = WHOLE_TOKENS // BLOCK_TOKENS
TIMEOUT_S = 120.0
"""Guard against a hang; a command takes one step."""

MAX_ROUNDS = 200
INSTANCE_ID = f"serving-{os.getpid()}"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvtier-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def engine(llama: str, folder: Path) -> Iterator[EngineProcess]:
    settings = settings_with(folder / "blocks") | {"instance_id": INSTANCE_ID}
    environment = {"XDG_RUNTIME_DIR": str(folder)}
    with EngineProcess(EngineOptions(llama, settings, environment=environment)) as engine:
        yield engine
    assert find_instances([folder / "kvtier"]) == []


@pytest.fixture
def instance(engine: EngineProcess, folder: Path) -> Instance:
    return choose_instance(INSTANCE_ID, [folder / "kvtier"])


def ask(
    instance: Instance, command: str, timeout_s: float = TIMEOUT_S, **arguments: object
) -> dict[str, Any]:
    with EngineConnection(instance.path, TIMEOUT_S) as connection:
        return connection.ask(command, timeout_s, **arguments)


def while_serving(engine: EngineProcess, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``call`` returns on another thread while the engine answers prompts."""
    result: dict[str, Any] = {}
    client = Thread(target=lambda: result.update(call()))
    client.start()
    for number in range(MAX_ROUNDS):
        engine.call("generate", [PROMPTS[number % len(PROMPTS)]], GREEDY)
        if not client.is_alive():
            break
    client.join(TIMEOUT_S)
    assert result, "the command has not ended"
    return result


def test_an_engine_says_who_it_is(instance: Instance) -> None:
    assert (instance.id, instance.description["engine"]) == (INSTANCE_ID, "vllm")
    assert instance.description["block_tokens"] == [BLOCK_TOKENS]
    assert instance.description["tiers"] == ["fs"]


def test_numbers_and_records_come_while_it_serves(engine: EngineProcess, instance: Instance) -> None:
    engine.call("generate_in_turn", PROMPTS, GREEDY)
    reply = while_serving(engine, lambda: ask(instance, "stats"))

    assert reply["stats"]["connector.store_jobs"] > 0
    assert while_serving(engine, lambda: ask(instance, "recent"))["ok"]


def test_an_idle_engine_shows_its_true_state(engine: EngineProcess, instance: Instance) -> None:
    engine.call("generate_in_turn", PROMPTS, GREEDY)
    engine.call("settle")
    reply = ask(instance, "stats")

    assert reply["is_stepping"] is False
    assert reply["stats"] == engine.call("stats")


def test_a_prompt_is_pinned_by_its_token_ids(engine: EngineProcess, instance: Instance) -> None:
    engine.call("generate_in_turn", PROMPTS, GREEDY)
    engine.call("settle")
    reply = while_serving(
        engine, lambda: ask(instance, "pin", token_ids=PROMPTS[0][:WHOLE_TOKENS], lease_s=600)
    )
    assert (reply["num_blocks"], reply["num_ready"]) == (NUM_PROMPT_BLOCKS, NUM_PROMPT_BLOCKS)
    assert ask(instance, "stats")["stats"]["primary.leased_blocks"] == NUM_PROMPT_BLOCKS

    reply = while_serving(engine, lambda: ask(instance, "unpin", all=True))
    assert reply["num_blocks"] == NUM_PROMPT_BLOCKS


def test_drain_and_purge_reach_a_serving_engine(engine: EngineProcess, instance: Instance) -> None:
    assert while_serving(engine, lambda: ask(instance, "drain"))["ok"]
    reply = while_serving(engine, lambda: ask(instance, "purge", tiers=["host"]))

    assert reply["num_purged"]["host"] > 0


def test_what_was_purged_from_host_memory_is_prefetched_from_the_tier(
    engine: EngineProcess, instance: Instance
) -> None:
    engine.call("generate_in_turn", PROMPTS, GREEDY)
    engine.call("settle")
    while_serving(engine, lambda: ask(instance, "purge", tiers=["host"]))
    reply = while_serving(engine, lambda: ask(instance, "prefetch", token_ids=PROMPTS[1][:WHOLE_TOKENS]))

    assert (reply["num_blocks"], reply["num_ready"]) == (NUM_PROMPT_BLOCKS, NUM_PROMPT_BLOCKS)


def test_an_idle_engine_does_not_begin_a_command_and_says_so(
    engine: EngineProcess, instance: Instance
) -> None:
    engine.call("settle")

    with pytest.raises(ControlError, match="the engine made no step"):
        ask(instance, "purge", 0.5, all=True)
