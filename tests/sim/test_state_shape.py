"""States of published models, from the fields of their ``config.json``, against arithmetic by hand."""

from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.sim.model_shape import shape_of_config

Config = dict[str, Any]  # Any: JSON

NEMOTRON_H_8B: Config = {
    "model_type": "nemotron_h",
    "attention_head_dim": 128,
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "torch_dtype": "bfloat16",
}
GRANITE_4_H_TINY: Config = {
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "num_attention_heads": 12,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}
FALCON_H1_1B: Config = {
    "model_type": "falcon_h1",
    "head_dim": 64,
    "hidden_size": 2048,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
BAMBA_9B: Config = {
    "model_type": "bamba",
    "attn_layer_indices": [9, 18, 27],
    "hidden_size": 4096,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
JAMBA_MINI: Config = {
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
MAMBA2_7B: Config = {
    "model_type": "mamba2",
    "conv_kernel": 4,
    "head_dim": 64,
    "hidden_size": 4096,
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "state_size": 128,
    "torch_dtype": "bfloat16",
}
KIMI_LINEAR_48B: Config = {
    "model_type": "kimi_linear",
    "head_dim": 72,
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 32,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
MINIMAX_TEXT_01: Config = {
    "model_type": "minimax_text_01",
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "head_dim": 128,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LFM2_1B: Config = {
    "model_type": "lfm2",
    "conv_L_cache": 3,
    "conv_dim": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def without(config: Config, field: str) -> Config:
    return {name: value for name, value in config.items() if name != field}


@pytest.mark.parametrize(
    ("config", "bytes_of_a_token", "num_states", "bytes_of_a_state"),
    [
        pytest.param(
            NEMOTRON_H_8B,
            4 * 2 * 8 * 128 * 2,
            24,
            3 * (8192 + 2 * 8 * 128) * 2 + 8192 * 128 * 4,
            id="Mamba2 by a pattern of letters, the recurrence in float32",
        ),
        pytest.param(
            GRANITE_4_H_TINY,
            4 * 2 * 4 * 128 * 2,
            36,
            3 * (3072 + 2 * 128) * 2 + 3072 * 128 * 2,
            id="Mamba2 by the kinds of layers",
        ),
        pytest.param(
            FALCON_H1_1B,
            24 * 2 * 2 * 64 * 2,
            24,
            3 * (3072 + 2 * 256) * 2 + 3072 * 256 * 2,
            id="attention and Mamba2 in each layer",
        ),
        pytest.param(
            BAMBA_9B,
            3 * 2 * 8 * 128 * 2,
            29,
            3 * (8192 + 2 * 128) * 2 + 8192 * 128 * 2,
            id="layers with attention by their numbers",
        ),
        pytest.param(
            JAMBA_MINI, 4 * 2 * 8 * 128 * 2, 28, 3 * 8192 * 2 + 8192 * 16 * 2, id="Mamba in a period"
        ),
        pytest.param(
            MAMBA2_7B, 0, 64, 3 * (8192 + 2 * 8 * 128) * 2 + 8192 * 128 * 2, id="states and nothing else"
        ),
        pytest.param(
            KIMI_LINEAR_48B,
            7 * (512 + 64) * 2,
            20,
            3 * (3 * 32 * 128) * 2 + 32 * 128 * 128 * 4,
            id="delta attention beside latent attention",
        ),
        pytest.param(
            MINIMAX_TEXT_01,
            10 * 2 * 8 * 128 * 2,
            70,
            64 * 128 * 128 * 2,
            id="linear attention, no convolution",
        ),
        pytest.param(LFM2_1B, 6 * 2 * 8 * 64 * 2, 10, 2 * 2048 * 2, id="short convolutions alone"),
    ],
)
def test_states_weigh_what_the_fields_of_a_published_configuration_say(
    config: Config, bytes_of_a_token: int, num_states: int, bytes_of_a_state: int
) -> None:
    shape = shape_of_config(config)

    assert shape.states is not None
    assert sum(group.num_layers * group.bytes_per_token for group in shape.layers) == bytes_of_a_token
    assert shape.states.num_layers == num_states
    assert shape.states.bytes_of_state == bytes_of_a_state
    assert any(f"{num_states} layers keep a recurrent state" in line for line in shape.assumptions)


def test_a_model_of_states_alone_has_one_each_thousand_tokens_or_as_it_is_told() -> None:
    shape = shape_of_config(MAMBA2_7B)

    assert shape.states is not None
    assert shape.bytes_per_token == -(-shape.states.bytes_kept // 1024)
    assert shape.with_state_interval(8192).bytes_per_token == -(-shape.states.bytes_kept // 8192)


def test_kinds_of_layers_may_be_listed_or_follow_from_a_rule() -> None:
    listed = ["linear_attention" if layer % 8 != 4 else "full_attention" for layer in range(32)]

    assert shape_of_config(JAMBA_MINI | {"layer_types": listed}) == shape_of_config(JAMBA_MINI)
    kimi = without(KIMI_LINEAR_48B, "linear_attn_config") | {
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "layer_types": [
            "full_attention" if layer % 4 == 3 or layer == 26 else "linear_attention" for layer in range(27)
        ],
    }
    assert shape_of_config(kimi) == shape_of_config(KIMI_LINEAR_48B)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(NEMOTRON_H_8B, "hybrid_override_pattern"), "layer_types=None: is missing"),
        (NEMOTRON_H_8B | {"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern='MX"),
        (NEMOTRON_H_8B | {"num_hidden_layers": 51}, "each of 51 layers"),
        (NEMOTRON_H_8B | {"mamba_ssm_cache_dtype": "float4"}, "mamba_ssm_cache_dtype='float4'"),
        (without(GRANITE_4_H_TINY, "mamba_d_state"), "mamba_d_state=None: is missing"),
        (GRANITE_4_H_TINY | {"layer_types": ["mamba"] * 39 + ["wavelet"]}, "layer_types='wavelet'"),
        (BAMBA_9B | {"attn_layer_indices": 9}, "attn_layer_indices=9: must be a list"),
        (without(JAMBA_MINI, "attn_layer_period"), "attn_layer_period=None"),
        (without(KIMI_LINEAR_48B, "linear_attn_config"), "linear_attn_config=None"),
        (KIMI_LINEAR_48B | {"linear_attn_config": {"full_attn_layers": [4]}}, "num_heads=None"),
        (without(MINIMAX_TEXT_01, "attn_type_list"), "attn_type_list=None"),
        (without(LFM2_1B, "conv_L_cache"), "conv_L_cache=None"),
        (BAMBA_9B | {"model_type": "unheard_of"}, "attn_layer_indices=.*some layers store states"),
        (FALCON_H1_1B | {"model_type": "unheard_of"}, "mamba_d_state=256: some layers store states"),
        (LFM2_1B | {"model_type": "unheard_of"}, "conv_L_cache=3: some layers store states"),
        ({"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}, "layer_types='linear_attention'"),
    ],
)
def test_states_that_cannot_be_read_are_refused_with_their_field(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of_config(config)
