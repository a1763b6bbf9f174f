"""How far the bytes of a block are from those computed again: bitwise, else in floats of the KV dtype.

The same prompt computed alone, in a batch or in chunks gives keys and values that differ in their last bits, because
sums are added in another order, and each layer carries the difference on. Wrong bytes differ by as much as the values
themselves. So a page has a deviation: 0 when every byte is equal, at most 1 when the difference may come from batching.
It is the larger of two ratios to what is tolerated:

- the largest difference of one number, beside the root mean square of its 64 neighbours: finds what is local, such as
  a flipped bit, a half-written row, or heads that were exchanged;
- the root mean square of the differences of 4096 numbers, beside that of the numbers: finds what is small and
  everywhere, such as another revision of the weights.

A page of recurrent states has several parts, each with its own dtype. A state sums up what the model computed of all
tokens before, so its tolerance is that of the coarser of its own dtype and the model's. Keys and values of such a model
are computed from states, and have the same tolerance.

``docs/guide/audit.md`` says how the tolerances were found.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.config import GroupKind, KVGroup

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

NEIGHBOURS = 64
"""Numbers that share a scale: a head's, or a part of one. Keys of some models are hundreds of times as large as their
values, in the same page: with one scale for both a wrong value would hide behind the keys. Fewer make numbers that are
close to zero by chance look wrong."""

MIN_NEIGHBOURS = 16
"""Fewer neighbours than this are no sample of a scale; the whole page is taken then."""

SEGMENT = 4096
"""Numbers whose differences are taken together: some tokens of one layer. A page may have all layers in a row, of which
one wrong layer would be a small part. Fewer are too few for a mean."""

MIN_SEGMENT = 1024

FLOOR_RATIO = 1 / 16
"""The smallest scale of a number beside that of its segment. Rounding is relative to the sums that make a number, not
to the number: values that cancel to almost nothing have errors of their neighbours' size. Zero makes those look wrong;
one compares everything with the largest numbers of the segment."""

STATE_FLOOR_RATIO = 1.0
"""The same for a recurrent state. Its rows are products of one number of a key with all of a value: where a key passes
through zero, a row is rounding alone. With the ratio of keys and values such rows looked sixteen times as wrong, and
other prompts not more."""


class Tolerance(NamedTuple):
    """What batching alone never exceeds.

    Attributes:
        of_one: largest difference of one number, in root mean squares of its neighbours.
        of_all: root mean square of the differences of a segment, in that of its numbers.
        floor_ratio: smallest scale of a number, in the root mean square of its segment.
    """

    of_one: float
    of_all: float
    floor_ratio: float = FLOOR_RATIO


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How keys and values are written, and how far two computations of them may be apart.

    Attributes:
        name: the dtype.
        decode: returns the numbers of bytes of shape (n, page_bytes), as shape (n, numbers of a page), float32.
        tolerance: what batching alone never exceeds.
    """

    name: str
    decode: Callable[[Bytes], Floats]
    tolerance: Tolerance


class PartFormat(NamedTuple):
    """Consecutive bytes of a group's page, over all of its layers, and what they mean."""

    size_bytes: int
    kv_format: KVFormat


PageFormat = tuple[PartFormat, ...]
"""The parts of a page in order; none: it is not compared."""


def compare_pages(found: Bytes, held: Bytes, kv_format: KVFormat) -> npt.NDArray[np.float64]:
    """Return the deviation of each held page from the one computed again. Pure.

    Args:
        found: what was computed, shape (num_pages, page_bytes).
        held: what is held, the same shape.
        kv_format: what the bytes mean.

    Returns:
        Shape (num_pages,): 0 for equal bytes, at most 1 within the tolerance, infinity where a number is none.
    """
    deviations = np.zeros(len(found))
    differing = np.flatnonzero((found != held).any(axis=1))
    if len(differing):
        deviations[differing] = measure(
            kv_format.decode(found[differing]), kv_format.decode(held[differing]), kv_format.tolerance
        )
    return deviations


def measure(found: Floats, held: Floats, tolerance: Tolerance) -> npt.NDArray[np.float64]:
    """Return the deviation of each page, both of shape (num_pages, num_numbers). Pure."""
    num_pages, num_numbers = found.shape
    segment = _divide(num_numbers, SEGMENT, MIN_SEGMENT)
    neighbours = _divide(segment, NEIGHBOURS, MIN_NEIGHBOURS)
    shape = num_pages, num_numbers // segment, segment // neighbours, neighbours
    # Bytes of another kind can be any number, infinity and none among them.
    with np.errstate(all="ignore"):
        numbers = found.astype(np.float64).reshape(shape)
        differences = np.abs(held.astype(np.float64).reshape(shape) - numbers)
        of_chunk = np.sqrt(np.square(numbers).mean(axis=3))
        of_segment = np.sqrt(np.square(of_chunk).mean(axis=2))
        scales = np.maximum(of_chunk, tolerance.floor_ratio * of_segment[:, :, None])
        of_one = (differences.max(axis=3) / scales).max(axis=(1, 2))
        of_all = (np.sqrt(np.square(differences).mean(axis=(2, 3))) / of_segment).max(axis=1)
        worst = np.maximum(of_one / tolerance.of_one, of_all / tolerance.of_all)
    # A number that is none, or a segment of zeros, of which the ratio is none.
    return np.where(np.isnan(worst), np.where((differences == 0).all(axis=(1, 2, 3)), 0.0, np.inf), worst)


