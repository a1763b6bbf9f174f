"""The ranges of sequence lengths within which a model rotates its keys in the same way.

With most kinds of rotary positions a key depends on its token and position only. Two kinds differ. LongRoPE (Phi-3 with
128k) uses one set of factors up to the original length and another for longer sequences. Keys of the two ranges differ,
so each range has block hashes of its own. Dynamic NTK uses another base for every length beyond the original one, and
keeps the largest that it has met, so there no two prompts share keys.

The kind is read from the model's rotary modules, which do the computation. For a model without such modules of
transformers (code that came with a checkpoint) it is read from the configuration.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvtier.errors import ModelError, SequenceLengthError

FIXED_TYPES = frozenset(
    {"default", "linear", "yarn", "llama3", "proportional", "axial", "mrope", "ntk_alpha"}
)
"""Types with constant frequencies. An allow list: a type of a later release is refused."""

SWITCHING_TYPES = frozenset({"longrope", "su"})
"""Types with one set of factors up to the original length and another beyond; "su" is the old name of "longrope"."""

GROWING_TYPE = "dynamic"
"""The type whose base grows with the sequence."""

CONFIG_NAMES = ("rope_parameters", "rope_scaling")
"""Names of a configuration's rope settings, in current releases and in code for older ones."""


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A range of sequence lengths, in tokens, within which a model rotates its keys in the same way.

    Attributes:
        above: the range begins after this length.
        last: the last length of the range; None when it has no end.
        name: part of the root of its block hashes; empty for a model whose keys never depend on the length.
        rope_type: the rope type that ends the range.
    """

    above: int = 0
    last: int | None = None
    name: str = ""
    rope_type: str = ""

    def require(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Refuse a request that would leave the range.

        Args:
            num_prompt_tokens: length of its prompt.
            num_new_tokens: output tokens whose keys will be computed.

        Raises:
            SequenceLengthError: the request is too long.
        """
        if self.last is not None and num_prompt_tokens + num_new_tokens > self.last:
            raise SequenceLengthError(num_prompt_tokens, num_new_tokens, self.last, self.rope_type)

    def cut(self, num_tokens: int) -> int:
        """Return how many of the first ``num_tokens`` tokens of a sequence are in the range. Pure."""
        return num_tokens if self.last is None else min(num_tokens, self.last)


@dataclass(frozen=True, slots=True)
class RopeRanges:
    """The ranges of one model.

    Attributes:
        switches: last lengths of ranges that are followed by another range.
        limit: the last length that can be served; None for no limit.
    """

    switches: frozenset[int] = frozenset()
    limit: int | None = None

    def range_of(self, num_prompt_tokens: int) -> LengthRange:
        """Return the range in which a prompt is computed.

        Raises:
            SequenceLengthError: no range with shared keys contains it.
        """
        if self.limit is not None and num_prompt_tokens > self.limit:
            raise SequenceLengthError(num_prompt_tokens, 0, self.limit, GROWING_TYPE)
        ends = sorted(self.switches | ({self.limit} if self.limit is not None else set()))
        if not ends:
            return LengthRange()
        above = max((end for end in ends if end < num_prompt_tokens), default=0)
        last = next((end for end in ends if end >= num_prompt_tokens), None)
        rope_type = GROWING_TYPE if last is not None and last == self.limit else "longrope"
        return LengthRange(above, last, f"{above} to {last}", rope_type)


def read_rope_ranges(model: PreTrainedModel) -> RopeRanges:
    """Return the ranges of a model. Pure.

    Raises:
        ModelError: the model has a rope of an unknown type.
    """
    switches: set[int] = set()
    limits: set[int] = set()
    for rope_type, parameters, original in _ropes(model):
        if rope_type in SWITCHING_TYPES or "long_mscale" in parameters:
            switches.add(
                _require_length(
                    model, rope_type, parameters.get("original_max_position_embeddings", original)
                )
            )
        elif GROWING_TYPE in rope_type:
            # One less than the original length: at that length transformers keeps the base of an earlier, longer
            # sequence.
            limits.add(_require_length(model, rope_type, original) - 1)
        elif rope_type not in FIXED_TYPES:
            raise ModelError(
                f"{type(model).__name__} has rope_type={rope_type!r}: it is not known whether its keys depend on the "
                f"length of the prompt; supported are {', '.join(sorted(FIXED_TYPES | SWITCHING_TYPES))} and "
                f"{GROWING_TYPE}"
            )
    return RopeRanges(frozenset(switches), min(limits, default=None))


def _ropes(
    model: PreTrainedModel,
) -> Iterator[tuple[str, Mapping[str, Any], object]]:  # Any: transformers' JSON
    """Yield the type, parameters and original length of every rope of the model."""
    modules = [
        module for module in model.modules() if isinstance(getattr(module, "rope_type", None), str | dict)
    ]
    for module in modules:
        yield from _ropes_of_module(module)
    if not modules:
        yield from _ropes_of_config(model.config.get_text_config(decoder=True))


def _ropes_of_module(
    module: torch.nn.Module,
) -> Iterator[tuple[str, Mapping[str, Any], object]]:  # Any: as above
    original = getattr(module, "original_max_seq_len", None)
    parameters = getattr(getattr(module, "config", None), CONFIG_NAMES[0], None) or {}
    if isinstance(module.rope_type, str):
        yield module.rope_type, parameters, original
    elif isinstance(module.rope_type, dict):
        for layer_type, rope_type in module.rope_type.items():
            yield rope_type, parameters.get(layer_type) or {}, original


def _ropes_of_config(
    config: PreTrainedConfig,
) -> Iterator[tuple[str, Mapping[str, Any], object]]:  # Any: as above
    length = getattr(config, "max_position_embeddings", None)
    original = getattr(config, "original_max_position_embeddings", length)
    for declared in (getattr(config, name, None) or {} for name in CONFIG_NAMES):
        for parameters in (declared, *declared.values()):
            rope_type = (
                parameters.get("rope_type", parameters.get("type")) if isinstance(parameters, dict) else None
            )
            if rope_type is not None:
                yield rope_type, parameters, original


def _require_length(model: PreTrainedModel, rope_type: str, length: object) -> int:
    if isinstance(length, int) and length > 1:
        return length
    raise ModelError(
        f"{type(model).__name__} has rope_type={rope_type!r} and its original length is {length!r}: set "
        "original_max_position_embeddings in its configuration"
    )
