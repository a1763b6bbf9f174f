"""Checks at start that what is kept of a prefix does not depend on what follows it, and is enough to go on from.

Sharing a prefix rests on this, and architectures configure it in too many ways to read: encoders with a language head,
flags for bidirectional attention, prefix language models, diffusion. So the model computes two short prompts with a
common beginning, and the keys and values of that beginning are compared. A third pass goes through ``model.generate``,
because some models number positions there in another way. Of a model with recurrent states a fourth pass goes on from
copies of the states after the first half, because some models keep a state elsewhere, or begin anew with each pass of
several tokens.

What the model computes of the first prompt is its page: a tier keeps that of the first engine, and one whose model
computes something else under the same name does not use the tier.
"""

import logging
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig

from kvtier.engines.transformers.model_adapter import ModelAdapter
from kvtier.engines.transformers.sequence_cache import SequenceCache
from kvtier.errors import ModelError
from kvtier.namespace import NamespacePage

logger = logging.getLogger(__name__)

NUM_PROBE_TOKENS = 8
"""Length of a probe; its first half is the common beginning. A longer one finds no more: a mask that lets the first
token attend to the last does so here too."""

MAX_RELATIVE_CHANGE = 0.03
"""How much keys and values of the common beginning may differ, relative to their norm, in the token that differs least.
A smaller limit takes rounding for a mask, in kernels whose order of sums depends on the input; a larger one may miss a
mask. Measured with random weights, float32 and bfloat16: 0 for causal models, 0.39 and more for bidirectional ones."""


MAX_KEPT_NUMBERS = 1024
"""Numbers kept of a token's keys in a layer, of its values, and of a state. More make a larger page, which of a large
model has some MiB; with far fewer rounding may look like other weights."""


class Continuation(Enum):
    """How a model goes on from the recurrent states of a prefix."""

    AT_ONCE = "at once"
    ONE_BY_ONE = "one token at a time"
    """With several tokens in one pass it begins with empty states. So do those with the first Mamba (Mamba, Jamba,
    Zamba) in transformers 5.23, of November 2026."""


