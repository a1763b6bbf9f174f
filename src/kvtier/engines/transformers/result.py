"""What a finished request has to say: its tokens, its first token's delay, where its prompt came from."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtier.engines.transformers.request import Request

DEVICE = "device"
"""Origin of prompt tokens found in the device's own prefix cache."""

HOST = "host"
"""Origin of prompt tokens loaded from the primary tier, where they were ready."""

COMPUTED = "computed"
"""Origin of prompt tokens that no tier held, or whose load failed."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A request, served.

    Attributes:
        request_id: the engine's name of the request.
        num_prompt_tokens: length of the prompt.
        tokens: the generated tokens, the end token included when it was generated.
        sources: prompt tokens by origin: ``device``, ``host``, the type of a secondary tier such as ``fs``,
            and ``computed``; they sum to ``num_prompt_tokens``; origins without a token are left out.
        time_to_first_token_s: from the request's start to its first token, waits for tiers included.
        total_time_s: from the request's start to its last token, the consumer's own time included.
        num_failed_load_blocks: device blocks whose load failed and that were computed instead.
        logits: float32 logits of each generated token, shape (num_tokens, vocabulary), on the CPU, when asked
            for; otherwise None.
    """

    request_id: str
    num_prompt_tokens: int
    tokens: list[int]
    sources: Mapping[str, int]
    time_to_first_token_s: float
    total_time_s: float
    num_failed_load_blocks: int = 0
    logits: torch.Tensor | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.num_prompt_tokens - self.sources.get(COMPUTED, 0)


def make_result(request: Request) -> GenerationResult:
    """Return what a request that has ended has to say. Pure."""
    tokens = request.output_ids
    origins = dict(request.origins)
    num_computed = request.num_prompt_tokens - sum(origins.values())
    ended_s = request.started_s if request.ended_s is None else request.ended_s
    first_token_s = request.first_token_s if tokens else ended_s
    return GenerationResult(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        tokens=tokens,
        sources={name: count for name, count in (origins | {COMPUTED: num_computed}).items() if count},
        time_to_first_token_s=first_token_s - request.started_s,
        total_time_s=ended_s - request.started_s,
        num_failed_load_blocks=request.num_failed_load_blocks,
        logits=torch.stack(request.logits) if request.logits else None,
    )
