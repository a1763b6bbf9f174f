"""A small model and prompts of random tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096
MAX_TOKENS = 16_384
BLOCK_SIZE_TOKENS = 16


def make_model(num_layers: int = 8, hidden_size: int = 512, num_kv_heads: int = 8) -> LlamaForCausalLM:
    """Return a Llama with random weights and sixteen heads; by default with 16 KiB of KV per token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=MAX_TOKENS,
        eos_token_id=None,  # every answer has its full length
    )
    return LlamaForCausalLM(config)


def make_prompt(seed: int, num_tokens: int) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator).tolist()
    return tokens
