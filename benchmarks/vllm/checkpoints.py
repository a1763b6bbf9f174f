"""Llamas, and one hybrid, with seeded random weights, saved as checkpoints that vLLM loads.

Nothing is downloaded. Weights are drawn wider than usual, so that an answer depends on every token of the prompt: with
vLLM's own dummy weights a model gives the same answer whatever its cache holds.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

VOCAB_SIZE = 2048
HEAD_TOKENS_BYTES = 2 * 64 * 4
"""A token's keys and values in one head of one layer: 64 numbers each, float32."""

SEED = 7


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The size of a model.

    Attributes:
        num_layers: layers, all with full attention.
        hidden_size: a multiple of 64, the size of a head.
        num_kv_heads: heads that have keys and values.
    """

    num_layers: int
    hidden_size: int
    num_kv_heads: int

    @property
    def token_bytes(self) -> int:
        """KV of one token, in all layers."""
        return self.num_layers * self.num_kv_heads * HEAD_TOKENS_BYTES


WIDE = LlamaShape(num_layers=8, hidden_size=512, num_kv_heads=8)
"""32 KiB of KV per token: shows the cost of a load."""

NARROW = LlamaShape(num_layers=8, hidden_size=512, num_kv_heads=1)
"""4 KiB of KV per token: shows the cost of a load without its bytes."""

SMALL = LlamaShape(num_layers=4, hidden_size=256, num_kv_heads=2)
"""4 KiB of KV per token, computed fast: for many requests."""


def save_llama(folder: Path, shape: LlamaShape) -> Path:
    """Save a checkpoint in ``folder`` and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.hidden_size * 11 // 4,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // 64,
        num_key_value_heads=shape.num_kv_heads,
        initializer_range=0.12,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    set_seed(SEED)
    with torch.no_grad():
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, shape: LlamaShape, seed: int, scaling: int = 16) -> Path:
    """Save a LoRA adapter of a Llama's queries and keys in ``folder`` and return it."""
    import torch
    from safetensors.torch import save_file

    rank, generator = 8, torch.Generator().manual_seed(seed)
    sizes = {"q_proj": shape.hidden_size, "k_proj": shape.num_kv_heads * 64}
    tensors = {}
    for layer, (name, size) in product(range(shape.num_layers), sizes.items()):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(rank, shape.hidden_size, generator=generator)
        tensors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(size, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": scaling, "target_modules": sorted(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_qwen3_next(folder: Path) -> Path:
    """Save a Qwen3-Next of four layers, three of them with a recurrent state, in ``folder`` and return it."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, set_seed

    config = Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        initializer_range=0.12,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    set_seed(7)
    with torch.no_grad():
        Qwen3NextForCausalLM(config).save_pretrained(folder)
    return folder
