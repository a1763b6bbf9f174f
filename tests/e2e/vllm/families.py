"""Tiny models of the hybrid families, with random weights whose answers depend on the recurrent state.

A family is an architecture that mixes attention with layers that keep a state. Those that vLLM 0.32 has removed are
here by name alone: it refuses them by the name.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.e2e.vllm.checkpoints import DECAY_PER_TOKEN, SEED, VOCAB_SIZE, save_llama

COMMON: Mapping[str, Any] = {  # Any: arguments of transformers' configurations
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.12,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}

ATTENTION_LAST = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


@dataclass(frozen=True, slots=True)
class Family:
    """A hybrid architecture.

    Attributes:
        title: its name, as people call it.
        states: what its layers keep.
        architecture: the name of its class in transformers and vLLM.
        config: arguments of its configuration; None where vLLM has removed it and transformers has no such class.
        note: why vLLM 0.32 does not run it on a CPU, in words; empty when it does.
    """

    title: str
    states: str
    architecture: str
    config: Mapping[str, Any] | None = None  # Any: arguments of transformers' configurations
    note: str = ""


FAMILIES: Mapping[str, Family] = {
    "qwen3-next": Family(
        "Qwen3-Next",
        "gated delta net",
        "Qwen3NextForCausalLM",
        {
            **DELTA_NET,
            "head_dim": 64,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "qwen3.5": Family(
        "Qwen 3.5",
        "gated delta net",
        "Qwen3_5ForCausalLM",
        {**DELTA_NET, "head_dim": 64, "num_hidden_layers": 4, "layer_types": ATTENTION_LAST},
        note="vLLM imports torchvision for it, which its CPU build does not install",
    ),
    "olmo-hybrid": Family(
        "OLMo Hybrid",
        "gated delta net",
        "OlmoHybridForCausalLM",
        {**DELTA_NET, "linear_num_value_heads": 2, "num_hidden_layers": 4, "layer_types": ATTENTION_LAST},
        note="its layer needs Triton",
    ),
    "kimi-linear": Family(
        "Kimi Linear",
        "delta attention",
        "KimiLinearForCausalLM",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layer_types": ATTENTION_LAST,
            "linear_num_heads": 4,
            "linear_head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
        note="vLLM switches prefix caching off for latent attention on a CPU without AMX tiles",
    ),
    "falcon-h1": Family(
        "Falcon-H1",
        "Mamba2",
        "FalconH1ForCausalLM",
        {
            "head_dim": 64,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
    ),
    "granite-4": Family(
        "Granite 4",
        "Mamba2",
        "GraniteMoeHybridForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
            "attention_multiplier": 0.125,
        },
    ),
    "nemotron-h": Family(
        "Nemotron-H",
        "Mamba2",
        "NemotronHForCausalLM",
        {
            "head_dim": 64,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "ssm_state_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "chunk_size": 64,
        },
    ),
    "zamba2": Family(
        "Zamba2",
        "Mamba2",
        "Zamba2ForCausalLM",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
            "num_mem_blocks": 1,
            "n_mamba_heads": 8,
            "mamba_d_state": 64,
            "chunk_size": 64,
        },
    ),
    "jamba": Family(
        "Jamba",
        "Mamba",
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_mamba_kernels": False,
        },
        note="its CPU backend has kernels for Mamba2, not for Mamba",
    ),
    "lfm2": Family(
        "LFM2",
        "short convolution",
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            # As in published checkpoints; transformers has other names for them.
            "conv_dim": 256,
            "block_dim": 256,
            "conv_L_cache": 3,
        },
    ),
    "lfm2-moe": Family(
        "LFM2 MoE",
        "short convolution",
        "Lfm2MoeForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        },
    ),
    "bamba": Family(
        "Bamba",
        "Mamba2",
        "BambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
        note="removed in vLLM 0.24; what is left, its backend for transformers, has no such layer",
    ),
    "plamo2": Family("PLaMo 2", "Mamba", "Plamo2ForCausalLM", note="removed in vLLM 0.27"),
    "minimax-text": Family(
        "MiniMax-Text-01", "linear attention", "MiniMaxText01ForCausalLM", note="removed in vLLM 0.24"
    ),
}
"""The families by the name that a command line takes."""


def save_family(family: Family, folder: Path) -> Path:
    """Save a tiny model of a family in ``folder`` and return it."""
    if family.config is None:
        save_llama(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [family.architecture]}))
        return folder
    model_class = getattr(transformers, family.architecture)
    transformers.set_seed(SEED)
    with torch.no_grad():
        model = model_class(model_class.config_class(**{**COMMON, **family.config}))
        for name, parameter in model.named_parameters():
            if name.endswith(".A_log"):
                # As drawn, a state forgets within a few tokens, and a wrong one would hardly change an answer.
                parameter.fill_(math.log(DECAY_PER_TOKEN))
        model.save_pretrained(folder)
    return folder
