"""What cannot work is refused in one clear line, before anything is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
)

from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.errors import ConfigError, ModelError, UnknownNameError

MakeEngine = Callable[..., KVTierEngine]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_device_blocks": 0}, ConfigError, "num_device_blocks=0"),
        ({"num_device_blocks": 4, "block_size_tokens": 0}, ConfigError, "block_size_tokens=0"),
        ({"num_device_blocks": 4, "extra_config": {"cpu_bytes_to_us": 1}}, UnknownNameError, "did you mean"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,  # Any: bad values are the point
) -> None:
    with pytest.raises(error, match=message):
        EngineConfig(**arguments)


@pytest.mark.parametrize(
    ("extra_config", "message"),
    [({}, "cpu_bytes_to_use.*required"), ({"cpu_bytes_to_use": "100B"}, "less than one block")],
)
def test_a_host_tier_without_room_is_refused(
    llama: LlamaForCausalLM,
    make_engine: MakeEngine,
    extra_config: dict[str, Any],
    message: str,  # Any: JSON
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(llama, extra_config=extra_config)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "at least one token"),
        ([5, 97], "below 97"),
        ([-1], "below 97"),
        (torch.zeros(2, 3), "one sequence"),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_refused(
    llama: LlamaForCausalLM,
    make_engine: MakeEngine,
    token_ids: list[int] | torch.Tensor,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(llama).generate(token_ids, 1)


def test_a_model_without_kv_cache_is_refused_before_anything_is_made(make_engine: MakeEngine) -> None:
    with pytest.raises(ModelError, match="not a transformers model"):
        make_engine(torch.nn.Linear(2, 2))


def test_a_printed_configuration_shows_no_secret() -> None:
    tier = {"type": "valkey", "url": "redis://user:sesame@host"}
    config = EngineConfig(8, extra_config={"tenant_salt": "sesame", "secondary_tiers": [tier]}, salt="sesame")
    assert "sesame" not in repr(config)
