"""What layers with a recurrent state keep, from a ``config.json``: which layers these are, and how large a state is.

Architectures have the same few kinds of states under fields of many names. A state is the last inputs of a convolution,
what a recurrence has accumulated, or both:

- Mamba: a row of numbers for each channel;
- Mamba2: a matrix for each head, and groups of heads that share two inputs of the convolution;
- gated delta nets and Kimi's delta attention (KDA): a matrix for each head, and convolutions of queries, keys, values;
- linear attention as in MiniMax: a matrix for each head alone;
- short convolutions as in LFM2: the inputs alone.

Source: the shapes and types are those of ``MambaStateShapeCalculator`` and ``MambaStateDtypeCalculator`` of vLLM 0.32;
the fields are those of the published files and of the configuration classes of transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier.sim.config_fields import GUIDE, ConfigFields, parse_dtype

STATE_KINDS = frozenset({"linear_attention", "mamba", "conv"})
"""Names of layers that keep a state and no keys."""

BOTH_KIND = "hybrid"
"""The name of a layer with attention and a state side by side."""

OTHER_KINDS = frozenset({"mlp", "moe"})
"""Names of layers that keep nothing, where each part of a usual layer counts as one of its own."""

ATTENTION_KIND = "full_attention"

PATTERN_KINDS = {"M": "mamba", "*": ATTENTION_KIND, "-": "mlp", "E": "moe"}
"""The letters of ``hybrid_override_pattern``."""

STATE_FIELDS = (
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_period",
    "attn_layer_indices",
    "attn_type_list",
    "linear_attn_config",
    "full_attention_interval",
    "block_types",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "conv_L_cache",
)
"""Fields of models that keep states; with an unknown ``model_type`` each of them is refused."""


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers with a recurrent state.

    Attributes:
        num_layers: number of layers.
        bytes_of_state: bytes of the state of one layer, all devices together, as vLLM keeps it.
        interval_tokens: tokens between two kept states of a sequence.
        bytes_of_input: bytes of one input of a layer's convolutions, of which transformers keeps one more; 0 without.
    """

    num_layers: int
    bytes_of_state: int
    interval_tokens: int
    bytes_of_input: int = 0

    @property
    def bytes_kept(self) -> int:
        """Bytes of the states of all layers after one token."""
        return self.num_layers * self.bytes_of_state

    @property
    def bytes_in_transformers(self) -> int:
        """Bytes of the same states in transformers, where they have the types that are assumed here."""
        return self.num_layers * (self.bytes_of_state + self.bytes_of_input)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of kept states for each token of a long sequence, rounded up."""
        return -(-self.bytes_kept // self.interval_tokens)


class StateSize(NamedTuple):
    """What one layer's state holds.

    Attributes:
        channels: numbers of one input of its convolutions.
        kernel_tokens: inputs that a convolution reads, the newest one included; a state has the others.
        elements: numbers that its recurrence has accumulated.
        dtype_field: the field with the type of those; None: they have the model's, whatever the configuration says.
        default_dtype: their type where the field is missing; None: the model's.
    """

    channels: int
    kernel_tokens: int
    elements: int
    dtype_field: str | None = "mamba_ssm_dtype"
    default_dtype: str | None = None

    def count_bytes(self, fields: ConfigFields) -> tuple[int, int, str]:
        """Return the bytes of a state, those of one input of its convolutions, and the type of the rest.

        Raises:
            ConfigError: a type is missing or unknown.
        """
        model_dtype, input_bytes = fields.dtype()
        declared = fields.get(self.dtype_field) if self.dtype_field else None
        dtype, item_bytes = (
            parse_dtype(self.dtype_field or "dtype", str(declared))
            if declared is not None
            else parse_dtype("dtype", self.default_dtype or model_dtype)
        )
        bytes_of_input = self.channels * input_bytes
        return (
            max(0, self.kernel_tokens - 1) * bytes_of_input + self.elements * item_bytes,
            bytes_of_input,
            dtype,
        )


class StateFamily(NamedTuple):
    """Architectures whose states are of one kind.

    Attributes:
        read_size: returns what a layer's state holds.
        list_kinds: returns the kind of each layer, where no field lists them.
    """

    read_size: Callable[[ConfigFields], StateSize]
    list_kinds: Callable[[ConfigFields], list[str]]


def find_family(fields: ConfigFields) -> StateFamily | None:
    """Return what is known of the states of a model; None where it keeps none that are known. Pure."""
    if fields.get("linear_num_value_heads") is not None:
        return GATED_DELTA_NETS
    return FAMILIES.get(str(fields.get("model_type")))


def list_kinds(fields: ConfigFields, family: StateFamily) -> tuple[str, list[str]]:
    """Return the kind of each layer of a model with states, and the field that says so.

    Raises:
        ConfigError: no field says it, or one contradicts the number of layers.
    """
    for field in ("layer_types", "layers_block_type"):
        listed = fields.get(field)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
            raise ConfigError(field, listed, f"must name the kind of each layer: {GUIDE}")
        return field, listed
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return "num_hidden_layers", family.list_kinds(fields)
    if not isinstance(pattern, str) or not set(pattern) <= PATTERN_KINDS.keys():
        letters = " ".join(PATTERN_KINDS)
        raise ConfigError("hybrid_override_pattern", pattern, f"must be of {letters} alone: {GUIDE}")
    return "hybrid_override_pattern", [PATTERN_KINDS[letter] for letter in pattern]


def refuse_states(fields: ConfigFields) -> None:
    """Raise ConfigError where a field says that a model, of an unknown kind, keeps states."""
    for field in STATE_FIELDS:
        if fields.get(field):
            remedy = f"some layers store states, not keys and values: {GUIDE}"
            raise ConfigError(field, fields.get(field), remedy)


def _mark_attention(fields: ConfigFields, is_attention: Callable[[int], bool]) -> list[str]:
    return [ATTENTION_KIND if is_attention(layer) else "mamba" for layer in range(fields.num_layers())]


def _every(kind: str) -> Callable[[ConfigFields], list[str]]:
    return lambda fields: [kind] * fields.num_layers()


def _listed_only(_: ConfigFields) -> list[str]:
    raise ConfigError("layer_types", None, f"is missing in the config: {GUIDE}")


def _last_of_each(field: str) -> Callable[[ConfigFields], list[str]]:
    def kinds(fields: ConfigFields) -> list[str]:
        period = fields.number(field)
        return _mark_attention(fields, lambda layer: (layer + 1) % period == 0)

    return kinds


def _named_by(field: str) -> Callable[[ConfigFields], list[str]]:
    """Return a reader of a field that lists the layers with attention, counted from zero."""

    def kinds(fields: ConfigFields) -> list[str]:
        named = fields.numbers(field, fields.get(field))
        return _mark_attention(fields, lambda layer: layer in named)

    return kinds


def _jamba_kinds(fields: ConfigFields) -> list[str]:
    period, offset = fields.number("attn_layer_period"), fields.get("attn_layer_offset")
    return _mark_attention(fields, lambda layer: layer % period == (offset or 0))


def _kimi_kinds(fields: ConfigFields) -> list[str]:
    described = fields.get("linear_attn_config")
    if not isinstance(described, Mapping):
        raise ConfigError("linear_attn_config", described, f"must describe the layers: {GUIDE}")
    named = fields.numbers("full_attn_layers", described.get("full_attn_layers"))
    return _mark_attention(fields, lambda layer: layer + 1 in named)


def _minimax_kinds(fields: ConfigFields) -> list[str]:
    types = fields.numbers("attn_type_list", fields.get("attn_type_list"))
    return [ATTENTION_KIND if one else "linear_attention" for one in types]


def _mamba_size(fields: ConfigFields) -> StateSize:
    if fields.get("mamba_expand") is None and fields.get("intermediate_size") is not None:
        channels = fields.number("intermediate_size")
    else:
        channels = fields.number("mamba_expand", "expand") * fields.number("hidden_size", "d_model")
    state = fields.number("mamba_d_state", "state_size")
    return StateSize(channels, fields.number("mamba_d_conv", "conv_kernel"), channels * state)


def _mamba2_size(fields: ConfigFields) -> StateSize:
    heads = fields.number("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    # The first names go before head_dim, which is that of attention in models with both.
    size = fields.number("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    groups = fields.number("mamba_n_groups", "mamba_ngroups", "n_groups")
    state = fields.number("mamba_d_state", "ssm_state_size", "state_size")
    channels = heads * size + 2 * groups * state
    return StateSize(channels, fields.number("mamba_d_conv", "conv_kernel"), heads * size * state)


def _nemotron_size(fields: ConfigFields) -> StateSize:
    return _mamba2_size(fields)._replace(dtype_field="mamba_ssm_cache_dtype", default_dtype="float32")


def _gated_delta_net_size(fields: ConfigFields) -> StateSize:
    key_heads, value_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    key_size, value_size = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
    channels = 2 * key_heads * key_size + value_heads * value_size
    elements = value_heads * key_size * value_size
    return StateSize(channels, fields.number("linear_conv_kernel_dim"), elements)


def _kda_size(fields: ConfigFields) -> StateSize:
    described = fields.get("linear_attn_config")
    if isinstance(described, Mapping):
        numbers = [
            fields.require_number(name, described.get(name))
            for name in ("num_heads", "head_dim", "short_conv_kernel_size")
        ]
    else:
        numbers = [
            fields.number(name) for name in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        ]
    heads, size, kernel = numbers
    return StateSize(3 * heads * size, kernel, heads * size * size, None, "float32")


def _linear_attention_size(fields: ConfigFields) -> StateSize:
    size = fields.number("head_dim")
    return StateSize(0, 0, fields.number("num_attention_heads") * size * size, None)


def _short_convolution_size(fields: ConfigFields) -> StateSize:
    return StateSize(fields.number("conv_dim", "hidden_size"), fields.number("conv_L_cache"), 0, None)


GATED_DELTA_NETS = StateFamily(_gated_delta_net_size, _last_of_each("full_attention_interval"))

FAMILIES: Mapping[str, StateFamily] = {
    "bailing_hybrid": StateFamily(_kda_size, _last_of_each("layer_group_size")),
    "bamba": StateFamily(_mamba2_size, _named_by("attn_layer_indices")),
    "falcon_h1": StateFamily(_mamba2_size, _every(BOTH_KIND)),
    "falcon_mamba": StateFamily(_mamba_size, _every("mamba")),
    "granitemoehybrid": StateFamily(_mamba2_size, _listed_only),
    "jamba": StateFamily(_mamba_size, _jamba_kinds),
    "kimi_linear": StateFamily(_kda_size, _kimi_kinds),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe", "lfm3"), StateFamily(_short_convolution_size, _named_by("full_attn_idxs"))
    ),
    "mamba": StateFamily(_mamba_size, _every("mamba")),
    "mamba2": StateFamily(_mamba2_size, _every("mamba")),
    **dict.fromkeys(
        ("minimax", "minimax_m1", "minimax_text_01"), StateFamily(_linear_attention_size, _minimax_kinds)
    ),
    "nemotron_h": StateFamily(_nemotron_size, _listed_only),
    "zamba": StateFamily(_mamba_size, _listed_only),
    "zamba2": StateFamily(_mamba2_size, _listed_only),
}
"""The known architectures by ``model_type``."""


def keeps_state(kind: str) -> bool:
    """Return whether a layer of this kind keeps a state. Pure."""
    return kind in STATE_KINDS or kind == BOTH_KIND


def attention_kinds(kinds: Sequence[str]) -> list[str]:
    """Return the kinds of the layers that have keys and values; one beside a state reads the whole prompt. Pure."""
    return [
        ATTENTION_KIND if kind == BOTH_KIND else kind
        for kind in kinds
        if kind not in STATE_KINDS and kind not in OTHER_KINDS
    ]
