"""A transformers model as the engine uses it: the shape of its KV cache, and one forward call.

The shapes of a layer's cache are read from one forward pass over one token, not from the configuration, whose names
differ between architectures.

Layers with a sliding window are kept in full. The model masks tokens outside the window itself, so the results are
right, and no memory is saved. State spaces, linear attention and convolutions have recurrent states: tensors of a
constant size that stand for every token before. Layers with another kind of cache (cross attention, indexed attention)
are refused, and so are models that keep a state outside their cache.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, Protocol

import torch
from transformers import GenerationMixin, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvtier.engines.transformers.rope import ModelLength, read_rope_ranges
from kvtier.engines.transformers.token_ids import TokenIds, read_token_ids
from kvtier.errors import ConfigError, ModelError

EMPTY_LAYER_TYPES: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))
"""Layers of a cache that hold nothing. transformers 5.19 has no such class, 5.23 has (23 November 2026); vLLM's
environments may have either."""

EmptyLayer: type = (*EMPTY_LAYER_TYPES, LinearAttentionLayer)[0]
"""What stands in a cache for a layer that keeps nothing."""

EMPTY_LAYER_NAMES = frozenset({"mlp", "moe"})
"""Layers of a configuration that keep nothing. transformers 5.19 gives them a layer for states that stays empty."""

SERVED_LAYER_TYPES = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    *EMPTY_LAYER_TYPES,
)
"""Layers that hold one key and one value for each token, recurrent states, both or nothing; subclasses hold more and
are refused."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the argument with the cache: of all models since transformers 5.24 of November 2026, of most models before,
and of models before that have nothing but recurrent states."""

CACHE_SUPPORT_METHOD = "_supports_default_dynamic_cache"
"""transformers' private method that returns whether a model supports the common cache; there is no public one."""

PROBE_LENGTHS = (1, 3)
"""Tokens of the probes. Two, because the size of a recurrent state must not depend on the length."""

PROBE_TOKEN_ID = 0
"""The token of the probe; every vocabulary has it, and its embedding does not matter."""

REFUSED_ADAPTERS: Mapping[str, str] = {
    "XLORA": "weighs its adapters by all tokens of a pass, so keys of a prefix depend on what follows it",
    "POLY": "wants the number of a task with each prompt",
}
"""Kinds of adapters of peft that cannot be served, with the reason; learned prompts are recognised by themselves."""

MAX_RELATIVE_DIFFERENCE = 0.01
"""By which logits of a wrapped model and of its base may differ. Both run the same layers; a smaller limit could take
the rounding of a kernel whose order of sums varies for an adapter."""

REFUSED_TYPES: Mapping[str, str] = {
    "blt": "cuts the bytes of each pass into patches by themselves",
    "moshi": "does not mask what has left its sliding window",
}
"""Architectures whose answer depends on how a prompt is cut into passes, with the reason, in transformers 5.23 of
November 2026. No probe of a few tokens finds either: windows and patches are longer. A test has an answer of each that
changes with the cut."""

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


