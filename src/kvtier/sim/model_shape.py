"""Bytes of keys and values per token, for a model described by its ``config.json``.

There are four kinds of layers:

- attention over the whole prompt: keys and values of each KV head, for every token;
- attention over a window: the same, but only the last tokens of a prompt are ever read again;
- latent attention (MLA): one compressed vector and one rotated key per token, shared by the heads;
- recurrent layers: one state, of which a copy is kept each so many tokens (``state_shape``).

Each assumption about a missing value is kept as a sentence. Models that this cannot express, such as those with
recurrent states of unknown kinds, are refused: a wrong number of bytes would give a wrong size of host memory.

Source: of vLLM's block, ``update_block_size_for_backend`` of vLLM 0.32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.input_files import parse_json, read_text_file
from kvtier.sim.config_fields import GUIDE, ConfigFields, parse_dtype
from kvtier.sim.state_shape import (
    StateFamily,
    StateLayers,
    attention_kinds,
    find_family,
    keeps_state,
    list_kinds,
    refuse_states,
)

CHANGING_FIELDS = (
    "num_kv_shared_layers",
    "global_head_dim",
    "index_head_dim",
    "compress_ratios",
    "block_configs",
)
"""Fields that change the bytes of a token in ways that are not supported here: sharing between layers, heads of two
sizes, the keys of an index, compressed layers, layers of different shapes."""

BLOCK_STEP_TOKENS = 16
"""vLLM's block has a multiple of so many tokens."""

STATES_ALONE_TOKENS = 1024
"""Tokens between two states of a model that has nothing else: those of the transformers engine. With vLLM's blocks of
16 tokens, the densest that it can keep, states would take megabytes a token."""


class Reach(Enum):
    """The part of a prompt that a layer reads."""

    WHOLE = "whole"
    WINDOW = "window"


