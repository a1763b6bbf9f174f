"""Bytes of keys and values of known models, against arithmetic by hand; what is not known is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import ConfigError
from kvtier.sim.model_shape import LayerGroup, ModelShape, read_shape, shape_of_config
from kvtier.sim.state_shape import StateLayers

Config = dict[str, Any]  # Any: JSON

LLAMA_3_8B: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN_25_7B: Config = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN_3_30B: Config = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B: Config = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B: Config = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "torch_dtype": "bfloat16",
}
GEMMA_2_9B: Config = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
FALCON_7B: Config = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "multi_query": True,
    "torch_dtype": "bfloat16",
}
GPT_2: Config = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "dtype": "float32"}


def without(config: Config, field: str) -> Config:
    return {name: value for name, value in config.items() if name != field}


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        pytest.param(LLAMA_3_8B, 32 * 2 * 8 * 128 * 2, id="grouped heads, 128 KiB"),
        pytest.param(QWEN_25_7B, 28 * 2 * 4 * 128 * 2, id="a window that is not used, 56 KiB"),
        pytest.param(QWEN_3_30B, 48 * 2 * 4 * 128 * 2, id="heads that do not fill the hidden size, 96 KiB"),
        pytest.param(MISTRAL_7B, 131_072, id="a window in each layer"),
        pytest.param(DEEPSEEK_V3, 70_272, id="61 latents of 512 + 64"),
        pytest.param(GPT_OSS_20B, 24 * 2 * 8 * 64 * 2, id="windows in every second layer"),
        pytest.param(GEMMA_2_9B, 42 * 2 * 8 * 256 * 4, id="four bytes a number"),
        pytest.param(FALCON_7B, 32 * 2 * 1 * 64 * 2, id="one head for all queries"),
        pytest.param(GPT_2, 12 * 2 * 768 * 4, id="the names of GPT-2, no grouped heads"),
    ],
)
def test_a_token_weighs_what_its_layers_keep(config: Config, bytes_per_token: int) -> None:
    assert shape_of_config(config).bytes_per_token == bytes_per_token


def test_llama_weighs_128_kibibytes_a_token() -> None:
    assert shape_of_config(LLAMA_3_8B).bytes_per_token == 128 * 1024


@pytest.mark.parametrize(("kv_dtype", "share"), [("fp8", 2), ("int8", 2), ("bf16", 1)])
def test_keys_and_values_may_have_a_type_of_their_own(kv_dtype: str, share: int) -> None:
    assert shape_of_config(LLAMA_3_8B, kv_dtype).bytes_per_token == 128 * 1024 // share


def test_layers_are_counted_by_their_windows() -> None:
    shape = shape_of_config(GPT_OSS_20B)

    layer = 2 * 8 * 64 * 2
    assert shape.layers == (LayerGroup(12, layer, 128, 8), LayerGroup(12, layer, None, 8))
    assert any("only the window" in line for line in shape.assumptions)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 64, 64]),
        ({"sliding_window_pattern": 2}, [64, None, 64, None, 64]),
        ({"model_type": "gemma2"}, [64, None, 64, None, 64]),
        ({}, [64, 64, 64, 64, 64]),
        (
            {"layer_types": ["chunked_attention"] * 4 + ["full_attention"], "attention_chunk_size": 32},
            [32] * 4 + [None],
        ),
    ],
)
def test_windows_are_counted_as_the_config_says(fields: Config, windows: list[int | None]) -> None:
    shape = shape_of_config(LLAMA_3_8B | {"num_hidden_layers": 5, "sliding_window": 64} | fields)

    found = {group.window_tokens: group.num_layers for group in shape.layers}
    assert found == {window: windows.count(window) for window in windows}


def test_the_text_part_of_a_model_that_sees_is_read_and_its_dtype_may_stand_outside() -> None:
    nested = {
        "model_type": "llava",
        "torch_dtype": "bfloat16",
        "text_config": without(LLAMA_3_8B, "torch_dtype"),
    }

    assert shape_of_config(nested).bytes_per_token == 128 * 1024


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(LLAMA_3_8B, "num_hidden_layers"), "num_hidden_layers=None: .*give a model with another"),
        (without(LLAMA_3_8B, "hidden_size"), "hidden_size=None"),
        (without(LLAMA_3_8B, "torch_dtype"), "torch_dtype=None.*give --dtype"),
        (without(LLAMA_3_8B, "num_attention_heads"), "num_attention_heads=None"),
        (without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim=None"),
        (without(GPT_OSS_20B, "sliding_window"), "sliding_window=None"),
        (LLAMA_3_8B | {"hidden_size": 4095}, "hidden_size=4095: is not a multiple of 32"),
        (
            LLAMA_3_8B | {"num_key_value_heads": [8, 8]},
            r"num_key_value_heads=\[8, 8\]: must be an integer",
        ),
        (LLAMA_3_8B | {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (LLAMA_3_8B | {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be at most 100000"),
        (LLAMA_3_8B | {"head_dim": 10**400}, r"head_dim=10+\.\.\.: must be at most"),
        ({"model_type": "mamba", "state_size": 16, "num_hidden_layers": 10**9}, "must be at most 100000"),
        (LLAMA_3_8B | {"torch_dtype": "float4"}, "torch_dtype='float4': must be one of"),
        (LLAMA_3_8B | {"layer_types": ["linear_attention"] * 32}, "layer_types='linear_attention'"),
        (LLAMA_3_8B | {"layer_types": ["full_attention"]}, "must name the kind of each of 32 layers"),
        (LLAMA_3_8B | {"attn_layer_period": 8}, "attn_layer_period=8: some layers store states"),
        (DEEPSEEK_V3 | {"index_head_dim": 128}, "index_head_dim=128: changes the KV cache"),
        (LLAMA_3_8B | {"num_kv_shared_layers": 15}, "num_kv_shared_layers=15"),
        ({"model_type": "mamba", "state_size": 16}, "num_hidden_layers=None"),
    ],
)
def test_a_layout_that_is_not_known_is_refused_with_its_field_and_a_remedy(
    config: Config, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of_config(config)


def test_a_file_is_read_or_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    assert read_shape(path, "fp8") == ModelShape(
        (LayerGroup(32, 2048, num_kv_heads=8),),
        "float8_e4m3fn",
        ("keys and values are stored as fp8; their scales take no bytes",),
    )
    for text, message in (("{", "is no JSON"), ("[]", "is not a JSON object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_shape(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shape(tmp_path / "none.json")


QWEN_3_NEXT: Config = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
STATE_BYTES = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2


def test_a_hybrid_keeps_a_state_for_each_block_which_vllm_makes_as_long_as_a_state() -> None:
    shape = shape_of_config(QWEN_3_NEXT)

    # The 544 tokens are what vLLM logs as the block size of attention.
    assert shape.states == StateLayers(36, STATE_BYTES, 544, (2 * 16 * 128 + 32 * 128) * 2)
    assert shape.layers == (LayerGroup(12, 2 * 2 * 256 * 2, None, 2),)
    assert shape.bytes_per_token == 24576 + -(-36 * STATE_BYTES // 544)
    assert shape.stored_bytes_per_token(2) == shape.bytes_per_token
    assert any("36 layers keep a recurrent state" in line for line in shape.assumptions)


@pytest.mark.parametrize(("num_kv_heads", "num_workers"), [(1, 1), (1, 8), (2, 8), (8, 4), (8, 8)])
def test_what_is_said_to_be_stored_is_the_row_that_host_memory_has(
    num_kv_heads: int, num_workers: int
) -> None:
    shape = ModelShape((LayerGroup(4, 256 * num_kv_heads, num_kv_heads=num_kv_heads),), "bfloat16")
    heads_of_worker = max(1, num_kv_heads // num_workers)
    held_by = max(1, num_workers // num_kv_heads)
    group = KVGroup(16, ("layers",), 16 * 4 * 256 * heads_of_worker, workers_per_part=held_by)
    config = OffloadingConfig(
        "size",
        ModelIdentity("m"),
        (group,),
        16,
        world_size=num_workers,
        extra_config={"cpu_bytes_to_use": "1MiB"},
    )
    apart = replace(config, has_local_workers=False)

    assert CPUOffloadingSpec(config).row_stride == 16 * shape.stored_bytes_per_token(num_workers)
    own = shape.stored_bytes_per_token(num_workers, shares_copies=False)
    assert CPUOffloadingSpec(apart).row_stride == 16 * own


def test_layer_types_and_a_period_describe_the_same_hybrid() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12
    named = {**QWEN_3_NEXT, "layer_types": kinds}
    del named["full_attention_interval"]

    assert shape_of_config(named) == shape_of_config(QWEN_3_NEXT)


def test_a_state_of_another_type_and_interval_has_other_bytes() -> None:
    shape = shape_of_config({**QWEN_3_NEXT, "mamba_ssm_dtype": "float32"})
    sparse = shape.with_state_interval(16_384)

    assert shape.states is not None
    assert shape.states.bytes_of_state == STATE_BYTES + 32 * 128 * 128 * 2
    assert sparse.bytes_per_token == 24576 + -(-shape.states.bytes_kept // 16_384)


def test_a_state_interval_is_refused_where_there_is_no_state_or_it_is_none() -> None:
    with pytest.raises(ConfigError, match=r"--state-interval=64.*leave it out"):
        shape_of_config(LLAMA_3_8B).with_state_interval(64)
    with pytest.raises(ConfigError, match="--state-interval=0"):
        shape_of_config(QWEN_3_NEXT).with_state_interval(0)
