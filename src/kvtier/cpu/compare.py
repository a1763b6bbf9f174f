"""How far the bytes of a block are from those computed again: bitwise, else in floats of the KV dtype.

The same prompt computed alone, in a batch or in chunks gives keys and values that differ in their last bits, because
sums are added in another order, and each layer carries the difference on. Wrong bytes differ by as much as the values
themselves. So a page has a deviation: 0 when every byte is equal, at most 1 when the difference may come from batching.
It is the larger of two ratios to what is tolerated:

- the largest difference of one number, beside the root mean square of its 64 neighbours: finds what is local, such as
  a flipped bit, a half-written row, or heads that were exchanged;
- the root mean square of the differences of 4096 numbers, beside that of the numbers: finds what is small and
  everywhere, such as another revision of the weights.

``docs/guide/audit.md`` says how the tolerances were found.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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


class Tolerance(NamedTuple):
    """What batching alone never exceeds.

    Attributes:
        of_one: largest difference of one number, in root mean squares of its neighbours.
        of_all: root mean square of the differences of a segment, in that of its numbers.
    """

    of_one: float
    of_all: float


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
        scales = np.maximum(of_chunk, FLOOR_RATIO * of_segment[:, :, None])
        of_one = (differences.max(axis=3) / scales).max(axis=(1, 2))
        of_all = (np.sqrt(np.square(differences).mean(axis=(2, 3))) / of_segment).max(axis=1)
        worst = np.maximum(of_one / tolerance.of_one, of_all / tolerance.of_all)
    # A number that is none, or a segment of zeros, of which the ratio is none.
    return np.where(np.isnan(worst), np.where((differences == 0).all(axis=(1, 2, 3)), 0.0, np.inf), worst)


def find_format(kv_dtype: str) -> KVFormat | None:
    """Return the format that an engine's description of its KV dtype names; None when it is not one of these. Pure.

    Args:
        kv_dtype: such as ``torch.bfloat16``, or vLLM's ``auto: bfloat16 NONE``; groups of several dtypes are none.
    """
    words = set(kv_dtype.replace("torch.", "").replace(":", " ").replace(",", " ").split())
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
"""The dtypes that can be compared. The tolerances are eight times the largest deviation that was measured
(``python -m benchmarks audit-tolerance``); wrong blocks are off by about one. Tighter ones call batching wrong; wider
ones overlook more flipped bits."""

UNQUANTISED_WORDS = frozenset({"auto", "NONE"})
"""What vLLM says beside the dtype of a cache that is not quantised."""
