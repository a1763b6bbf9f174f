"""Tiny models of the architectures of transformers, with seeded weights: to try whether an architecture is served.

A configuration of every architecture has much the same settings under a handful of names. So one table of small sizes
serves most of them, and the others have entries of their own. The weights are ten times as large as usual: with usual
ones attention is nearly uniform, and a wrong block would hardly change an answer.
"""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvtier.errors import ModelError, UnknownNameError

VOCABULARY = 97
"""Small, so that a wrong block changes the most likely token soon."""

HIDDEN = 48

SIZES: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "word_embed_proj_dim"), HIDDEN
    ),
    "hidden_size_global": HIDDEN,
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "dim_ff", "decoder_ffn_dim", "encoder_ffn_dim"), 64
    ),
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "shared_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    "encoder_layers": 1,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    "encoder_attention_heads": 4,
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "global_head_dim"), 12),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_size"), 20),
    "is_decoder": True,
    "use_cache": True,
    "attention_dropout": 0.0,
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size"), 32),
    **dict.fromkeys(
        ("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1
    ),
    # Latent attention.
    **dict.fromkeys(("q_lora_rank", "qk_lora_rank"), 24),
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 12,
    # State spaces and linear attention.
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_state_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 12),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    "mamba_d_ssm": 2 * HIDDEN,
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 12),
    "use_mamba_kernels": False,
}
"""Small sizes by the names that configurations have for them. A name that a configuration lacks is left out."""

LATENT_SIZES: Mapping[str, object] = {"num_key_value_heads": 4, "head_dim": 8}
"""Latent attention (settings with ``qk_rope_head_dim``) has as many keys as heads, and rotates a part of them."""

ATTENTION_LAST = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

OWN: Mapping[str, Mapping[str, object]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [2]},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "codegen": {"rotary_dim": 8},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 1, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 20},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "kimi_linear": {"layer_types": ATTENTION_LAST},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 12, "head_dim": 8},
    "reformer": {"axial_pos_embds_dim": (16, 32), "axial_pos_shape": (16, 32)},
    "stablelm": {"partial_rotary_factor": 0.5},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"], "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of single architectures, whose sizes depend on each other in a way of their own."""

MEDIA_SIZES: Mapping[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "projection_dim", "output_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_blocks"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    "image_size": 8,
    "patch_size": 4,
}
"""Sizes of the parts that read images and sounds, which no prompt of text reaches."""

MEDIA_PARTS = ("vision_config", "audio_config", "audio_encoder", "text_encoder")

TEXT_PARTS = (
    *("text_config", "decoder", "thinker_config", "language_config"),
    *("encoder_config", "decoder_config", "global_config", "patcher_config"),  # of bytes and patches, in BLT
)
"""Parts of a configuration that describe a text model."""


def list_model_types() -> list[str]:
    """Return the types of models that transformers offers as causal language models, one for each class, sorted."""
    by_class: dict[str, str] = {}
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, key=_order_within_class):
        by_class.setdefault(_class_name(model_type), model_type)
    return sorted(by_class.values())


def _order_within_class(model_type: str) -> tuple[bool, int, str]:
    """Sort the types that share a class: first the one that the class is named after, then the shortest."""
    is_other = not _class_name(model_type).lower().startswith(model_type.replace("_", ""))
    return is_other, len(model_type), model_type


def require_model_type(model_type: str) -> None:
    """Raise UnknownNameError unless transformers has a causal language model of that type."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnknownNameError("model type", model_type, sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def build_tiny_model(model_type: str) -> PreTrainedModel:
    """Return a tiny model of an architecture, in evaluation mode, on the CPU.

    Args:
        model_type: the architecture by its name in transformers.

    Raises:
        UnknownNameError: transformers has no such causal language model.
        ModelError: its configuration or its model cannot be built in this size.
    """
    require_model_type(model_type)
    class_name = _class_name(model_type)
    torch.manual_seed(0)
    try:
        kind = getattr(transformers, class_name)
        # A model of text alone takes the text part of the configuration that its type names.
        model: PreTrainedModel = kind(make_tiny_config(kind.config_class, OWN.get(model_type, {})))
    except Exception as error:  # foreign code: any configuration of any architecture
        raise ModelError(f"a tiny {class_name} cannot be built: {type(error).__name__}: {error}") from error
    model.train(mode=False)
    return model


def make_tiny_config(kind: type[PretrainedConfig], own: Mapping[str, object]) -> PretrainedConfig:
    """Return a configuration with the sizes of this module as far as it has them.

    Args:
        kind: the configuration's class.
        own: settings that go before those of this module.
    """
    return kind(**_choose_sizes(kind, SIZES) | dict(own))


def _choose_sizes(
    kind: type[PretrainedConfig], sizes: Mapping[str, object]
) -> dict[str, Any]:  # Any: settings of any architecture
    usual = kind()
    if _has_setting(usual, "qk_rope_head_dim"):
        sizes = {**sizes, **LATENT_SIZES}
    chosen: dict[str, Any] = {name: size for name, size in sizes.items() if _has_setting(usual, name)}
    for part in (*TEXT_PARTS, *MEDIA_PARTS):
        described = getattr(usual, part, None)
        if isinstance(described, PretrainedConfig):
            part_sizes = SIZES if part in TEXT_PARTS else MEDIA_SIZES
            chosen[part] = type(described)(**_choose_sizes(type(described), part_sizes)).to_dict()
    return chosen


def _has_setting(config: PretrainedConfig, name: str) -> bool:
    own = getattr(type(config), name, None)
    if isinstance(own, property) and own.fset is None:
        return False
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001 - foreign code: a setting that differs between layers cannot be read
        return True


def _class_name(model_type: str) -> str:
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return named if isinstance(named, str) else named[0]
