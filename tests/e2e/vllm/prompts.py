"""Prompts of random tokens."""

import random

from tests.e2e.vllm.checkpoints import VOCAB_SIZE
from tests.e2e.vllm.engine_host import BLOCK_TOKENS

PROMPT_TOKENS = 1016
"""Tokens of a prompt: 31 whole blocks and a part, which an answer of 16 tokens fills."""

WHOLE_TOKENS = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
"""Tokens of its whole blocks: the most that can be found again."""

GREEDY = {"temperature": 0.0, "max_tokens": 16}
SEEDED = {"temperature": 0.8, "seed": 11, "max_tokens": 16}


def make_prompt(seed: int, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt; other seeds share no block."""
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]


def make_cycle(num_prompts: int) -> list[list[int]]:
    """Return so many prompts."""
    return [make_prompt(seed) for seed in range(num_prompts)]
