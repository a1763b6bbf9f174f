"""The keys, values and recurrent states of one sequence, in the form that transformers' models read.

A layer has one buffer for keys and one for values, tokens first, so that a block of the pool is contiguous in them and
gathering it is a plain copy. Models read them transposed, heads first, without a copy. The buffers have room for
further tokens, because growing by concatenation would copy the prefix in every step. A recurrent state is one tensor
that the model overwrites.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from kvtier.engines.transformers.model_adapter import (
    EmptyLayer,
    KVShape,
    LayerShape,
    StateKind,
    StateShape,
)
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


class StateLayer(LinearAttentionLayer):
    """The recurrent states of one layer of one sequence; transformers' own layer with tensors of a known form.

    Args:
        shapes: the states of the layer.
        device: of the tensors.

    Attributes:
        states: the tensors in the order of ``shapes``; the model writes into them.
    """

    is_croppable = False  # tokens cannot leave a state

    def __init__(self, shapes: Sequence[StateShape], device: torch.device) -> None:
        super().__init__(number_of_states=1 + max(shape.idx for shape in shapes))
        self._is_rolled_back = False
        self.device, self.dtype = device, shapes[0].dtype  # type: ignore[assignment]  # annotated as None there
        self.states = [_empty(shape.shape, shape.dtype, device).zero_() for shape in shapes]
        for shape, tensor in zip(shapes, self.states, strict=True):
            if shape.kind is StateKind.CONV:
                self.conv_states[shape.idx] = tensor
                self.conv_kernel_size[shape.idx] = shape.shape[-1]
                self.is_conv_states_initialized[shape.idx] = True
            else:
                self.recurrent_states[shape.idx] = tensor
                self.is_recurrent_states_initialized[shape.idx] = True

    def set_has_tokens(self, has_tokens: bool) -> None:
        """Set whether the states stand for tokens; without any the model begins anew."""
        self._is_rolled_back = False
        self.has_previous_state = dict.fromkeys(self.has_previous_state, has_tokens)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Add new inputs of the convolution; return those that it needs. Arguments: as in transformers."""
        self._require_usable(conv_states)
        updated: torch.Tensor = super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
        return updated

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Replace the state; return it. Arguments: as in transformers."""
        self._require_usable(recurrent_states)
        updated: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return updated

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing for zero tokens; after any other number updates raise, because a state cannot go back."""
        self._is_rolled_back |= tokens_to_remove != 0

    def _require_usable(self, states: torch.Tensor) -> None:
        """Raise ModelError for more than one sequence, and after tokens were removed."""
        if states.shape[0] != 1:
            raise ModelError(f"batch of {states.shape[0]} sequences: a KVTierCache holds one; use one each")
        if self._is_rolled_back:
            raise ModelError(
                "a recurrent state cannot go back to fewer tokens: generate without assisted decoding, prompt lookup "
                "and the like"
            )


class StateAndSequenceLayer(StateLayer, SequenceLayer):  # type: ignore[misc,no-untyped-call]  # bases of transformers
    """A layer with recurrent states and with keys and values of every token.

    Args:
        shapes: its states.
        shape: the keys and values that a token adds.
        dtype: of keys and values.
        device: the device of the buffers.
        capacity_tokens: initial capacity; the buffers grow when needed.
    """

    is_compileable = False

    def __init__(
        self,
        shapes: Sequence[StateShape],
        shape: LayerShape,
        dtype: torch.dtype,
        device: torch.device,
        capacity_tokens: int,
    ) -> None:
        StateLayer.__init__(self, shapes, device)
        SequenceLayer.__init__(self, shape, dtype, device, capacity_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        StateLayer.crop(self, tokens_to_remove)
        SequenceLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        StateLayer.reset(self)
        SequenceLayer.reset(self)


class SequenceCache(Cache):
    """The keys, values and recurrent states of one sequence over all layers.

    Args:
        shape: what the model keeps of a sequence.
        capacity_tokens: initial capacity; the buffers grow when needed.

    Attributes:
        sequence_layers: the layers with keys and values, first to last; the same objects as transformers' ``layers``.
        state_layers: those with recurrent states; a layer may be in both.
        states: the recurrent states in the order of ``shape.states``.
    """

    def __init__(self, shape: KVShape, capacity_tokens: int = 0) -> None:
        by_name = {layer.name: layer for layer in shape.layers}
        layers = [
            _make_layer(
                shape,
                by_name.get(f"layers.{index}"),
                [state for state in shape.states if state.layer_name == f"layers.{index}"],
                capacity_tokens,
            )
            for index in range(shape.num_model_layers or len(shape.layers))
        ]
        self.sequence_layers = [layer for layer in layers if isinstance(layer, SequenceLayer)]
        self.state_layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        self._num_set_tokens = 0
        self.states = [_find_state(layers, state) for state in shape.states]
        super().__init__(layers=[*layers])

    @property
    def num_tokens(self) -> int:
        """Tokens held by every layer; a model without keys and values knows what ``set_num_tokens`` said last."""
        return min((layer.num_tokens for layer in self.sequence_layers), default=self._num_set_tokens)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens held."""
        if not self.sequence_layers:
            return self._num_set_tokens
        num_tokens: int = super().get_seq_length(layer_idx)
        return num_tokens

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` tokens in all; keeps the tokens held."""
        for layer in self.sequence_layers:
            layer.reserve(num_tokens)

    def set_num_tokens(self, num_tokens: int) -> None:
        """Set how many tokens every layer holds, and whether the states stand for any."""
        self._num_set_tokens = num_tokens
        for layer in self.sequence_layers:
            layer.set_num_tokens(num_tokens)
        for states in self.state_layers:
            states.set_has_tokens(num_tokens > 0)


def _make_layer(
    shape: KVShape, layer: LayerShape | None, states: Sequence[StateShape], capacity_tokens: int
) -> SequenceLayer | StateLayer | CacheLayerMixin:
    if layer is None:
        # The shape says so only where the model's own cache had such a layer.
        return StateLayer(states, shape.device) if states else EmptyLayer()
    if states:
        return StateAndSequenceLayer(states, layer, shape.dtype, shape.device, capacity_tokens)
    return SequenceLayer(layer, shape.dtype, shape.device, capacity_tokens)


def _find_state(layers: Sequence[object], shape: StateShape) -> torch.Tensor:
    layer = layers[int(shape.layer_name.rpartition(".")[2])]
    assert isinstance(layer, StateLayer), "a state is in a layer with states"
    tensors = layer.conv_states if shape.kind is StateKind.CONV else layer.recurrent_states
    tensor = tensors[shape.idx]
    assert tensor is not None, "every state of a shape has a tensor"
    return tensor


def _grown(buffer: torch.Tensor, num_tokens: int, capacity_tokens: int) -> torch.Tensor:
    """Return a larger buffer with the first ``num_tokens`` tokens of this one."""
    larger = _empty((capacity_tokens, *buffer.shape[1:]), buffer.dtype, buffer.device)
    larger[:num_tokens].copy_(buffer[:num_tokens])
    return larger


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an ordinary tensor even in inference mode, because a later step outside that mode may write into it."""
    with torch.inference_mode(mode=False):
        return torch.empty(shape, dtype=dtype, device=device)
