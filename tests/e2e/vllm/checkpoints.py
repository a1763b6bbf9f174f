"""Small models with random weights whose answers depend on every token of the prompt, saved as checkpoints.

Nothing is downloaded. vLLM's own dummy weights are so small that a model answers the same whatever its cache holds;
here they are large enough that a wrong page is another answer.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    set_seed,
)

VOCAB_SIZE = 2048
SEED = 7
WINDOW_TOKENS = 256
"""Length of the sliding window: several device blocks, and much shorter than the prompts."""

DECAY_PER_TOKEN = 0.002
"""About how much of its recurrent state a layer forgets with each token."""

DRAFTED_TOKEN = 0
"""What the MTP layer of ``save_drafting_qwen3_next`` always drafts."""

COMMON: dict[str, Any] = {  # Any: arguments of transformers' configurations
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.12,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_llama(folder: Path, seed: int = SEED) -> Path:
    """Save a Llama of four layers, all with full attention."""
    config = LlamaConfig(**COMMON, num_hidden_layers=4, tie_word_embeddings=False)
    return _save(folder, LlamaForCausalLM, config, seed)


def save_one_headed(folder: Path, seed: int = SEED) -> Path:
    """Save a Llama with one KV head, which each of several workers holds whole."""
    config = LlamaConfig(
        **{**COMMON, "num_key_value_heads": 1}, num_hidden_layers=4, tie_word_embeddings=False
    )
    return _save(folder, LlamaForCausalLM, config, seed)


def save_gemma(folder: Path, seed: int = SEED) -> Path:
    """Save a Gemma-3 text model: five layers with a sliding window, one with full attention."""
    config = Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=6,
        sliding_window=WINDOW_TOKENS,
        query_pre_attn_scalar=64,
        pad_token_id=0,
    )
    return _save(folder, Gemma3ForCausalLM, config, seed)


def save_deepseek(folder: Path, seed: int = SEED) -> Path:
    """Save a DeepSeek-V2 of two layers: latent attention (MLA) of the only size that vLLM computes on CPUs."""
    common = {name: value for name, value in COMMON.items() if name != "head_dim"}
    config = DeepseekV2Config(
        **{**common, "num_key_value_heads": 4},
        num_hidden_layers=2,
        first_k_dense_replace=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        tie_word_embeddings=False,
    )
    return _save(folder, DeepseekV2ForCausalLM, config, seed)


def save_qwen3_next(
    folder: Path, seed: int = SEED, *, num_kv_heads: int = 2, num_experts_per_token: int = 2
) -> Path:
    """Save a Qwen3-Next: three layers with a recurrent state, one with full attention, each with four experts."""
    config = Qwen3NextConfig(
        **{**COMMON, "num_key_value_heads": num_kv_heads},
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=num_experts_per_token,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        tie_word_embeddings=False,
    )
    set_seed(seed)
    with torch.no_grad():
        model = Qwen3NextForCausalLM(config)
        for layer in model.model.layers[:3]:
            # As drawn, a state forgets within a few tokens, and a wrong one would hardly change an answer.
            layer.linear_attn.A_log.fill_(math.log(DECAY_PER_TOKEN))
        model.save_pretrained(folder)
    return folder


def save_drafting_qwen3_next(folder: Path, seed: int = SEED) -> Path:
    """Save a Qwen3-Next with the layer that predicts several tokens (MTP), whose drafts are ``DRAFTED_TOKEN`` alone.

    A token goes through every expert. Where it goes through some, rounding decides which, and answers of engines that
    round otherwise cannot be compared.
    """
    save_qwen3_next(folder, seed, num_experts_per_token=4)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    attention = "model.layers.3."
    tensors |= {
        name.replace(attention, "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(attention)
    }
    size = COMMON["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    tensors["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.05
    tensors |= {f"mtp.pre_fc_norm_{part}.weight": torch.zeros(size) for part in ("hidden", "embedding")}
    # The norm multiplies by one more than this, so all logits are equal and the first token is taken.
    tensors["mtp.norm.weight"] = torch.full((size,), -1.0)
    save_file(tensors, path, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    return folder


def train_last_rows(folder: Path, num_rows: int) -> None:
    """Change the last rows of the embedding alone, as new special tokens are trained: same size, same header."""
    path = folder / "model.safetensors"
    size_bytes = path.stat().st_size
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    rows = tensors["model.embed_tokens.weight"][-num_rows:]
    rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(SEED)) * rows.std())
    save_file(tensors, path, metadata)
    assert path.stat().st_size == size_bytes


def _save(folder: Path, model_class: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> Path:
    set_seed(seed)
    with torch.no_grad():
        model_class(config).save_pretrained(folder)
    return folder
