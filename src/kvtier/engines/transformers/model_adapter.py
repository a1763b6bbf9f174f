"""A transformers model as the engine uses it: the shape of its KV cache, and one forward call.

The shapes of a layer's cache are read from one forward pass over one token, not from the configuration, whose names
differ between architectures.

Layers with a sliding window are kept in full. The model masks tokens outside the window itself, so the results are
right, and no memory is saved. Layers without keys and values of every token (state spaces, linear attention, cross
attention, layers that use another layer's cache) are refused.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvtier.engines.transformers.rope import read_rope_ranges
from kvtier.errors import ModelError

SERVED_LAYER_TYPES = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers whose whole state is one key and one value for each token; subclasses have more state and are refused."""

CACHE_SUPPORT_METHOD = "_supports_default_dynamic_cache"
"""transformers' private method that returns whether a model supports the common cache; there is no public one."""

PROBE_TOKEN_ID = 0
"""The token of the probe; every vocabulary has it, and its embedding does not matter."""

MEDIA_TOKEN = re.compile(r"(.*_)?(image|video|audio|speech|media)_(placeholder_|pad_)?token_(id|index)")
"""Names of settings with the ids of media placeholder tokens; transformers has no common list of them."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV that one token adds to one layer's cache.

    Attributes:
        name: the layer, unique within the model.
        num_key_heads: heads of the keys.
        key_dim: elements of one head's key.
        num_value_heads: heads of the values.
        value_dim: elements of one head's value.
    """

    name: str
    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int

    @property
    def key_elements(self) -> int:
        """Elements of one token's keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_elements(self) -> int:
        """Elements of one token's values."""
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV that one token adds to the model's cache.

    Attributes:
        layers: the layers, first to last.
        dtype: of keys and values.
        device: where the model keeps them.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_elements(self) -> int:
        """Elements of one token over all layers."""
        return sum(layer.key_elements + layer.value_elements for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.token_elements * self.dtype.itemsize


class ModelAdapter:
    """A causal language model with a cache of keys and values, ready to be served.

    Args:
        model: any causal language model of transformers, on one device.

    Attributes:
        model: the model, in evaluation mode.
        shape: the KV that a token adds to its cache.
        rope: the ranges of lengths within which keys of one prefix are the same.
        media_token_ids: placeholder tokens of images, sounds and videos.

    Raises:
        ModelError: the model has no such cache, or a rope of an unknown type.

    Effects: switches the model to evaluation mode, because dropout would change its answers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        _require_causal(model)
        model.train(mode=False)
        self.model = model
        self.rope = read_rope_ranges(model)
        self.shape = _probe(model)
        self.media_token_ids = _media_token_ids(model)
        self._module: torch.nn.Module = model
        self._vocabulary_size = _vocabulary_size(model)
        self._last_logits_only = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def name(self) -> str:
        """Name or path of the model, or its class when it has neither."""
        return self.model.config.name_or_path or type(self.model).__name__

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return self._vocabulary_size

    @torch.no_grad()
    def forward(self, token_ids: Sequence[int], cache: Cache) -> torch.Tensor:
        """Compute ``token_ids`` after the tokens in ``cache``.

        Returns:
            The logits after the last token, shape (vocabulary,), float32, on the CPU.

        Effects: adds the new tokens to ``cache``.
        """
        inputs = torch.tensor([token_ids], device=self.shape.device)
        options = {"logits_to_keep": 1} if self._last_logits_only else {}
        output = self._module(input_ids=inputs, past_key_values=cache, use_cache=True, **options)
        last: torch.Tensor = output.logits[0, -1]
        return last.float().cpu()


def _require_causal(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is not a transformers model: pass a causal language model")
    if model.config.is_encoder_decoder:
        raise ModelError(f"{type(model).__name__} has an encoder: only decoder-only models are served")
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        raise ModelError(f"{type(model).__name__} cannot generate: pass the model with its language head")
    if not getattr(model, CACHE_SUPPORT_METHOD)():
        raise ModelError(
            f"{type(model).__name__} has no KV cache but another kind of state: it cannot be served"
        )


def _media_token_ids(model: PreTrainedModel) -> frozenset[int]:
    settings = {**model.config.get_text_config(decoder=True).to_dict(), **model.config.to_dict()}
    return frozenset(
        value for name, value in settings.items() if MEDIA_TOKEN.fullmatch(name) and isinstance(value, int)
    )


def _vocabulary_size(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor), "an embedding has a weight"
    return weight.shape[0]


@torch.no_grad()
def _probe(model: PreTrainedModel) -> KVShape:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    _require_served_layers(model, cache)
    inputs = torch.tensor([[PROBE_TOKEN_ID]], device=model.device)
    try:
        model.forward(input_ids=inputs, past_key_values=cache, use_cache=True)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{type(model).__name__} cannot run with a KV cache: {error}") from error
    _require_served_layers(model, cache)
    return _read_shape(model, cache)


def _require_served_layers(model: PreTrainedModel, cache: DynamicCache) -> None:
    for index, layer in enumerate(cache.layers):
        if type(layer) not in SERVED_LAYER_TYPES:
            raise ModelError(
                f"layer {index} of {type(model).__name__} has a {type(layer).__name__}: only layers with a "
                "key and a value for every token are served"
            )


def _read_shape(model: PreTrainedModel, cache: DynamicCache) -> KVShape:
    pairs = [
        (layer.keys, layer.values)
        for layer in cache.layers
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    ]
    if not pairs or len(pairs) < len(cache.layers):
        raise ModelError(f"{type(model).__name__} left its KV cache empty: it does not use one")
    kinds = {(tensor.dtype, tensor.device) for pair in pairs for tensor in pair}
    if len(kinds) > 1:
        raise ModelError(
            f"{type(model).__name__} keeps its cache as {sorted(map(str, kinds))}: "
            "all layers must share one dtype and one device"
        )
    dtype, device = kinds.pop()
    layers = tuple(
        LayerShape(f"layers.{index}", keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
        for index, (keys, values) in enumerate(pairs)
    )
    return KVShape(layers, dtype, device)
