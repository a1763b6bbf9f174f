"""How long a sequence may be: ranges of lengths within which a model rotates its keys alike, and the last position.

With most kinds of rotary positions a key depends on its token and position only. Two kinds differ. LongRoPE (Phi-3 with
128k) uses one set of factors up to the original length and another for longer sequences. Keys of the two ranges differ,
so each range has block hashes of its own. Dynamic NTK uses another base for every length beyond the original one, and
keeps the largest that it has met, so there no two prompts share keys.

The kind is read from the model's rotary modules, which do the computation. For a model without such modules of
transformers (code that came with a checkpoint) it is read from the configuration.

A model with a table of positions, learned (GPT-2) or computed at its start (GPT-J, CTRL), cannot go beyond it: the
index fails, on a GPU together with the whole process. Any other model answers beyond the length that it was made for,
and often badly.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvtier.errors import ModelError, SequenceLengthError

logger = logging.getLogger(__name__)

FIXED_TYPES = frozenset(
    {"default", "linear", "yarn", "llama3", "proportional", "axial", "mrope", "ntk_alpha"}
)
"""Types with constant frequencies. An allow list: a type of a later release is refused."""

SWITCHING_TYPES = frozenset({"longrope", "su"})
"""Types with one set of factors up to the original length and another beyond; "su" is the old name of "longrope"."""

GROWING_TYPE = "dynamic"
"""The type whose base grows with the sequence."""

POSITION_TABLE = re.compile(r"(.+\.)?(wpe|\w*pos\w*_(emb|enc)\w*|emb\w*_pos\w*)")
"""Names of modules and tensors with a row for each position. Tried with every decoder of transformers 5.24 (November
2026): all that fail beyond their length have such a table, but for MPT."""

MAX_UNUSED_POSITIONS = 2
"""Rows of such a table beyond the model's length: those before the first position, in OPT and its kin. A table of a
model's other parts (frames of a sound) has other sizes."""

MODELS_OF_FIXED_LENGTH = {"mpt": "max_seq_len"}
"""Models that make a bias of a fixed size instead, with the setting of its size."""

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


class ModelLength:
    """The length that a model was made for, and the last at which it has a position.

    Args:
        model: the model.
        name: what to call it.

    Attributes:
        made_for_tokens: ``max_position_embeddings``; None where the configuration says nothing.
        last_tokens: the length at which its table of positions ends; None without such a table.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        config = model.config.get_text_config(decoder=True)
        length = getattr(config, "max_position_embeddings", None)
        self.made_for_tokens = length if isinstance(length, int) else None
        self.last_tokens = _read_table_length(model, self.made_for_tokens)
        fixed = MODELS_OF_FIXED_LENGTH.get(config.model_type)
        if fixed is not None:
            self.last_tokens = getattr(config, fixed, None)
        self._name = name
        self._has_warned = False

    def require(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Refuse a request that needs more positions than there are; warn of the first one longer than meant.

        Args:
            num_prompt_tokens: length of its prompt.
            num_new_tokens: output tokens that will be computed.

        Raises:
            SequenceLengthError: the request is too long.
        """
        num_tokens = num_prompt_tokens + num_new_tokens
        if self.last_tokens is not None and num_tokens > self.last_tokens:
            raise SequenceLengthError(num_prompt_tokens, num_new_tokens, self.last_tokens, "")
        if self.made_for_tokens is not None and num_tokens > self.made_for_tokens and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a prompt of %d tokens and %d computed after it exceed max_position_embeddings=%d of %s: beyond the "
                "length that a model was made for answers are often bad; shorten the prompt, or ask for fewer tokens",
                *(num_prompt_tokens, num_new_tokens, self.made_for_tokens, self._name),
            )


def _read_table_length(model: PreTrainedModel, length: int | None) -> int | None:
    """Return for how many tokens the model's tables of positions have a row; None without such a table."""
    if length is None:
        return None
    ends: list[int] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and POSITION_TABLE.fullmatch(name):
            num_rows, padding = module.num_embeddings, module.padding_idx
            if 0 <= num_rows - length <= MAX_UNUSED_POSITIONS:
                # RoBERTa and its kin begin to count behind the row for padding.
                ends.append(length if padding is None else num_rows - padding - 1)
    for name, tensor in model.named_buffers():
        if POSITION_TABLE.fullmatch(name) and tensor.dim() > 1 and len(tensor) == length:
            ends.append(length)
    return min(ends, default=None)


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
