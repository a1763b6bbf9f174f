"""The features of a request and of a block from which the hazard model makes a block's class.

A class is one number: the block's place in the prefix tree (tail, chain, branching), how often it was seen, and of the
request the turn, the length, the gap since the previous turn, the new blocks, and the client's hints. Hints are
optional, and the model learns what each is worth: a wrong one costs hits and nothing else.
"""

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.hints.values import STOPS, RequestHints

STOP_LEVELS = {stop: 1 + number for number, stop in enumerate(STOPS)}
"""How a turn is expected to end; 0 without a hint."""

ENDED_LEVEL = 1 + len(STOPS)

CONTINUES_LEVEL = 2 + len(STOPS)
"""Said to go on, without a time."""

RETURN_FROM_S = (6.0, 15.0, 42.0, 85.0, 170.0, 340.0, 680.0, 1360.0)
"""Bounds between classes of return times; in the middle they double. Finer ones learn more slowly, and clients do not
know better than to a factor of two."""

FIRST_RETURN_LEVEL = 3 + len(STOPS)

NUM_HINT_LEVELS = FIRST_RETURN_LEVEL + len(RETURN_FROM_S) + 1
"""Levels of what the client says of the request's end and return; level 0 means no hint. What it says of the return
outranks what it says of the end."""

OUTPUT_FROM_TOKENS = (128, 512, 2048)

NUM_OUTPUT_LEVELS = len(OUTPUT_FROM_TOKENS) + 2
"""Levels of the answer's expected length; level 0 means no hint."""

PRIORITY_LEVELS = {0: 0, -1: 1, 1: 2}

NUM_HINTS = NUM_HINT_LEVELS * NUM_OUTPUT_LEVELS * len(PRIORITY_LEVELS)

SEEN_FROM = (2, 3, 4, 6, 10)

TURN_FROM = (1, 2, 3, 5)

LENGTH_FROM_BLOCKS = (4, 12, 32, 96)

GAP_FROM_S = (5.0, 10.0, 20.0, 60.0, 300.0)

NEW_UP_TO_BLOCKS = (1, 3, 10, 30)

NUM_STRATA = 3

NUM_SHAPES = NUM_STRATA * NUM_HINT_LEVELS
"""Shapes of the hazard over age: one for each stratum and each hint of the request's end or return."""

FACTOR_LEVELS = (
    len(SEEN_FROM) + 1,
    len(TURN_FROM) + 1,
    len(LENGTH_FROM_BLOCKS) + 1,
    len(GAP_FROM_S) + 2,
    len(NEW_UP_TO_BLOCKS) + 1,
    NUM_OUTPUT_LEVELS,
    len(PRIORITY_LEVELS),
)
"""Levels of each factor: seen, turn, length, gap (0 means no previous turn), new blocks, expected answer, priority."""

FIRST_HINT_FACTOR = 5
"""From here on factors are hints: level 0, no hint, has the multiplier 1."""

NUM_REQUEST_CODES = FACTOR_LEVELS[1] * FACTOR_LEVELS[2] * FACTOR_LEVELS[3] * FACTOR_LEVELS[4]

NUM_SEEN_LEVELS = FACTOR_LEVELS[0]

MAX_SEEN = SEEN_FROM[-1]

NUM_UNHINTED_CODES = NUM_STRATA * NUM_SEEN_LEVELS * NUM_REQUEST_CODES
"""Classes without hints; each hint has as many more."""

NUM_CODES = NUM_UNHINTED_CODES * NUM_HINTS

BRANCHING_CHILDREN = 3
"""Children from which a block counts as a branching point of the tree."""

SEEN_BASE = tuple(NUM_REQUEST_CODES * bisect_right(SEEN_FROM, seen) for seen in range(MAX_SEEN + 1))
"""Part of the class by the number of requests that named the block; constant from MAX_SEEN on."""

STRATUM_BASE = tuple(NUM_REQUEST_CODES * NUM_SEEN_LEVELS * stratum for stratum in (0, 1, 1, 2))
"""Part of the class by the number of children: tail, chain, chain, and branching from BRANCHING_CHILDREN on."""

NEW_TAIL_BASE, NEW_CHAIN_BASE = (STRATUM_BASE[num_children] + SEEN_BASE[1] for num_children in (0, 1))
"""Both parts for a block that was not known before: the last of its request, and any other."""


class RequestFeatures(NamedTuple):
    """The features of a request, which all of its blocks share.

    Attributes:
        turn: depth of the conversation that it continues, 0 for the first request.
        length_blocks: number of its blocks.
        gap_s: time since the previous turn, None without one.
        num_new_blocks: how many of its blocks were not known before.
        hint: the client's hints as one number.
    """

    turn: int
    length_blocks: int
    gap_s: float | None
    num_new_blocks: int
    hint: int = 0


def hint_code(hints: RequestHints) -> int:
    """Return the hints as one number below NUM_HINTS, 0 for none; ``split_codes`` takes it apart. Pure."""
    num_tokens = hints.expected_output_tokens
    output = 0 if num_tokens is None else 1 + bisect_right(OUTPUT_FROM_TOKENS, num_tokens)
    return (_hint_level(hints) * NUM_OUTPUT_LEVELS + output) * len(PRIORITY_LEVELS) + PRIORITY_LEVELS[
        hints.priority
    ]


def request_code(features: RequestFeatures) -> int:
    """Return the request's part of a class: up to NUM_REQUEST_CODES - 1, and NUM_UNHINTED_CODES for each hint. Pure."""
    turn = bisect_right(TURN_FROM, features.turn)
    length = bisect_right(LENGTH_FROM_BLOCKS, features.length_blocks)
    gap = 0 if features.gap_s is None else 1 + bisect_right(GAP_FROM_S, features.gap_s)
    new = bisect_left(NEW_UP_TO_BLOCKS, features.num_new_blocks)
    code = ((turn * FACTOR_LEVELS[2] + length) * FACTOR_LEVELS[3] + gap) * FACTOR_LEVELS[4] + new
    return features.hint * NUM_UNHINTED_CODES + code


def class_code(num_children: int, num_seen: int, request: int) -> int:
    """Return the class of a block. Pure.

    Args:
        num_children: distinct known blocks that follow it.
        num_seen: requests that named it, this one included; at least one.
        request: ``request_code`` of this request.
    """
    return STRATUM_BASE[min(num_children, BRANCHING_CHILDREN)] + SEEN_BASE[min(num_seen, MAX_SEEN)] + request


def split_codes(codes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
    """Return the shape of each class and, for each factor, its level; all of shape (num_classes,). Pure."""
    hint, rest = np.divmod(codes, NUM_UNHINTED_CODES)
    hint, priority = np.divmod(hint, len(PRIORITY_LEVELS))
    said, output = np.divmod(hint, NUM_OUTPUT_LEVELS)
    levels = []
    for num_levels in reversed(FACTOR_LEVELS[1:FIRST_HINT_FACTOR]):
        rest, level = np.divmod(rest, num_levels)
        levels.append(level)
    stratum, seen = np.divmod(rest, NUM_SEEN_LEVELS)
    return said * NUM_STRATA + stratum, [seen, *reversed(levels), output, priority]


def _hint_level(hints: RequestHints) -> int:
    if hints.is_ended:
        return ENDED_LEVEL
    if hints.returns_in_s is not None:
        return FIRST_RETURN_LEVEL + bisect_right(RETURN_FROM_S, hints.returns_in_s)
    if hints.continues:
        return CONTINUES_LEVEL
    return 0 if hints.expected_stop is None else STOP_LEVELS[hints.expected_stop]
