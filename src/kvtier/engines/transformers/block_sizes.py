"""How many tokens a block has, and after how many the recurrent states are kept.

A model with recurrent states (state spaces, linear attention, convolutions) can go on after a prefix only from the
states at its very end. So states are copied at block boundaries, every ``state_interval_tokens``, and a prefix can be
shared at these boundaries alone. A copy has the same size after ten tokens and after a million, often that of thousands
of tokens of attention: a short interval shares more and costs memory, computing in short chunks and copying. Pages of
the device pool have one size, so blocks and states should be about equally large.
"""

import math
from dataclasses import dataclass

from kvtier.engines.transformers.config import DEFAULT_BLOCK_SIZE_TOKENS, EngineConfig
from kvtier.engines.transformers.model_adapter import KVShape
from kvtier.errors import ConfigError

MIN_STATE_INTERVAL_TOKENS = 256
"""Smallest interval that is chosen by itself. A smaller one computes prompts in smaller chunks, which is slower."""

MAX_STATE_INTERVAL_TOKENS = 1024
"""Largest interval that is chosen by itself. A larger one finds nothing of shorter prompts; a smaller one keeps more
copies of states that are larger than so many tokens."""

WASTE_FACTOR = 8
"""Pages so many times as large as a block are warned of. The chosen sizes stay below it for most models."""

PAGE_ALIGNMENT_BYTES = 8
"""Pages begin at multiples of it, so that elements of any type are aligned in them."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The sizes of one engine.

    Attributes:
        block_size_tokens: tokens in a block of keys and values, and in a block hash.
        state_interval_tokens: recurrent states are kept after each multiple of so many tokens, itself a multiple of
            ``block_size_tokens``; None for a model without any.
        has_keys: whether the model has keys and values at all.
    """

    block_size_tokens: int
    state_interval_tokens: int | None = None
    has_keys: bool = True


def choose_block_sizes(config: EngineConfig, shape: KVShape) -> BlockSizes:
    """Return the sizes that ``config`` gives, and choose those that it leaves open. Pure.

    Raises:
        ConfigError: an interval for a model without recurrent states, or one that is no multiple of the block size.
    """
    block_size, interval = config.block_size_tokens, config.state_interval_tokens
    if not shape.states:
        if interval is not None:
            remedy = "is for models with recurrent states, and this one has none: leave it out"
            raise ConfigError("state_interval_tokens", interval, remedy)
        return BlockSizes(block_size or DEFAULT_BLOCK_SIZE_TOKENS)
    if interval is None:
        interval = choose_state_interval(shape, block_size or DEFAULT_BLOCK_SIZE_TOKENS)
    block_size = block_size or interval
    if interval % block_size:
        remedy = f"must be a multiple of block_size_tokens, which is {block_size}"
        raise ConfigError("state_interval_tokens", interval, remedy)
    return BlockSizes(block_size, interval, bool(shape.layers))


def describe_waste(shape: KVShape, sizes: BlockSizes) -> str:
    """Return a warning about pages of which blocks of keys and values fill little; empty otherwise. Pure."""
    block_bytes = sizes.block_size_tokens * shape.token_bytes
    if not shape.states or not sizes.has_keys or shape.state_bytes <= WASTE_FACTOR * block_bytes:
        return ""
    equal = math.ceil(shape.state_bytes / shape.token_bytes)
    return (
        f"a block of {sizes.block_size_tokens} tokens has {block_bytes} bytes and takes a page of {shape.state_bytes}, "
        f"the size of the recurrent states: raise block_size_tokens, which fills a page at {equal}"
    )


def choose_state_interval(shape: KVShape, unit_tokens: int) -> int:
    """Return so many tokens that their keys and values are as large as the states, within limits. Pure.

    Args:
        shape: what the model keeps of a sequence.
        unit_tokens: the answer is a multiple of it.
    """
    equal = math.ceil(shape.state_bytes / shape.token_bytes) if shape.layers else MAX_STATE_INTERVAL_TOKENS
    within = min(max(equal, MIN_STATE_INTERVAL_TOKENS), MAX_STATE_INTERVAL_TOKENS)
    return math.ceil(within / unit_tokens) * unit_tokens


def page_bytes(shape: KVShape, sizes: BlockSizes) -> int:
    """Return the size of a page of the device pool, which holds a block of keys and values or the states. Pure."""
    largest = max(sizes.block_size_tokens * shape.token_bytes, shape.state_bytes)
    if not shape.states:
        return largest
    return math.ceil(largest / PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
