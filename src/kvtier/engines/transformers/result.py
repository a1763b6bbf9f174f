"""The result of a request and the stream of its tokens: tokens, delays, and where the prompt came from."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engines.transformers.request import Request
from kvtier.errors import EngineStateError

DEVICE = "device"
"""Origin of prompt tokens found in the device's own prefix cache."""

HOST = "host"
"""Origin of prompt tokens loaded from the primary tier, where they were ready."""

COMPUTED = "computed"
"""Origin of prompt tokens that no tier held or whose load failed."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The result of one request.

    Attributes:
        request_id: the request's id in the engine.
        num_prompt_tokens: length of the prompt.
        tokens: the generated tokens, including the end token if it was generated.
        sources: prompt tokens by origin: ``device``, ``host``, the type of a secondary tier such as ``fs``,
            and ``computed``; they sum to ``num_prompt_tokens``; origins without a token are left out.
        time_to_first_token_s: from the request's start to its first token, including waits for tiers.
        total_time_s: from the request's start to its last token, including the consumer's own time.
        num_failed_load_blocks: device blocks whose load failed and that were computed instead.
        logits: float32 logits of each generated token, shape (num_tokens, vocabulary), on the CPU; None unless
            ``return_logits`` was set.
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


def split_origins(num_loaded_tokens: int, tokens_by_tier: Mapping[str, int]) -> dict[str, int]:
    """Divide loaded tokens among the tiers that promoted them and host memory. Pure.

    Args:
        num_loaded_tokens: tokens loaded to the device.
        tokens_by_tier: planned tokens by source, host memory or the type of a tier; more than were loaded when a block
            failed.

    Returns:
        Host memory first.
    """
    origins: dict[str, int] = {}
    num_left = num_loaded_tokens
    for tier, num_tokens in tokens_by_tier.items():
        if tier != CPULoadStoreSpec.medium():
            origins[tier] = min(num_tokens, num_left)
            num_left -= origins[tier]
    return {HOST: num_left} | origins


def make_result(request: Request) -> GenerationResult:
    """Return the result of a request that has ended. Pure."""
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


class TokenStream:
    """An iterator over generated tokens. Used from the engine's thread.

    The request starts at the first ``next`` and has ended when its last token is returned. ``close``, leaving the
    ``with`` block, and dropping the stream end it earlier.

    Args:
        request: the request, which the engine updates.
        tokens: the generator of its tokens.
    """

    def __init__(self, request: Request, tokens: Generator[int, None, None]) -> None:
        self._request = request
        self._tokens = tokens

    @property
    def result(self) -> GenerationResult:
        """The result; of a request that was closed early, with the tokens that it had.

        Raises:
            EngineStateError: the request has not ended.
        """
        if self._request.ended_s is None:
            name = self._request.request_id
            raise EngineStateError(
                f"request {name!r} has not ended: take all its tokens, or close the stream"
            )
        return make_result(self._request)

    def close(self) -> None:
        """End the request now and free its device blocks; idempotent."""
        self._tokens.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        return next(self._tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._request.ended_s is None else "ended"
        return f"TokenStream({self._request.request_id}: {len(self._request.output_ids)} tokens, {state})"