def require_shareable_prefixes(adapter: ModelAdapter) -> Continuation:
    """Refuse a model that cannot go on from what is kept of a prefix. Does at least three short forward passes.

    Returns:
        How it goes on; AT_ONCE for a model without recurrent states.

    Raises:
        ModelError: it is such a model, or it cannot generate.
    """
    length = NUM_PROBE_TOKENS
    first, second = _make_probes(adapter, length)
    expected = _compute(adapter, first)
    if _change(expected, _compute(adapter, second), length // 2) > MAX_RELATIVE_CHANGE:
        raise ModelError(
            f"{_name(adapter)} has bidirectional attention: keys and values of a prefix depend on what follows it, so "
            "no two prompts can share them; use a causal model (is_decoder=True, use_bidirectional_attention=False)"
        )
    continuation = Continuation.AT_ONCE
    if adapter.shape.states:
        continuation = _find_continuation(adapter, (first, second, second[::-1]))
    if not adapter.can_generate_with_cache:
        return continuation
    found = _generate(adapter, first)
    if max(_change(expected, found, length), _state_change(expected, found)) > MAX_RELATIVE_CHANGE:
        raise ModelError(
            f"{_name(adapter)} computes other keys and values in model.generate than in its forward pass "
            "(bidirectional attention within the prefix, or other positions): call model.generate without kvtier"
        )
    return continuation


def make_page(adapter: ModelAdapter) -> NamespacePage:
    """Compute what tiers keep of the model beside its blocks. Does one short forward pass."""
    cache = _compute(adapter, _make_probes(adapter, NUM_PROBE_TOKENS)[0])
    rows = [
        _sample(buffer[:NUM_PROBE_TOKENS].flatten(1))
        for layer in cache.sequence_layers
        for buffer in (layer.key_buffer, layer.value_buffer)
    ]
    rows += [_sample(state.reshape(1, -1)) for state in cache.states]
    data = torch.cat([part.flatten() for part in rows]).view(torch.uint8).numpy().tobytes()
    return NamespacePage(data, partial(_differs, rows))


def _sample(rows: torch.Tensor) -> torch.Tensor:
    """Return some numbers of each row, evenly spread."""
    step = -(-rows.shape[1] // MAX_KEPT_NUMBERS) or 1
    return rows[:, ::step].to(device="cpu", dtype=torch.bfloat16)


def _differs(rows: Sequence[torch.Tensor], other: bytes) -> str:
    """Return in what another page differs from that of ``rows``, "" where it does not."""
    if len(other) != sum(part.nbytes for part in rows):
        return "its page is of another model, as its length shows"
    numbers = torch.frombuffer(bytearray(other), dtype=torch.bfloat16)
    changes = []
    at = 0
    for part in rows:
        found = numbers[at : at + part.numel()].view_as(part)
        at += part.numel()
        # What is no number here and there is equal.
        size, kept = (torch.nan_to_num(one.float()) for one in (part, found))
        difference = (kept - size).norm(dim=1) / size.norm(dim=1).clamp_min(1e-12)
        changes.append(float(difference.min()))
    change = max(changes, default=0.0)
    if change <= MAX_RELATIVE_CHANGE:
        return ""
    return f"what its model computed of {NUM_PROBE_TOKENS} tokens differs by {change:.0%} from what this one computes"


def _find_continuation(adapter: ModelAdapter, probes: Sequence[list[int]]) -> Continuation:
    for continuation in Continuation:
        # The probe that differs least, as rounding can route a token of a mixture of experts to another expert.
        change = min(
            _state_change(_compute(adapter, probe), _compute_in_parts(adapter, probe, continuation))
            for probe in probes
        )
        if change <= MAX_RELATIVE_CHANGE:
            if continuation is Continuation.ONE_BY_ONE:
                logger.warning(
                    "%s goes on from recurrent states one token at a time: what follows a hit is computed slowly, and "
                    "of a prompt computed from its first token only the last state is kept",
                    _name(adapter),
                )
            return continuation
    raise ModelError(
        f"{_name(adapter)} cannot go on from its recurrent states: computed in pieces a prompt has other states than "
        f"at once (they differ by {change:.0%}), so a part of them is not in the cache; call model.generate without "
        "kvtier"
    )


def _make_probes(adapter: ModelAdapter, length: int) -> tuple[list[int], list[int]]:
    """Return two prompts of ordinary tokens with equal first halves."""
    # Spread over the vocabulary: its first ids are often special ones.
    step = max(1, adapter.vocabulary_size // (2 * length + 1))
    ids = [token_id for token_id in range(adapter.vocabulary_size) if token_id not in adapter.media_token_ids]
    spread = [ids[(index + 1) * step % len(ids)] for index in range(2 * length)]
    return spread[:length], spread[: length // 2] + spread[length : length + length - length // 2]


def _compute(adapter: ModelAdapter, token_ids: Sequence[int]) -> SequenceCache:
    cache = SequenceCache(adapter.shape, len(token_ids))
    adapter.forward(token_ids, cache)
    return cache


def _compute_in_parts(
    adapter: ModelAdapter, token_ids: Sequence[int], continuation: Continuation
) -> SequenceCache:
    """Compute the first half, copy what the cache holds of it into another cache, and go on there."""
    half = len(token_ids) // 2
    first, second = _compute(adapter, token_ids[:half]), SequenceCache(adapter.shape, len(token_ids))
    for layer, copy in zip(first.sequence_layers, second.sequence_layers, strict=True):
        copy.key_buffer[:half].copy_(layer.key_buffer[:half])
        copy.value_buffer[:half].copy_(layer.value_buffer[:half])
    for state, state_copy in zip(first.states, second.states, strict=True):
        state_copy.copy_(state)
    second.set_num_tokens(half)
    num_tokens = 1 if continuation is Continuation.ONE_BY_ONE else half
    for at in range(half, len(token_ids), num_tokens):
        second.set_num_tokens(at)
        adapter.forward(token_ids[at : at + num_tokens], second)
    return second


def _generate(adapter: ModelAdapter, token_ids: Sequence[int]) -> SequenceCache:
    cache = SequenceCache(adapter.shape, len(token_ids))
    inputs = torch.tensor([token_ids], device=adapter.shape.device)
    model: Any = adapter.model  # Any: the annotations of transformers do not fit its models
    make_config: Any = GenerationConfig  # Any: the same
    once = make_config(max_new_tokens=1, do_sample=False, pad_token_id=0)
    # generate() takes what `once` leaves open from the model's configuration, which may select beams or another cache.
    usual = model.generation_config
    try:
        model.generation_config = make_config()
        options = {"attention_mask": torch.ones_like(inputs), adapter.cache_name: cache}
        model.generate(inputs, **options, generation_config=once)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{_name(adapter)} cannot generate with a KV cache: {error}") from error
    finally:
        model.generation_config = usual
    return cache


def _change(expected: SequenceCache, found: SequenceCache, num_tokens: int) -> float:
    """Return the largest relative change over all layers, each taken at its least changed token."""
    # The least changed token, because rounding can route a single token of a mixture of experts to another expert.
    pairs = [
        pair
        for layer, other in zip(expected.sequence_layers, found.sequence_layers, strict=True)
        for pair in ((layer.key_buffer, other.key_buffer), (layer.value_buffer, other.value_buffer))
    ]
    changes = []
    for tensor, other in pairs:
        size = tensor[:num_tokens].float().flatten(1)
        difference = other[:num_tokens].float().flatten(1) - size
        changes.append(float((difference.norm(dim=1) / size.norm(dim=1).clamp_min(1e-12)).min()))
    return max(changes, default=0.0)


def _state_change(expected: SequenceCache, found: SequenceCache) -> float:
    """Return the largest relative change of a recurrent state."""
    changes = [
        float((other.float() - state.float()).norm() / state.float().norm().clamp_min(1e-12))
        for state, other in zip(expected.states, found.states, strict=True)
    ]
    return max(changes, default=0.0)


def _name(adapter: ModelAdapter) -> str:
    return type(adapter.model).__name__
