"""The embedded engine keeps tenants apart on the device, in host memory and behind it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.cache_name import CACHE_NAME
from transformers import LlamaForCausalLM

from kvtier.engines.transformers import KVTierEngine
from kvtier.errors import ConfigError

WAIT_S = 30.0
MakeEngine = Callable[..., KVTierEngine]


def settings_of(tmp_path: Path) -> dict[str, object]:
    return {
        "cpu_bytes_to_use": "2MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path), "capacity_bytes": "64MiB"}],
        "tenants": {"alice": {}, "bob": {}},
    }


def test_neither_of_two_tenants_finds_the_others_blocks_anywhere(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(llama, extra_config=settings_of(tmp_path))
    answers = []
    for name in ("alice", "bob"):
        result = engine.run(prompt, 4, tenant=name)
        assert result.sources == {"computed": 75}
        answers.append(result.tokens)
    assert engine.drain(WAIT_S)
    stats = engine.stats()
    for name in ("alice", "bob"):
        assert stats[f"primary.tenant_blocks.{name}"] == stats[f"tier.0.fs.tenant_blocks.{name}"] == 9
    for name in ("alice", "bob"):
        assert engine.run(prompt, 4, tenant=name).sources == {"device": 72, "computed": 3}
    engine.drop_device_cache()
    for name in ("alice", "bob"):
        result = engine.run(prompt, 4, tenant=name)
        assert result.sources == {"host": 72, "computed": 3}
        answers.append(result.tokens)
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_after_a_restart_each_finds_his_own_on_the_disk(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, tmp_path: Path
) -> None:
    first = make_engine(llama, extra_config=settings_of(tmp_path))
    first.run(prompt, 1, tenant="alice")
    assert first.drain(WAIT_S)
    first.shutdown()
    second = make_engine(llama, extra_config=settings_of(tmp_path))
    assert second.run(prompt, 1, tenant="bob").sources == {"computed": 75}
    assert second.run(prompt, 1, tenant="alice").sources == {"fs": 72, "computed": 3}


def test_an_unknown_tenant_shares_nothing_even_on_the_device(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(llama, extra_config=settings_of(tmp_path))
    engine.run(prompt, 1, tenant="alice")
    for tenant in ("mallory", "mallory", None):
        assert engine.run(prompt, 1, tenant=tenant).sources == {"computed": 75}
    assert engine.stats()["connector.unknown_tenant_requests"] == 3


def test_a_cache_for_generate_is_of_its_tenant(
    llama: LlamaForCausalLM, prompt: list[int], make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(llama, extra_config=settings_of(tmp_path))
    ids = torch.tensor([prompt])
    with engine.cache_for(ids, tenant="alice") as cache:
        cast("Any", llama).generate(  # Any: the annotations of transformers do not fit its models
            ids, attention_mask=torch.ones_like(ids), **{CACHE_NAME: cache}, max_new_tokens=1, pad_token_id=0
        )
    assert engine.cache_for(ids, tenant="bob").sources["computed"] == 75
    assert engine.cache_for(ids, tenant="alice").sources["computed"] == 3


def test_a_quota_in_a_tier_that_the_engine_lacks_is_refused_at_the_start(
    llama: LlamaForCausalLM, make_engine: MakeEngine
) -> None:
    tenants = {"alice": {"quota_bytes": {"fs": "1MiB"}}}
    with pytest.raises(ValueError, match="fs"):
        make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB", "tenants": tenants})
    with pytest.raises(ConfigError, match="tenants"):
        make_engine(llama, extra_config={"cpu_bytes_to_use": "2MiB", "tenants": 5})
