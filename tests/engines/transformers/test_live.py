"""An embedded engine is seen and steered through its control socket."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.observe.controlled import GUARD_S, Background
from tests.tiering.fs.slots import stored_blocks
from transformers import LlamaForCausalLM

from kvtier.engines.transformers import KVTierEngine
from kvtier.errors import ControlError
from kvtier.observe.control_client import EngineConnection, find_instances
from kvtier.observe.control_wire import Message

MakeEngine = Callable[..., KVTierEngine]

NUM_BLOCKS = 9
"""Full blocks of the prompt of 75 tokens."""


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvtier-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name) / "kvtier"


def ask(runtime: Path, command: str, **arguments: object) -> Message:
    (instance,) = find_instances([runtime])
    with EngineConnection(instance.path, GUARD_S) as connection:
        return connection.ask(command, GUARD_S, **arguments)


def carry_out(engine: KVTierEngine, runtime: Path, command: str, **arguments: object) -> Message:
    """Give a command to an idle engine whose program calls ``drain`` now and then."""
    client = Background(lambda: ask(runtime, command, **arguments))
    while client.is_running:
        engine.drain(0.0)
        time.sleep(0)
    reply = client.join()
    if isinstance(reply, ControlError):
        raise reply
    assert isinstance(reply, dict), reply
    return reply


def test_an_engine_shows_its_true_state_between_requests(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, runtime: Path
) -> None:
    instance_id = f"chat-{os.getpid()}"
    engine = make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB", "instance_id": instance_id})
    engine.run(prompt, 4)
    engine.drain(GUARD_S)
    (instance,) = find_instances([runtime])
    reply = ask(runtime, "stats")

    assert (instance.id, instance.description["engine"]) == (instance_id, "transformers")
    assert reply["is_stepping"] is False
    assert reply["stats"]["primary.held_blocks"] == NUM_BLOCKS
    assert reply["stats"].items() <= engine.stats().items()


def test_a_tenant_s_prompt_is_pinned_by_its_name_and_no_other_one_s(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, runtime: Path
) -> None:
    settings = {"cpu_bytes_to_use": "2MiB", "tenants": {"alice": {}, "bob": {}}}
    engine = make_engine(llama, extra_config=settings)
    engine.run(prompt, 4, tenant="alice")
    engine.drain(GUARD_S)
    pinned = carry_out(engine, runtime, "pin", token_ids=prompt, tenant="alice")
    assert (pinned["num_blocks"], pinned["num_ready"]) == (NUM_BLOCKS, NUM_BLOCKS)
    with pytest.raises(ControlError, match=f"host memory has none of the {NUM_BLOCKS} blocks"):
        carry_out(engine, runtime, "pin", token_ids=prompt, tenant="bob")
    assert carry_out(engine, runtime, "unpin", token_ids=prompt, tenant="bob")["num_blocks"] == 0
    assert carry_out(engine, runtime, "unpin", token_ids=prompt, tenant="alice")["num_blocks"] == NUM_BLOCKS
    with pytest.raises(ControlError, match="must be a tenant of the engine's setting tenants"):
        carry_out(engine, runtime, "prefetch", token_ids=prompt, tenant="carol")


@pytest.mark.parametrize("name", ["cache_salt", "adapter"])
def test_a_prompt_of_an_embedded_engine_has_no_salt_and_no_adapter(
    llama: LlamaForCausalLM, make_engine: MakeEngine, runtime: Path, name: str
) -> None:
    engine = make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB"})
    for command in ("pin", "unpin", "prefetch"):
        with pytest.raises(ControlError, match=f"{name}: prompts of this engine have no"):
            carry_out(engine, runtime, command, token_ids=list(range(40)), **{name: "a"})


def test_a_prompt_is_pinned_by_its_token_ids_while_the_engine_is_idle(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, runtime: Path
) -> None:
    engine = make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB"})
    engine.run(prompt, 4)
    engine.drain(GUARD_S)
    pinned = carry_out(engine, runtime, "pin", token_ids=prompt, lease_s=60)

    assert (pinned["num_blocks"], pinned["num_ready"]) == (NUM_BLOCKS, NUM_BLOCKS)
    assert carry_out(engine, runtime, "unpin", all=True)["num_blocks"] == NUM_BLOCKS


def test_a_prompt_is_prefetched_from_a_directory_after_a_purge(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, runtime: Path, tmp_path: Path
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "blocks"), "capacity_bytes": "16MiB"}
    engine = make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB", "secondary_tiers": [tier]})
    engine.run(prompt, 4)
    engine.drain(GUARD_S)
    assert carry_out(engine, runtime, "purge", tiers=["host"])["num_purged"] == {"host": NUM_BLOCKS}
    found = carry_out(engine, runtime, "prefetch", token_ids=prompt)

    assert (found["num_blocks"], found["num_ready"]) == (NUM_BLOCKS, NUM_BLOCKS)
    engine.drop_device_cache()
    assert engine.run(prompt, 4).sources == {"host": 72, "computed": 3}


def test_a_purge_of_everything_reaches_the_directory_and_says_so_in_the_causes(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, runtime: Path, tmp_path: Path
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "blocks"), "capacity_bytes": "16MiB"}
    engine = make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB", "secondary_tiers": [tier]})
    engine.run(prompt, 4)
    assert engine.drain(GUARD_S)
    purged = carry_out(engine, runtime, "purge", all=True)

    assert (purged["num_purged"], purged["unable"]) == ({"host": NUM_BLOCKS, "fs": NUM_BLOCKS}, {})
    assert not stored_blocks(tmp_path / "blocks")
    engine.drop_device_cache()
    assert engine.run(prompt, 4).sources == {"computed": 75}
    assert engine.stats()["connector.missed_tokens.purged.fs"] > 0


def test_a_client_is_answered_while_requests_run(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, runtime: Path
) -> None:
    engine = make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB"})
    client = Background(lambda: ask(runtime, "drain"))
    while client.is_running:
        engine.run(prompt, 4)

    assert client.join() == {"ok": True, "num_lost_blocks": 0, "num_pending_blocks": 0}


def test_the_socket_ends_with_the_engine_and_without_the_setting_there_is_none(
    llama: LlamaForCausalLM, make_engine: MakeEngine, runtime: Path
) -> None:
    engine = make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB"})
    assert len(find_instances([runtime])) == 1
    engine.shutdown()
    assert list(runtime.iterdir()) == []
    make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB", "control_socket": False})
    make_engine(llama)

    assert list(runtime.iterdir()) == []


def test_two_engines_of_a_program_have_two_sockets(
    llama: LlamaForCausalLM, make_engine: MakeEngine, runtime: Path
) -> None:
    for _ in range(2):
        make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB"})

    assert len({instance.id for instance in find_instances([runtime])}) == 2
