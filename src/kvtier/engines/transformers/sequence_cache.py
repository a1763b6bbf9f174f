"""The keys and values of one sequence, contiguous, in the form that transformers' models read.

A layer has one buffer for keys and one for values, tokens first, so that a block of the pool is contiguous in them and
gathering it is a plain copy. Models read them transposed, heads first, without a copy. The buffers have room for
further tokens, because growing by concatenation would copy the prefix in every step.
"""

from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtier.engines.transformers.model_adapter import KVShape, LayerShape
from kvtier.errors import ModelError

GROWTH_FACTOR = 1.5
"""Growth of a full buffer. Larger wastes memory at the end of a sequence, smaller copies more often."""

MIN_GROWTH_TOKENS = 64
"""Minimum growth of a full buffer, so that short sequences are not copied at every other token."""


class SequenceLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is not annotated
    """One layer's keys and values of one sequence.

    Args:
        shape: the KV that a token adds to the layer.
        dtype: of keys and values.
        device: the device of the buffers.
        capacity_tokens: initial capacity; the buffers grow when needed.

    Attributes:
        key_buffer: shape (capacity, key heads, key dim).
        value_buffer: shape (capacity, value heads, value dim).
        num_tokens: tokens held.
    """

    is_croppable = True
    is_sliding = False

    def __init__(
        self, shape: LayerShape, dtype: torch.dtype, device: torch.device, capacity_tokens: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers is not annotated
        keys = (capacity_tokens, shape.num_key_heads, shape.key_dim)
        values = (capacity_tokens, shape.num_value_heads, shape.value_dim)
        self.dtype, self.device = dtype, device
        self.key_buffer = _empty(keys, dtype, device)
        self.value_buffer = _empty(values, dtype, device)
        self.num_tokens = 0
        self._is_rolled_back = False
        self._fill: Callable[[], None] | None = None
        self.is_initialized = True
        self.set_num_tokens(0)

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` tokens in all; keeps the tokens held."""
        if num_tokens > len(self.key_buffer):
            self.key_buffer = _grown(self.key_buffer, self.num_tokens, num_tokens)
            self.value_buffer = _grown(self.value_buffer, self.num_tokens, num_tokens)
            self.set_num_tokens(self.num_tokens)

    def set_num_tokens(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Set how many tokens the buffers hold; return them as models read them, heads first."""
        self.num_tokens = num_tokens
        keys = self.key_buffer[:num_tokens].transpose(0, 1).unsqueeze(0)
        values = self.value_buffer[:num_tokens].transpose(0, 1).unsqueeze(0)
        self.keys, self.values = keys, values
        return keys, values

    def fill_later(self, fill: Callable[[], None] | None) -> None:
        """Call ``fill`` to write the held tokens when the model reaches this layer; None cancels it."""
        self._fill = fill

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the buffers exist from the start."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens and return everything held.

        Args:
            key_states: shape (1, key heads, new tokens, key dim).
            value_states: shape (1, value heads, new tokens, value dim).
            _args: arguments for other kinds of layers; ignored.
            _kwargs: the same.

        Raises:
            ModelError: more than one sequence.
        """
        if key_states.shape[0] != 1:
            raise ModelError(
                f"batch of {key_states.shape[0]} sequences: a KVTierCache holds one; use one each"
            )
        if self._is_rolled_back:
            raise ModelError(
                "a KVTierCache cannot be used after tokens were removed: generate without assisted decoding, "
                "prompt lookup and the like"
            )
        if self._fill is not None:
            self._fill()
            self._fill = None
        first = self.num_tokens
        last = first + key_states.shape[2]
        if last > len(self.key_buffer):
            self.reserve(max(last, int(first * GROWTH_FACTOR), first + MIN_GROWTH_TOKENS))
        self.key_buffer[first:last].copy_(key_states[0].detach().transpose(0, 1))
        self.value_buffer[first:last].copy_(value_states[0].detach().transpose(0, 1))
        return self.set_num_tokens(last)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a query of that length attends to, and the position of the first."""
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens held."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """Return -1, which means "no limit" to transformers."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens, after which ``update`` raises; ``generate`` calls this when it ends.

        Args:
            tokens_to_remove: zero, or the number of tokens as a negative number.

        Raises:
            ModelError: a positive number, which meant a length in earlier releases of transformers.
        """
        if tokens_to_remove > 0:
            raise ModelError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative one"
            )
        self._is_rolled_back |= tokens_to_remove < 0
        self.set_num_tokens(max(0, self.num_tokens + tokens_to_remove))

    def reset(self) -> None:
        """Drop every token."""
        self._is_rolled_back = False
        self.set_num_tokens(0)


class SequenceCache(Cache):
    """The keys and values of one sequence over all layers.

    Args:
        shape: the KV that a token adds to the model's cache.
        capacity_tokens: initial capacity; the buffers grow when needed.

    Attributes:
        sequence_layers: the layers, first to last; the same objects as transformers' ``layers``.
    """

    def __init__(self, shape: KVShape, capacity_tokens: int = 0) -> None:
        self.sequence_layers = [
            SequenceLayer(layer, shape.dtype, shape.device, capacity_tokens) for layer in shape.layers
        ]
        super().__init__(layers=list(self.sequence_layers))

    @property
    def num_tokens(self) -> int:
        """Tokens held by every layer."""
        return min(layer.num_tokens for layer in self.sequence_layers)

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` tokens in all; keeps the tokens held."""
        for layer in self.sequence_layers:
            layer.reserve(num_tokens)

    def set_num_tokens(self, num_tokens: int) -> None:
        """Set how many tokens every layer holds."""
        for layer in self.sequence_layers:
            layer.set_num_tokens(num_tokens)


def _grown(buffer: torch.Tensor, num_tokens: int, capacity_tokens: int) -> torch.Tensor:
    """Return a larger buffer with the first ``num_tokens`` tokens of this one."""
    larger = _empty((capacity_tokens, *buffer.shape[1:]), buffer.dtype, buffer.device)
    larger[:num_tokens].copy_(buffer[:num_tokens])
    return larger


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an ordinary tensor even in inference mode, because a later step outside that mode may write into it."""
    with torch.inference_mode(mode=False):
        return torch.empty(shape, dtype=dtype, device=device)