def find_page_formats(groups: Sequence[KVGroup], kv_dtype: str, model_dtype: str) -> tuple[PageFormat, ...]:
    """Return how to compare a page of each group. Pure.

    Nothing is compared when keys and values have no known format: states are computed from them.

    Args:
        groups: the KV groups.
        kv_dtype: the engine's description of its KV dtype, see ``find_format``.
        model_dtype: of the weights, in which the model computes.
    """
    has_states = any(group.kind is GroupKind.STATE for group in groups)
    of_keys = find_format(kv_dtype)
    if has_states and of_keys is not None:
        of_keys = widen_format(of_keys, model_dtype, FLOOR_RATIO)
    if of_keys is None and any(group.kind is not GroupKind.STATE for group in groups):
        return ((),) * len(groups)
    pages: list[PageFormat] = []
    for group in groups:
        parts = [(group.page_size_bytes, of_keys)]
        if group.kind is GroupKind.STATE:
            read = [(part.size_bytes, find_format(part.dtype)) for part in group.state_parts]
            parts = [(size, one and widen_format(one, model_dtype, STATE_FLOOR_RATIO)) for size, one in read]
        page = tuple(PartFormat(size, one) for size, one in parts if one is not None)
        pages.append(page if len(page) == len(parts) else ())
    return tuple(pages)


def widen_format(kv_format: KVFormat, model_dtype: str, floor_ratio: float) -> KVFormat | None:
    """Return how to compare numbers of a model with recurrent states; None when its dtype is unknown. Pure.

    Args:
        kv_format: what they are, with the tolerance that they have in a model without states.
        model_dtype: of the weights, in which the model computes them.
        floor_ratio: see ``Tolerance``.
    """
    model = find_format(model_dtype)
    if model is None:
        return None
    coarser = max(kv_format.name, model.name, key=list(HYBRID_TOLERANCES).index)
    tolerance = HYBRID_TOLERANCES[coarser]._replace(floor_ratio=floor_ratio)
    return replace(kv_format, tolerance=tolerance)


def find_format(kv_dtype: str) -> KVFormat | None:
    """Return the format that an engine's description of its KV dtype names; None when it is not one of these. Pure.

    Args:
        kv_dtype: such as ``torch.bfloat16``, or vLLM's ``auto: bfloat16 NONE``; groups of several dtypes are none. What
            vLLM says of recurrent states is left out.
    """
    described = DESCRIBED_STATE.sub("", kv_dtype)
    words = set(described.replace("torch.", "").replace(":", " ").replace(",", " ").split())
    named = words & FORMATS.keys()
    if len(named) != 1 or words - named - UNQUANTISED_WORDS:
        return None
    return FORMATS[named.pop()]


def _divide(num: int, wanted: int, least: int) -> int:
    """Return how many of ``num`` to take together: a divisor of both if that is at least ``least``, else all. Pure."""
    divisor = math.gcd(num, wanted)
    return divisor if divisor >= least else num


def _from_float32(pages: Bytes) -> Floats:
    return np.ascontiguousarray(pages).view(np.float32)


def _from_float16(pages: Bytes) -> Floats:
    return np.ascontiguousarray(pages).view(np.float16).astype(np.float32)


def _from_bfloat16(pages: Bytes) -> Floats:
    # The upper half of a float32.
    return (np.ascontiguousarray(pages).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


FORMATS = {
    "float32": KVFormat("float32", _from_float32, Tolerance(1e-4, 1.5e-5)),
    "float16": KVFormat("float16", _from_float16, Tolerance(0.12, 0.016)),
    "bfloat16": KVFormat("bfloat16", _from_bfloat16, Tolerance(0.6, 0.12)),
}
"""The dtypes that can be compared. The tolerances are eight times the largest deviation that was measured, of random
models whose prompts were computed alone, in batches and in chunks; wrong blocks are off by about one. Tighter ones call
batching wrong; wider ones overlook more flipped bits."""

HYBRID_TOLERANCES = {
    "float32": Tolerance(2e-3, 2.5e-4),
    "float16": Tolerance(3.6, 0.45),
    "bfloat16": Tolerance(3.6, 0.45),
}
"""The tolerances of all blocks of a model with recurrent states, by the coarser dtype of their numbers and the model,
the finest first: five to eight times the largest deviation that was measured where every expert computes each token.
With float16 they are as wide as with bfloat16: where a few of many experts compute a token, rounding decides now and
then which, and then a state is off by what another expert makes of it, whatever the dtype. States of another prompt are
off by more than any of them."""

DESCRIBED_STATE = re.compile(r"\w+ state(?: [0-9x]+ \w+)+")
"""How vLLM describes a recurrent state: its kind, then shape and dtype of each part."""

UNQUANTISED_WORDS = frozenset({"auto", "NONE"})
"""What vLLM says beside the dtype of a cache that is not quantised."""
