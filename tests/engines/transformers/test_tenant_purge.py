"""A purge of one tenant leaves an embedded engine nothing of it, and everything of others."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engines.transformers.test_live import carry_out, runtime
from transformers import LlamaForCausalLM

from kvtier.engines.transformers import KVTierEngine

__all__ = ["runtime"]

WAIT_S = 30.0
NUM_BLOCKS = 9
"""Full blocks of the prompt of 75 tokens."""

MakeEngine = Callable[..., KVTierEngine]


@pytest.mark.parametrize("kind", ["fs", "obj", "example"])
def test_a_purged_tenant_computes_its_prompts_and_others_load_theirs(
    llama: LlamaForCausalLM,
    prompt: list[int],
    make_engine: MakeEngine,
    runtime: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    engine = make_engine(llama, extra_config=settings_of(tmp_path, kind))
    for name in ("alice", "bob"):
        engine.run(prompt, 4, tenant=name)
    assert engine.drain(WAIT_S)
    purged = carry_out(engine, runtime, "purge", all=True, tenant="alice")

    assert (purged["num_purged"], purged["unable"]) == ({"host": NUM_BLOCKS, kind: NUM_BLOCKS}, {})
    engine.drop_device_cache()
    assert engine.run(prompt, 1, tenant="alice").sources == {"computed": 75}
    missed = engine.stats()
    assert sum(tokens for name, tokens in missed.items() if "missed_tokens.purged" in name) == 72
    assert engine.run(prompt, 1, tenant="bob").sources == {"host": 72, "computed": 3}

    assert engine.drain(WAIT_S)
    assert carry_out(engine, runtime, "purge", tiers=["host"])["num_purged"] == {"host": 2 * NUM_BLOCKS}
    assert carry_out(engine, runtime, "purge", tiers=[kind], tenant="alice")["num_purged"] == {
        kind: NUM_BLOCKS
    }
    engine.drop_device_cache()
    assert engine.run(prompt, 1, tenant="bob").sources == {kind: 72, "computed": 3}
    assert engine.run(prompt, 1, tenant="alice").sources == {"computed": 75}


def test_no_later_engine_finds_what_was_purged(
    llama: LlamaForCausalLM,
    prompt: list[int],
    make_engine: MakeEngine,
    runtime: Path,
    tmp_path: Path,
) -> None:
    first = make_engine(llama, extra_config=settings_of(tmp_path, "fs"))
    for name in ("alice", "bob"):
        first.run(prompt, 1, tenant=name)
    assert first.drain(WAIT_S)
    first.shutdown()
    second = make_engine(llama, extra_config=settings_of(tmp_path, "fs"))
    assert carry_out(second, runtime, "purge", all=True, tenant="alice")["num_purged"]["fs"] == NUM_BLOCKS
    second.shutdown()

    third = make_engine(llama, extra_config=settings_of(tmp_path, "fs"))
    assert third.run(prompt, 1, tenant="alice").sources == {"computed": 75}
    assert third.run(prompt, 1, tenant="bob").sources == {"fs": 72, "computed": 3}


def settings_of(tmp_path: Path, kind: str) -> dict[str, object]:
    tiers: dict[str, dict[str, object]] = {
        "fs": {"root_dir": str(tmp_path / "fs"), "capacity_bytes": "64MiB"},
        "obj": {"url": f"file://{tmp_path / 'obj'}"},
        "example": {},
    }
    return {
        "cpu_bytes_to_use": "2MiB",
        "secondary_tiers": [{"type": kind, **tiers[kind]}],
        "tenants": {"alice": {}, "bob": {}},
    }
