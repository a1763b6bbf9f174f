"""Tiny models with recurrent states; their random weights make the answer depend on each state."""

from collections.abc import Callable, Mapping

from tests.engines.transformers.architectures import VOCABULARY, build_model
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

IDS: Mapping[str, object] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: Mapping[str, object] = {
    **IDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def make_qwen3_next() -> PreTrainedModel:
    """Return three layers of a gated delta net and one of attention."""
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 12,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    return build_model(Qwen3NextForCausalLM, Qwen3NextConfig, {**SIZES, "head_dim": 12, **linear, **experts})


def make_mamba2() -> PreTrainedModel:
    """Return a model that has states and no attention."""
    sizes = {
        **IDS,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "state_size": 16,
        "head_dim": 8,
        "num_heads": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    return build_model(Mamba2ForCausalLM, Mamba2Config, sizes)


def make_falcon_h1() -> PreTrainedModel:
    """Return layers each of which has attention and states."""
    states = {
        "mamba_d_ssm": 48,
        "mamba_n_heads": 6,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
    }
    return build_model(FalconH1ForCausalLM, FalconH1Config, {**SIZES, "head_dim": 12, **states})


def make_bamba() -> PreTrainedModel:
    """Return layers of Mamba-2 and one of attention."""
    states = {
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
        "attn_layer_indices": [2],
    }
    return build_model(BambaForCausalLM, BambaConfig, {**SIZES, **states})


def make_jamba() -> PreTrainedModel:
    """Return layers of Mamba, one of attention, and experts."""
    states = {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "use_mamba_kernels": False,
    }
    return build_model(JambaForCausalLM, JambaConfig, {**SIZES, **states})


def make_lfm2() -> PreTrainedModel:
    """Return layers of short convolutions and one of attention."""
    kinds = {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
    return build_model(Lfm2ForCausalLM, Lfm2Config, {**SIZES, **kinds})


MAKERS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen3_next": make_qwen3_next,
    "mamba2": make_mamba2,
    "falcon_h1": make_falcon_h1,
    "bamba": make_bamba,
    "jamba": make_jamba,
    "lfm2": make_lfm2,
}