class StateKind(Enum):
    """What a recurrent state is to its layer; the names are those of transformers' cache."""

    CONV = "conv"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class StateShape:
    """One recurrent state of one layer for one sequence.

    Attributes:
        layer_name: the layer, as in ``LayerShape.name``.
        kind: the inputs that a convolution still needs, or what a recurrence has accumulated.
        idx: number of the state among those of its kind and layer.
        shape: of the tensor, with a leading dimension of one.
        dtype: of its elements, which may differ from that of keys and values.
    """

    layer_name: str
    kind: StateKind
    idx: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """The state and the form of its bytes, unique within the model; a part of the namespace."""
        sizes, dtype = ",".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")
        return f"{self.layer_name}.{self.kind.value}.{self.idx}:{dtype}[{sizes}]"


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps of a sequence: keys and values of each token, and states of a constant size.

    Attributes:
        layers: the layers with keys and values, first to last; ``layers.N`` is the model's layer N.
        dtype: of keys and values.
        device: where the model keeps them.
        states: the recurrent states, those with the largest elements first, so that all are aligned in a page.
        num_model_layers: layers of the model, those without keys, values and states included; 0 means as many as there
            are in ``layers``.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    states: tuple[StateShape, ...] = ()
    num_model_layers: int = 0

    @property
    def token_elements(self) -> int:
        """Elements of one token over all layers."""
        return sum(layer.key_elements + layer.value_elements for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.token_elements * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states over all layers; 0 for a model without any."""
        return sum(state.nbytes for state in self.states)


class ModelAdapter:
    """A causal language model with a cache of keys and values, ready to be served.

    Args:
        model: any causal language model of transformers, on one device, or what peft made of one.

    Attributes:
        model: the model of transformers, in evaluation mode; its layers have the adapters.
        shape: the KV that a token adds to its cache.
        rope: the ranges of lengths within which keys of one prefix are the same.
        length: the length that it was made for.
        cache_name: the argument of ``model`` and ``model.generate`` with the cache, one of ``CACHE_NAMES``.
        media_token_ids: placeholder tokens of images, sounds and videos.
        vocabulary_size: token ids are below this.

    Raises:
        ModelError: the model has no such cache, or a rope of an unknown type.

    Effects: switches the model to evaluation mode, because dropout would change its answers.
    """

    def __init__(self, model: "PreTrainedModel | PeftWrapper") -> None:
        model = _unwrap(model)
        _require_causal(model)
        model.train(mode=False)
        self.model = model
        self.rope = read_rope_ranges(model)
        self.length = ModelLength(model, self.name)
        self.shape = _probe(model)
        if self.shape.states and self.rope.switches:
            raise ModelError(
                f"{type(model).__name__} has recurrent states and longrope: the first step of a long prompt would go "
                "past the ends of blocks at which states are kept; set a rope_type of constant frequencies, or call "
                "model.generate without kvtier"
            )
        self.media_token_ids = _media_token_ids(model)
        self._module: torch.nn.Module = model
        self.vocabulary_size = _vocabulary_size(model)
        parameters = inspect.signature(model.forward).parameters
        self._last_logits_only = "logits_to_keep" in parameters
        self.cache_name = find_cache_name(model)
        # Some of the models with states (Bamba, in transformers 5.23) count positions from zero in each pass.
        self._gives_positions = bool(self.shape.states and self.shape.layers and "position_ids" in parameters)

    @property
    def name(self) -> str:
        """Name or path of the model, or its class when it has neither."""
        return self.model.config.name_or_path or type(self.model).__name__

    @property
    def can_generate_with_cache(self) -> bool:
        """Whether ``model.generate`` takes a cache that holds a prefix; models with states alone compute it anew."""
        return bool(self.shape.layers)

    def read_prompt(self, token_ids: TokenIds) -> list[int]:
        """Return a prompt as a list.

        Raises:
            ConfigError: it is not one sequence of the model's tokens, or has placeholders of images or sounds.
        """
        prompt = read_token_ids(token_ids, self.vocabulary_size)
        media = next((token_id for token_id in prompt if token_id in self.media_token_ids), None)
        if media is not None:
            remedy = (
                "is a placeholder of an image, a video or a sound, whose content ids do not identify: give a prompt of "
                "text only, or call model.generate without kvtier"
            )
            raise ConfigError("token_ids", media, remedy)
        return prompt

    @torch.no_grad()
    def forward(self, token_ids: Sequence[int], cache: Cache) -> torch.Tensor:
        """Compute ``token_ids`` after the tokens in ``cache``.

        Returns:
            The logits after the last token, shape (vocabulary,), float32, on the CPU.

        Effects: adds the new tokens to ``cache``.
        """
        inputs = torch.tensor([token_ids], device=self.shape.device)
        options: dict[str, object] = {"logits_to_keep": 1} if self._last_logits_only else {}
        if self._gives_positions:
            first = cache.get_seq_length()
            positions = torch.arange(first, first + len(token_ids), device=self.shape.device)
            options["position_ids"] = positions.unsqueeze(0)
        options[self.cache_name] = cache
        output = self._module(input_ids=inputs, use_cache=True, **options)
        last: torch.Tensor = output.logits[0, -1]
        return last.float().cpu()


class PeftWrapper(Protocol):
    """What peft's models have in common, which are none of transformers."""

    def get_base_model(self) -> PreTrainedModel:
        """Return the model whose layers have the adapters."""


def require_served_adapters(model: object) -> None:
    """Refuse adapters of peft that do more than their layers do.

    Raises:
        ModelError: one learned a prompt, begins at some token of it, or is of a kind that wants more than a prompt.
    """
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        reason = REFUSED_ADAPTERS.get(kind, "")
        if config.is_prompt_learning:
            reason = "learned a prompt, which comes before the tokens and changes every key and value"
        elif getattr(config, "alora_invocation_tokens", None):
            reason = "begins at its alora_invocation_tokens, which its layers do not see"
        if reason:
            raise ModelError(
                f"the adapter {name!r} ({kind}) {reason}: it is not served; pass the model without it, or call its own "
                "generate without kvtier"
            )


def _unwrap(model: PreTrainedModel | PeftWrapper) -> PreTrainedModel:
    """Return the model of transformers in what peft made of it, if both compute the same."""
    require_served_adapters(model)
    if isinstance(model, PreTrainedModel) or not isinstance(model, torch.nn.Module):
        return model  # type: ignore[return-value]  # anything but a model is refused by the caller
    if not hasattr(model, "get_base_model"):
        return model  # type: ignore[return-value]  # as above
    wrapper: Any = model  # Any: peft is not annotated
    base: PreTrainedModel = wrapper.get_base_model()
    wrapper.train(mode=False)
    inputs = torch.full((1, PROBE_LENGTHS[-1]), PROBE_TOKEN_ID, device=base.device)
    kinds = ", ".join(
        sorted({str(getattr(one.peft_type, "value", one)) for one in wrapper.peft_config.values()})
    )
    remedy = "it is not served; merge the adapter (merge_and_unload), or call its own generate without kvtier"
    try:
        with torch.no_grad():
            wrapped, own = (one(input_ids=inputs).logits.float() for one in (wrapper, base))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        message = f"{type(model).__name__} with {kinds} cannot run with a prompt alone ({error}): {remedy}"
        raise ModelError(message) from error
    if not torch.allclose(wrapped, own, rtol=MAX_RELATIVE_DIFFERENCE, atol=MAX_RELATIVE_DIFFERENCE):
        raise ModelError(f"{type(model).__name__} with {kinds} computes more than its layers do: {remedy}")
    return base


def _require_causal(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is not a transformers model: pass a causal language model")
    if model.config.is_encoder_decoder:
        raise ModelError(f"{type(model).__name__} has an encoder: only decoder-only models are served")
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        raise ModelError(f"{type(model).__name__} cannot generate: pass the model with its language head")
    reason = REFUSED_TYPES.get(model.config.model_type)
    if reason is not None:
        raise ModelError(
            f"{type(model).__name__} {reason}: its answer depends on how a prompt is cut into passes, so a prefix "
            "cannot be shared; call model.generate without kvtier"
        )
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


def find_cache_name(model: PreTrainedModel) -> str:
    """Return which of ``CACHE_NAMES`` is the argument of ``model`` with the cache.

    A class that passes arguments on (``**kwargs``) has the name of the class that it extends.
    """
    functions = (model.forward, *(each.forward for each in type(model).__mro__ if hasattr(each, "forward")))
    for function in functions:
        parameters = inspect.signature(function).parameters
        found = next((name for name in CACHE_NAMES if name in parameters), None)
        if found is not None:
            return found
    return "past_key_values"


def _probe(model: PreTrainedModel) -> KVShape:
    shape, *others = [_read_shape(model, _fill_cache(model, num_tokens)) for num_tokens in PROBE_LENGTHS]
    for other in others:
        differing = [state.name for state in set(shape.states) ^ set(other.states)]
        if differing:
            raise ModelError(
                f"{type(model).__name__} has recurrent states whose size depends on the length of the sequence "
                f"({min(differing)}): only states of a constant size are served"
            )
    return shape


@torch.no_grad()
def _fill_cache(model: PreTrainedModel, num_tokens: int) -> DynamicCache:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    _require_served_layers(model, cache)
    inputs = torch.full((1, num_tokens), PROBE_TOKEN_ID, device=model.device)
    caches = {find_cache_name(model): cache}
    try:
        model.forward(input_ids=inputs, use_cache=True, **caches)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{type(model).__name__} cannot run with a KV cache: {error}") from error
    _require_served_layers(model, cache)
    return cache


def _require_served_layers(model: PreTrainedModel, cache: DynamicCache) -> None:
    for index, layer in enumerate(cache.layers):
        if type(layer) not in SERVED_LAYER_TYPES:
            raise ModelError(
                f"layer {index} of {type(model).__name__} has a {type(layer).__name__}: only layers with a "
                "key and a value for every token, or with recurrent states, are served; call model.generate "
                "without kvtier"
            )


def _read_shape(model: PreTrainedModel, cache: DynamicCache) -> KVShape:
    layers: list[LayerShape] = []
    states: list[StateShape] = []
    kinds: set[tuple[torch.dtype, torch.device]] = set()
    for index, layer in enumerate(cache.layers):
        name, found = f"layers.{index}", len(layers) + len(states)
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            keys, values = layer.keys, layer.values
            kinds |= {(tensor.dtype, tensor.device) for tensor in (keys, values)}
            sizes = keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]
            layers.append(LayerShape(name, *sizes))
        if isinstance(layer, LinearAttentionLayer):
            states += _read_states(name, layer)
        if len(layers) + len(states) == found and not _keeps_nothing(model, index, layer):
            raise ModelError(
                f"{type(model).__name__} left its KV cache empty in layer {index} ({type(layer).__name__}): it does "
                "not use one there, or keeps its state elsewhere"
            )
    if not layers and not states:
        raise ModelError(f"{type(model).__name__} left its KV cache empty: it does not use one")
    if len(kinds) > 1:
        raise ModelError(
            f"{type(model).__name__} keeps its cache as {sorted(map(str, kinds))}: "
            "all layers must share one dtype and one device"
        )
    dtype, device = kinds.pop() if kinds else (model.dtype, model.device)
    # Elements of eight bytes before those of four and two: so each state is aligned without a gap between two.
    states.sort(key=lambda state: -state.dtype.itemsize)
    return KVShape(tuple(layers), dtype, device, tuple(states), len(cache.layers))


def _keeps_nothing(model: PreTrainedModel, index: int, layer: object) -> bool:
    names = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return isinstance(layer, EMPTY_LAYER_TYPES) or not EMPTY_LAYER_NAMES.isdisjoint(names[index : index + 1])


def _read_states(layer_name: str, layer: LinearAttentionLayer) -> list[StateShape]:
    by_kind = {StateKind.CONV: layer.conv_states, StateKind.RECURRENT: layer.recurrent_states}
    return [
        StateShape(layer_name, kind, idx, tuple(tensor.shape), tensor.dtype)
        for kind, tensors in by_kind.items()
        for idx, tensor in tensors.items()
        if tensor is not None
    ]
