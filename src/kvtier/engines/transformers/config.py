"""Settings of the embedded engine, and the sizes that it chooses where they leave one open.

Settings are checked at construction; ``kvtier.config`` parses ``extra_config``.

A model with recurrent states (state spaces, linear attention, convolutions) can go on after a prefix only from the
states at its very end. So states are copied at block boundaries, every ``state_interval_tokens``, and a prefix can be
shared at these boundaries alone. A copy has the same size after ten tokens and after a million, often that of thousands
of tokens of attention: a short interval shares more and costs memory, computing in short chunks and copying. Pages of
the device pool have one size, so blocks and states should be about equally large.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier.config import parse_settings
from kvtier.engines.transformers.model_adapter import KVShape
from kvtier.errors import ConfigError

DEFAULT_BLOCK_SIZE_TOKENS = 16
"""Tokens in a device block. Larger blocks transfer faster and share less; smaller ones cost more hashing and
bookkeeping for each token."""

DEFAULT_PREFILL_CHUNK_TOKENS = 512
"""Prompt tokens computed in one step. Larger chunks need more activation memory and start stores later;
smaller ones have slower matrix products."""

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
class EngineConfig:
    """Settings of the embedded engine.

    Attributes:
        num_device_blocks: blocks in the device pool; one request needs room for its prompt and its output.
        block_size_tokens: tokens in a device block; None takes 16, and for a model with recurrent states the interval.
        state_interval_tokens: recurrent states are kept after each multiple of so many tokens, a multiple of the block
            size; None takes as many as have keys and values of the size of the states, at least 256 and at most 1,024.
        extra_config: kvtier's own settings, for example ``{"cpu_bytes_to_use": "4GiB"}``; None switches
            offloading off, so that only the device's prefix cache remains.
        salt: mixed into every block hash; engines with different salts share nothing.
        prefill_chunk_tokens: prompt tokens computed in one step.
        model_name: name of the model in the namespace's document; None takes the one of the model's configuration. It
            decides what may be exchanged only with ``model_revision``.
        model_revision: name of the weights, which are not read then; None takes a SHA-256 over every weight.
        enable_events: whether the managers record stored and removed blocks.

    Raises:
        ConfigError: a value that cannot work.
        UnknownNameError: ``extra_config`` has an unknown setting.
    """

    num_device_blocks: int
    block_size_tokens: int | None = None
    extra_config: Mapping[str, Any] | None = field(default=None, repr=False)  # Any: as JSON has it
    salt: str = field(default="", repr=False)
    prefill_chunk_tokens: int = DEFAULT_PREFILL_CHUNK_TOKENS
    model_name: str | None = None
    model_revision: str | None = None
    enable_events: bool = False
    state_interval_tokens: int | None = None

    def __post_init__(self) -> None:
        parse_settings(self.extra_config or {})
        if not isinstance(self.salt, str):
            raise ConfigError("salt", self.salt, "must be a string")
        _require_positive("num_device_blocks", self.num_device_blocks)
        for setting in ("block_size_tokens", "state_interval_tokens"):
            if getattr(self, setting) is not None:
                _require_positive(setting, getattr(self, setting))
        _require_positive("prefill_chunk_tokens", self.prefill_chunk_tokens)


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


def _require_positive(setting: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(setting, value, "must be a whole number of at least 1")