REACH_OF_LAYER_TYPE = {
    "full_attention": Reach.WHOLE,
    "global_attention": Reach.WHOLE,
    "attention": Reach.WHOLE,
    "sliding_attention": Reach.WINDOW,
    "local_attention": Reach.WINDOW,
    "chunked_attention": Reach.WINDOW,
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind.

    Attributes:
        num_layers: number of layers.
        bytes_per_token: bytes of one such layer.
        window_tokens: tokens that it reads at most; None: the whole prompt.
        num_kv_heads: KV heads, which tensor parallelism divides among workers; 1 for a latent, which each worker has.
    """

    num_layers: int
    bytes_per_token: int
    window_tokens: int | None = None
    num_kv_heads: int = 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The KV cache of a model, all devices together.

    Attributes:
        layers: its layers by kind, those with a recurrent state left out.
        kv_dtype: type of keys and values.
        assumptions: assumptions about missing values, as sentences.
        states: its layers with a recurrent state; None: it has none.
    """

    layers: tuple[LayerGroup, ...]
    kv_dtype: str
    assumptions: tuple[str, ...] = ()
    states: StateLayers | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a stored token, kept states included. kvtier stores each layer's part, also of a window layer."""
        return sum(group.num_layers * group.bytes_per_token for group in self.layers) + self._state_bytes

    @property
    def _state_bytes(self) -> int:
        return self.states.bytes_per_token if self.states else 0

    def with_state_interval(self, num_tokens: int) -> "ModelShape":
        """Return the same model with a state kept each so many tokens. Pure.

        Raises:
            ConfigError: the model keeps no states, or the interval is not above zero.
        """
        if self.states is None:
            raise ConfigError(
                "--state-interval", num_tokens, "is for models with recurrent states: leave it out"
            )
        if num_tokens < 1:
            raise ConfigError("--state-interval", num_tokens, "must be at least one token")
        return replace(self, states=replace(self.states, interval_tokens=num_tokens))

    def stored_bytes_per_token(self, tensor_parallel_size: int, *, shares_copies: bool = True) -> int:
        """Return the bytes of a token that all workers of an engine store together, copies included. Pure.

        What consecutive workers hold of every group (a latent, a KV head) is stored once, as kvtier does under vLLM.
        States belong to one worker each, so with these each worker stores what it holds.

        Args:
            tensor_parallel_size: workers of the engine.
            shares_copies: False where shared memory has no room for host memory: each worker stores what it holds.

        Raises:
            ConfigError: so many workers cannot divide the KV heads evenly.
        """
        num_copies: list[int] = []
        for group in self.layers:
            smaller, larger = sorted((group.num_kv_heads, tensor_parallel_size))
            if smaller < 1 or larger % smaller:
                remedy = f"must divide {group.num_kv_heads} KV heads, or be a multiple of them"
                raise ConfigError("--tp", tensor_parallel_size, remedy)
            num_copies.append(max(1, tensor_parallel_size // group.num_kv_heads))
        num_shared = math.gcd(*num_copies) if shares_copies and num_copies and self.states is None else 1
        attention_bytes = sum(
            group.num_layers * (group.bytes_per_token * copies // num_shared)
            for group, copies in zip(self.layers, num_copies, strict=True)
        )
        return attention_bytes + self._state_bytes


class _ConfigReader:
    """Reads one configuration and collects its assumptions."""

    def __init__(self, config: Mapping[str, Any]) -> None:  # Any: JSON
        self._fields = ConfigFields(config)
        self._assumed: list[str] = []

    def read(self, kv_dtype: str | None) -> ModelShape:
        """Return the shape."""
        for field in CHANGING_FIELDS:
            if self._fields.get(field):
                raise ConfigError(
                    field,
                    self._fields.get(field),
                    f"changes the KV cache in an unsupported way: {GUIDE}",
                )
        family = find_family(self._fields)
        kinds: list[str] = []
        if family is None:
            num_layers = self._fields.num_layers()
            windows = self._windows(num_layers)
        else:
            field, kinds = self._kinds(family)
            windows = self._windows_of_types(field, attention_kinds(kinds))
        dtype, dtype_bytes = self._dtype(kv_dtype)
        groups, layer_bytes = self._groups(windows, dtype_bytes) if windows else ((), 0)
        num_state_layers = sum(map(keeps_state, kinds))
        states = self._states(family, num_state_layers, layer_bytes) if family and num_state_layers else None
        return ModelShape(groups, dtype, tuple(self._assumed), states)

    def _groups(self, windows: list[int | None], dtype_bytes: int) -> tuple[tuple[LayerGroup, ...], int]:
        """Return the layers with keys and values by their window, and the bytes of a token in one of them."""
        num_kv_heads, head_elements = self._heads()
        layer_bytes = num_kv_heads * head_elements * dtype_bytes
        groups = tuple(
            LayerGroup(windows.count(window), layer_bytes, window, num_kv_heads)
            for window in dict.fromkeys(windows)
        )
        if any(group.window_tokens for group in groups):
            self._assumed.append(
                "each block of a window layer is stored; of a loaded prefix only the window is loaded"
            )
        return groups, layer_bytes

    def _kinds(self, family: StateFamily) -> tuple[str, list[str]]:
        """Return the field that says the kind of each layer of a model with states, and these."""
        field, kinds = list_kinds(self._fields, family)
        declared = self._fields.get("num_hidden_layers")
        if declared is not None and declared != len(kinds):
            raise ConfigError(field, kinds, f"must name the kind of each of {declared} layers: {GUIDE}")
        return field, kinds

    def _states(self, family: StateFamily, num_layers: int, attention_bytes: int) -> StateLayers:
        """Return what the states of a model take."""
        state, bytes_of_input, dtype = family.read_size(self._fields).count_bytes(self._fields)
        self._assumed.append(
            f"{num_layers} layers keep a recurrent state, {num_layers * state:,} bytes together, in {dtype} "
            "(vLLM's --mamba-ssm-cache-dtype; on CPUs float32)"
        )
        if attention_bytes:
            interval = -(-state // (attention_bytes * BLOCK_STEP_TOKENS)) * BLOCK_STEP_TOKENS
            self._assumed.append(
                f"a state is kept for each block of {interval} tokens, which vLLM makes as long as a state; "
                "its default keeps fewer, one a prompt"
            )
        else:
            interval = STATES_ALONE_TOKENS
            self._assumed.append(
                f"a state is kept each {interval:,} tokens, as the transformers engine does; under vLLM one a prompt"
            )
        self._assumed.append("of a loaded prefix only one state is loaded")
        states = StateLayers(num_layers, state, interval, bytes_of_input)
        if bytes_of_input:
            self._assumed.append(
                f"the transformers engine keeps one more input of each convolution: {states.bytes_in_transformers:,} "
                "bytes"
            )
        return states

    def _heads(self) -> tuple[int, int]:
        """Return the number of KV heads, and the numbers that one stores per token and layer."""
        if self._fields.get("kv_lora_rank") is not None:
            self._assumed.append(
                "latent attention stores one compressed vector per token and layer, not keys and values"
            )
            return 1, self._fields.number("kv_lora_rank") + self._fields.number("qk_rope_head_dim")
        return self._num_kv_heads(), 2 * self._head_size()

    def _num_kv_heads(self) -> int:
        if self._fields.get("multi_query") is True and not self._fields.get("new_decoder_architecture"):
            return 1
        for field in ("num_key_value_heads", "num_kv_heads"):
            if self._fields.get(field) is not None:
                return self._fields.number(field)
        self._assumed.append("the config has no number of KV heads: as many as attention heads")
        return self._num_heads()

    def _num_heads(self) -> int:
        return self._fields.number("num_attention_heads", "n_head", "n_heads")

    def _head_size(self) -> int:
        for field in ("head_dim", "attention_head_dim"):
            if self._fields.get(field) is not None:
                return self._fields.number(field)
        hidden, heads = self._fields.number("hidden_size", "n_embd", "d_model"), self._num_heads()
        if hidden % heads:
            remedy = f"is not a multiple of {heads} attention heads, and there is no head_dim: {GUIDE}"
            raise ConfigError("hidden_size", hidden, remedy)
        return hidden // heads

    def _windows(self, num_layers: int) -> list[int | None]:
        """Return the window of each layer of a model without states; None for layers that read the whole prompt."""
        kinds = self._fields.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) != num_layers:
                remedy = f"must name the kind of each of {num_layers} layers: {GUIDE}"
                raise ConfigError("layer_types", kinds, remedy)
            return self._windows_of_types("layer_types", kinds)
        refuse_states(self._fields)
        window = self._fields.get("sliding_window")
        if not window or self._fields.get("use_sliding_window") is False:
            return [None] * num_layers
        window = self._fields.number("sliding_window")
        if self._fields.get("use_sliding_window") is True:
            first = self._fields.number("max_window_layers")
            return [None if layer < first else window for layer in range(num_layers)]
        if self._fields.get("sliding_window_pattern"):
            period = self._fields.number("sliding_window_pattern")
            return [None if (layer + 1) % period == 0 else window for layer in range(num_layers)]
        if self._fields.get("model_type") == "gemma2":
            return [window if layer % 2 == 0 else None for layer in range(num_layers)]
        self._assumed.append(f"sliding_window={window} without layer_types: each layer has that window")
        return [window] * num_layers

    def _windows_of_types(self, named_in: str, kinds: Sequence[object]) -> list[int | None]:
        """Return the window of each layer with keys and values, whose kinds stand in the field ``named_in``."""
        windows: list[int | None] = []
        for kind in kinds:
            reach = REACH_OF_LAYER_TYPE.get(str(kind))
            if reach is None:
                known = ", ".join(REACH_OF_LAYER_TYPE)
                raise ConfigError(named_in, kind, f"is not supported, known are {known}: {GUIDE}")
            field = "attention_chunk_size" if kind == "chunked_attention" else "sliding_window"
            windows.append(self._fields.number(field) if reach is Reach.WINDOW else None)
        return windows

    def _dtype(self, kv_dtype: str | None) -> tuple[str, int]:
        if kv_dtype is not None:
            self._assumed.append(f"keys and values are stored as {kv_dtype}; their scales take no bytes")
            return parse_dtype("--dtype", kv_dtype)
        return self._fields.dtype()


def read_shape(path: Path, kv_dtype: str | None = None) -> ModelShape:
    """Return the shape of the model whose ``config.json`` is at ``path``.

    Args:
        path: the file.
        kv_dtype: type of keys and values if it differs from the model's, for example "fp8".

    Raises:
        ConfigError: the file cannot be read, or describes no supported KV cache.
    """
    text = read_text_file("MODEL", path)
    found = parse_json("MODEL", str(path), text, "give a model's config.json")
    if not isinstance(found, dict):
        raise ConfigError("MODEL", str(path), "is not a JSON object: give a model's config.json")
    return shape_of_config(found, kv_dtype)


def shape_of_config(config: Mapping[str, Any], kv_dtype: str | None = None) -> ModelShape:
    """Return the shape that a ``config.json`` describes; see ``read_shape``. Pure.

    Raises:
        ConfigError: a field is missing or has an unsupported value.
    """
    return _ConfigReader(config).read(kv_dtype)
