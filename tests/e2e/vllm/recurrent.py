"""Prompts, engine and comparison for models with recurrent states.

The lengths end inside a block, at its end, and a token to each side of it; the state of a prompt is found at the last
end of a block before its last token.
"""

from collections.abc import Mapping
from typing import Any

from tests.e2e.vllm.answers import LOGPROB_TOLERANCE, Answer
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.prompts import make_prompt

BLOCK_TOKENS = 256
"""Tokens of a block, so that a page of attention is not smaller than one of a state."""

LENGTHS = (1900, 1024, 1025, 1023, 600, 513, 300, 256, 1300, 200)
PROMPTS = [make_prompt(100 + length, length) for length in LENGTHS]
FOUND = [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in LENGTHS]
"""Of each prompt the tokens whose attention and state are kept."""

GREEDY = {"temperature": 0.0, "max_tokens": 8}

ARGUMENTS: dict[str, Any] = {  # Any: vLLM's own
    "dtype": "bfloat16",
    "block_size": BLOCK_TOKENS,
    "mamba_cache_mode": "align",
    "enable_prefix_caching": True,
}
EACH_BLOCK = {"prefix_cache_retention_interval": BLOCK_TOKENS}
"""vLLM keeps the state at the end of each block that a step ends with, those of an answer among them."""

POOL_BLOCKS = 90
"""Each of the ten prompts takes up to eight blocks of attention and six of states, two for each layer: not all fit."""

REPLAY_TOLERANCE = 0.25
"""Largest difference of a log-probability when a pre-empted request computes in chunks what it had computed token by
token, in bfloat16: vLLM without kvtier shows 0.09. A state that is zeroed changes most by more, and the first token."""


def options_with(
    model: str,
    settings: dict[str, Any] | None,  # Any: a user's JSON
    num_device_blocks: int = POOL_BLOCKS,
    environment: dict[str, str] | None = None,
    *,
    is_asynchronous: bool = False,
    engine_arguments: Mapping[str, Any] | None = None,  # Any: vLLM's own
) -> EngineOptions:
    """Return how to start an engine that runs ten requests at a time."""
    return EngineOptions(
        model,
        settings,
        num_device_blocks,
        10,
        {**ARGUMENTS, **(engine_arguments or {})},
        environment or {},
        is_asynchronous,
    )


def assert_same_or_replayed(answers: list[Answer], others: list[Answer], num_replayed: int) -> None:
    """Fail unless all but so many answers are the same, and those agree up to where rounding made another token."""
    num_other = 0
    for answer, other in zip(answers, others, strict=True):
        pairs = list(zip(answer.tokens, other.tokens, strict=True))
        num_same = next((at for at, (one, two) in enumerate(pairs) if one != two), len(pairs) - 1)
        logprobs = zip(answer.logprobs[: num_same + 1], other.logprobs, strict=False)
        largest = max(abs(one - two) for one, two in logprobs)
        num_other += largest > LOGPROB_TOLERANCE
        assert largest < REPLAY_TOLERANCE
    assert num_other <= num_replayed


def found_of(answers: list[Answer]) -> list[int]:
    """Return how many tokens of each prompt were not computed."""
    return [answer.num_cached_tokens for answer in answers]
