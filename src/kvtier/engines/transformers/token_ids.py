"""Reads one sequence of token ids from the forms that tokenizers, models and callers use.

An error shows the shape of several sequences, and the type of other values: a prompt has tens of thousands of ids.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch

from kvtier.errors import ConfigError

TokenIds: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor | Mapping[str, Any]
"""Any: the output of a tokenizer or a model has other entries besides ids."""

SETTING = "token_ids"
"""Name of the argument in messages."""

SEQUENCE_NAMES = ("sequences", "input_ids")
"""Names of the ids in the outputs of ``generate`` and of tokenizers."""

ACCEPTED = (
    "give ids as a list or a tensor of shape (n,) or (1, n), what a tokenizer or apply_chat_template returned for one "
    "text, or what generate returned"
)

HARMLESS_NAMES = frozenset(
    {
        "special_tokens_mask",
        "offset_mapping",
        "length",
        "num_truncated_tokens",
        "overflowing_tokens",
    }
)
"""Outputs of tokenizers that do not change what a model computes."""


def read_token_ids(token_ids: TokenIds, vocabulary_size: int) -> list[int]:
    """Return one sequence as a list. Pure.

    Args:
        token_ids: numbers, a tensor or array of shape (num_tokens,) or (1, num_tokens), or a mapping with one of these
            under ``input_ids`` or ``sequences``.
        vocabulary_size: ids are below this.

    Raises:
        ConfigError: there is no token, more than one sequence, padding, or a value that is not an id of the model.
    """
    given = _take_ids(token_ids) if isinstance(token_ids, Mapping) else token_ids
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ConfigError(SETTING, type(given), f"is not a sequence of ids: {ACCEPTED}")
    values = _flatten(list(given) if isinstance(given, Iterator) else given)
    if not values:
        raise ConfigError(SETTING, values, "give at least one token")
    ids = [int(value) for value in values if isinstance(value, Integral) and is_whole(value)]
    if len(ids) < len(values):
        odd = next(value for value in values if not is_whole(value))
        raise ConfigError(SETTING, _show(odd), f"every id must be a whole number: {ACCEPTED}")
    if min(ids) < 0 or max(ids) >= vocabulary_size:
        worst = next(token_id for token_id in ids if not 0 <= token_id < vocabulary_size)
        raise ConfigError(SETTING, worst, f"the model's ids are below {vocabulary_size}")
    return ids


def is_whole(value: object) -> bool:
    """Return whether ``value`` is a whole number of Python or numpy, and not a bool. Pure."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _take_ids(given: Mapping[str, Any]) -> object:
    """Return the ids in the output of a tokenizer or a model."""
    name = next((name for name in SEQUENCE_NAMES if name in given), None)
    if name is None:
        kind = f"{type(given).__name__} with {', '.join(map(str, given)) or 'nothing'}"
        raise ConfigError(SETTING, kind, f"has neither input_ids nor sequences: {ACCEPTED}")
    if name == "input_ids":
        _refuse_other_inputs(given)
    return given[name]


def _refuse_other_inputs(given: Mapping[str, Any]) -> None:
    """Refuse inputs that change keys and values but are not part of the block hash."""
    for name, value in given.items():
        if value is None or name == "input_ids" or name in HARMLESS_NAMES:
            continue
        is_types = name.endswith("token_type_ids")
        if not is_types and name != "attention_mask":
            remedy = (
                f"is an input besides the ids, and block hashes cover ids only: leave it out, or {ACCEPTED}"
            )
            raise ConfigError(name, type(value), remedy)
        if not _is_all(value, 0 if is_types else 1):
            remedy = (
                "not all are zero: give one text alone"
                if is_types
                else "some are masked: give ids without padding"
            )
            raise ConfigError(name, f"values of shape {_shape_of(value)}", remedy)


def _is_all(value: object, expected: int) -> bool:
    return bool((torch.as_tensor(value) == expected).all())


def _flatten(given: Iterable[object]) -> list[object]:
    """Return the values of one sequence."""
    shape = _shape_of(given)
    if len(shape) > 2 or (len(shape) == 2 and shape[0] != 1):
        raise ConfigError(SETTING, shape, f"is the shape of several: give one sequence at a time; {ACCEPTED}")
    listed: object = given.tolist() if hasattr(given, "tolist") else given
    values: list[object] = list(listed) if isinstance(listed, Iterable) else [listed]
    if len(shape) == 2 and isinstance(values[0], Iterable):
        return list(values[0])
    return values


def _shape_of(given: object) -> tuple[int, ...]:
    """Return the shape of a tensor, an array or nested lists; ragged lists count by their longest row."""
    shape = getattr(given, "shape", None)
    if shape is not None:
        return tuple(int(size) for size in shape)
    rows = list(given) if isinstance(given, Iterable) else []
    lengths = [len(row) for row in rows if hasattr(row, "__len__") and not isinstance(row, str | bytes)]
    return (len(rows), max(lengths)) if lengths and len(lengths) == len(rows) else (len(rows),)


def _show(value: object) -> object:
    """Return a number as it is, and the type of any other value."""
    return value if isinstance(value, bool | int | float) or value is None else type(value)
