"""Llamas with seeded random weights, saved as checkpoints that vLLM loads.

Nothing is downloaded. Weights are drawn wider than usual, so that an answer depends on every token of the prompt: with
vLLM's own dummy weights a model gives the same answer whatever its cache holds.
"""

from dataclasses import dataclass
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
