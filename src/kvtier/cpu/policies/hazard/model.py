"""The hazard of reuse over age for each class of block, and the Gittins index that follows from it.

The model learns from reuse intervals: the time from an access of a block to its next one, or so far without one. Ages
lie in bins whose width grows with age. For each class and bin it keeps exposure (block seconds spent at that age) and
events (reuses at that age), and fits proportional hazards::

    hazard(age | class) = base[shape](age) * product over factors of multiplier[factor][level]

by alternating ratios of events to expected events; multipliers are shrunk towards 1, bases towards a power law. Evicted
blocks count too, or what was cached would bias the estimate.

The index of a block is the best rate at which its slot can earn: the maximum, over how long to keep it, of its
probability of reuse until then over the expected time that it takes the slot. It looks ahead: a chat that has just
ended has no hazard yet, but will soon have some.

Source: Cox, Regression Models and Life-Tables, 1972; Gittins, Bandit Processes and Dynamic Allocation Indices, 1979.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import expm1
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.cpu.policies.hazard.features import (
    FACTOR_LEVELS,
    FIRST_HINT_FACTOR,
    NUM_CODES,
    NUM_SHAPES,
    split_codes,
)

Floats = npt.NDArray[np.float64]

Ints = npt.NDArray[np.int64]

NUM_EDGES = 29

MAX_EDGE_S = 65536.0

EDGES_S: tuple[float, ...] = tuple(MAX_EDGE_S ** (edge / (NUM_EDGES - 1)) for edge in range(NUM_EDGES))
"""Ages between the bins, from 1 s to 18 h; bin 0 lies below the first edge, the last bin has no end."""

NUM_BINS = NUM_EDGES + 1

EDGES: Floats = np.array(EDGES_S)

STARTS_S: Floats = np.array([0.0, *EDGES_S])

WIDTHS_S: Floats = np.diff(np.array([0.0, *EDGES_S, 4 * MAX_EDGE_S]))

PRIOR_EVENTS = 50.0
"""Events after which a multiplier is halfway from 1 to its own ratio. Fewer follow noise, more learn late."""

BASE_PRIOR_EVENTS = 0.5
"""The same for each bin of a base hazard, towards PRIOR_HAZARD."""

PRIOR_HAZARD: Floats = 0.2 / (STARTS_S + WIDTHS_S / 2)
"""Hazard at each age before any event. It falls with age, so the oldest block is evicted first."""

MULTIPLIER_RANGE = (0.02, 50.0)

NUM_ROUNDS = 4
"""Rounds of a fit. Few are enough, since a fit starts from the multipliers of the last one."""

SMALLEST_SURVIVAL = 1e-8
"""Survival below which the index is the hazard itself."""

MAX_RECORDS = 4096
"""Ended intervals that are buffered before they are summed; only speed depends on it."""

CLASSES_AT_ONCE = 256
"""Classes whose indices are computed together, so that the arrays stay in the processor's cache."""

FEW_CLASSES = 24
"""Classes up to which all pairs of bins are compared in one step. For more classes one step for each bin is up to six
times as fast, because the pairs do not fit the cache."""

_FIRST_BINS, _END_BINS = np.triu_indices(NUM_BINS + 1, k=1)

_HORIZON_STARTS: Ints = np.searchsorted(_FIRST_BINS, np.arange(NUM_BINS))


class ReuseIntervals(NamedTuple):
    """Times from an access of a block to its next; blocks of one class and age are one entry.

    Attributes:
        codes: the class of each entry.
        ages_s: its length, or its length so far.
        nums: its blocks.
        num_reused: how many of these blocks were reused at that age; the others were not (censored).
    """

    codes: Sequence[int] | Ints
    ages_s: Sequence[float] | Floats
    nums: Sequence[int] | Ints | Floats
    num_reused: Sequence[int] | Ints | Floats


NUM_FIELDS = len(ReuseIntervals._fields)


class HazardModel:
    """Learns hazards from reuse intervals; returns indices and reuse probabilities.

    Attributes:
        is_fitted: whether there was a fit.
        indices: the index, in reuses per second, of a block of each class in each bin of age. INVARIANT: the same
            object for the model's life.
    """

    def __init__(self) -> None:
        self.is_fitted = False
        self._table = ReuseIntervalTable()
        # Ended intervals, field after field of each: a flat array, which numpy copies at once.
        self._ended = array("d")
        self._bases: Floats = np.tile(PRIOR_HAZARD, (NUM_SHAPES, 1))
        self._multipliers = [np.ones(num_levels) for num_levels in FACTOR_LEVELS]
        self.indices = IndexTable(lambda code: gittins_indices(self.hazards([code]))[0].tolist())
        # For each class the hazard at each age, and then its integral to the start of each bin.
        self._integrals = IndexTable(lambda code: integrated(self.hazards([code]))[0].tolist())

    def record(self, code: int, age_s: float, num: int, *, is_reuse: bool) -> None:
        """Record that ``num`` blocks of a class were reused at that age, or were forgotten."""
        self._ended.extend((code, age_s, num, num if is_reuse else 0))
        if len(self._ended) >= NUM_FIELDS * MAX_RECORDS:
            self._add_ended()

    def fit(self, open_intervals: ReuseIntervals) -> None:
        """Fit the hazards anew.

        Args:
            open_intervals: the intervals that have not ended, with their lengths so far.
        """
        self._add_ended()
        open_s, _ = self._table.exposure_of(open_intervals)
        codes = list(self._table.rows)
        reused = self._table.reused[: len(codes)]
        exposure_s = open_s + self._table.exposure_s[: len(codes)]
        shape, levels = split_codes(np.array(codes, dtype=np.int64))
        members = [np.flatnonzero(shape == number) for number in range(NUM_SHAPES)]
        for _ in range(NUM_ROUNDS):
            self._fit_bases(exposure_s, reused, members, levels)
            self._fit_multipliers(exposure_s, reused, shape, levels)
        self.is_fitted = True
        self.indices.clear()
        self._integrals.clear()
        # Classes without open intervals too: computed on demand, each would be a call of its own.
        for begin in range(0, len(codes), CLASSES_AT_ONCE):
            some = codes[begin : begin + CLASSES_AT_ONCE]
            self.indices.update(zip(some, gittins_indices(self.hazards(some)).tolist(), strict=True))

    def reuse_probability(self, code: int, age_s: float, horizon_s: float) -> float:
        """Return the probability that a block of that class and age is reused within ``horizon_s``. Pure."""
        row = self._integrals[code]
        return -expm1(_integral_to(row, age_s) - _integral_to(row, age_s + horizon_s))

    def hazards(self, codes: Sequence[int]) -> Floats:
        """Return the hazard per second of each class at each age, shape (num_codes, NUM_BINS). Pure."""
        shape, levels = split_codes(np.array(codes, dtype=np.int64))
        return self._bases[shape] * self._scale(levels)[:, None]

    def _add_ended(self) -> None:
        if self._ended:
            codes, ages_s, nums, num_reused = np.array(self._ended).reshape(-1, NUM_FIELDS).T
            self._table.add(ReuseIntervals(codes.astype(np.int64), ages_s, nums, num_reused))
        self._ended = array("d")

    def _scale(self, levels: list[Ints]) -> Floats:
        scale: Floats = np.ones(len(levels[0]))
        for multipliers, level in zip(self._multipliers, levels, strict=True):
            scale = scale * multipliers[level]
        return scale

    def _fit_bases(
        self, exposure_s: Floats, reused: Floats, members: Sequence[Ints], levels: list[Ints]
    ) -> None:
        """Fit the base of each shape, given the multipliers; ``members`` are the rows of each shape."""
        scaled = exposure_s * self._scale(levels)[:, None]
        for number, rows in enumerate(members):
            events, exposure = reused[rows].sum(axis=0), scaled[rows].sum(axis=0)
            prior = BASE_PRIOR_EVENTS / PRIOR_HAZARD
            self._bases[number] = (events + BASE_PRIOR_EVENTS) / (exposure + prior)

    def _fit_multipliers(self, exposure_s: Floats, reused: Floats, shape: Ints, levels: list[Ints]) -> None:
        """Fit the multipliers of each factor, given the bases and the other factors."""
        events = reused.sum(axis=1)
        expected = (exposure_s * self._bases[shape]).sum(axis=1) * self._scale(levels)
        for number, level in enumerate(levels):
            old = self._multipliers[number]
            without = np.bincount(level, expected / old[level], len(old))
            found = (np.bincount(level, events, len(old)) + PRIOR_EVENTS) / (without + PRIOR_EVENTS)
            if number >= FIRST_HINT_FACTOR:
                found[0] = 1.0
            self._multipliers[number] = np.clip(found, *MULTIPLIER_RANGE)
            expected = expected * (self._multipliers[number] / old)[level]


class ReuseIntervalTable:
    """Exposure and reuses, summed for each class and bin.

    Attributes:
        rows: the row of each class.
        reused: shape (num_rows, NUM_BINS), intervals that ended there with a reuse.
        exposure_s: shape (num_rows, NUM_BINS), block seconds.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.reused: Floats = np.zeros((64, NUM_BINS))
        self.exposure_s: Floats = np.zeros((64, NUM_BINS))
        # Row of each class, counted from 1. Without hints only its first memory pages are ever touched.
        self._row_numbers = np.zeros(NUM_CODES, dtype=np.int32)

    def row_of(self, code: int) -> int:
        """Return the row of a class; a class without one gets a new row."""
        row = self.rows.setdefault(code, len(self.rows))
        if row == len(self.reused):
            self.reused = np.concatenate([self.reused, np.zeros_like(self.reused)])
            self.exposure_s = np.concatenate([self.exposure_s, np.zeros_like(self.exposure_s)])
        return row

    def exposure_of(self, intervals: ReuseIntervals) -> tuple[Floats, Floats]:
        """Return exposure and reuses, each of shape (num_classes, NUM_BINS); new classes get rows."""
        rows = self._rows_of(np.asarray(intervals.codes, dtype=np.int64))
        ages, nums = (
            np.asarray(intervals.ages_s, dtype=np.float64),
            np.asarray(intervals.nums, dtype=np.float64),
        )
        num_reused = np.asarray(intervals.num_reused, dtype=np.float64)
        bins = np.searchsorted(EDGES, ages, side="right")
        cells = rows * NUM_BINS + bins
        num_classes = len(self.rows)
        ended = _sum_in_cells(cells, nums, num_classes)
        # With a coarse clock all ages may lie at the start of a bin: events without exposure would be infinite.
        in_bin_s = np.maximum(ages - STARTS_S[bins], np.where(num_reused > 0, WIDTHS_S[bins] / 4, 0.0))
        partial = _sum_in_cells(cells, nums * in_bin_s, num_classes)
        # An interval that ended in a later bin spent the whole width of this one.
        later = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
        reused = _sum_in_cells(cells, num_reused, num_classes)
        return partial + later * WIDTHS_S, reused

    def add(self, intervals: ReuseIntervals) -> None:
        """Add intervals that have ended."""
        exposure_s, reused = self.exposure_of(intervals)
        self.exposure_s[: len(reused)] += exposure_s
        self.reused[: len(reused)] += reused

    def _rows_of(self, codes: Ints) -> Ints:
        """Return the row of each of ``codes``."""
        if not self._row_numbers[codes].all():
            for code in dict.fromkeys(codes[self._row_numbers[codes] == 0].tolist()):
                self._row_numbers[code] = self.row_of(code) + 1
        return self._row_numbers[codes].astype(np.int64) - 1


class IndexTable(dict[int, list[float]]):
    """A row of numbers for each class, made on first access.

    Args:
        make_row: returns the row of a class.
    """

    def __init__(self, make_row: Callable[[int], list[float]]) -> None:
        super().__init__()
        self._make_row = make_row

    def __missing__(self, code: int) -> list[float]:
        row = self[code] = self._make_row(code)
        return row


def integrated(hazards: Floats) -> Floats:
    """Return, for each class, its hazards followed by their integrals to the start of each bin. Pure.

    Args:
        hazards: per second, shape (num_classes, NUM_BINS).

    Returns:
        Shape (num_classes, 2 * NUM_BINS).
    """
    integrals = np.cumsum(hazards * WIDTHS_S, axis=1) - hazards * WIDTHS_S
    return np.concatenate([hazards, integrals], axis=1)


def gittins_indices(hazards: Floats) -> Floats:
    """Return, for each class and bin, the best ratio of reuse probability to slot time from there on. Pure.

    Args:
        hazards: per second, shape (num_classes, NUM_BINS), above zero.

    Returns:
        Per second, shape (num_classes, NUM_BINS).
    """
    # Survival to the start of each bin, and the expected slot time until then. Where hardly any block survives, the
    # difference of two survivals is noise; the index is then the hazard itself.
    decay = hazards * WIDTHS_S
    survival = np.exp(-np.minimum(np.cumsum(decay, axis=1), 60.0))
    survival = np.concatenate([np.ones((len(hazards), 1)), survival], axis=1)
    taken_s = np.cumsum(survival[:, :-1] * -np.expm1(-decay) / hazards, axis=1)
    taken_s = np.concatenate([np.zeros((len(hazards), 1)), taken_s], axis=1)
    # Bins as rows: gathering whole rows keeps a fit at a few milliseconds.
    survival, taken_s = np.ascontiguousarray(survival.T), np.ascontiguousarray(taken_s.T)
    find_best = _best_of_pairs if len(hazards) <= FEW_CLASSES else _best_of_each_horizon
    best = find_best(survival, taken_s)
    return np.where(survival[:-1] > SMALLEST_SURVIVAL, best, hazards.T).T


def _best_of_pairs(survival: Floats, taken_s: Floats) -> Floats:
    """Return the best ratio for each first bin, shape (NUM_BINS, num_classes); the arguments have a row more. Pure."""
    gained = survival[_FIRST_BINS] - survival[_END_BINS]
    cost = taken_s[_END_BINS] - taken_s[_FIRST_BINS]
    ratio = np.divide(gained, cost, out=np.zeros_like(gained), where=cost > 0)
    best: Floats = np.maximum.reduceat(ratio, _HORIZON_STARTS, axis=0)
    return best


def _best_of_each_horizon(survival: Floats, taken_s: Floats) -> Floats:
    """Return the same numbers as ``_best_of_pairs``, with one step for each bin. Pure."""
    best = np.zeros_like(survival[:-1])
    for end in range(1, NUM_BINS + 1):
        gained, cost = survival[:end] - survival[end], taken_s[end] - taken_s[:end]
        ratio = np.divide(gained, cost, out=np.zeros_like(gained), where=cost > 0)
        np.maximum(best[:end], ratio, out=best[:end])
    return best


def _integral_to(row: Sequence[float], age_s: float) -> float:
    """Return the integral of the hazard to an age; ``row`` is a row of ``integrated``. Pure."""
    age_bin = bisect_right(EDGES_S, age_s)
    start_s = EDGES_S[age_bin - 1] if age_bin else 0.0
    return row[NUM_BINS + age_bin] + row[age_bin] * (age_s - start_s)


def _sum_in_cells(cells: Ints, weights: Floats, num_rows: int) -> Floats:
    """Return the sum of the weights in each cell, shape (num_rows, NUM_BINS). Pure."""
    sums = np.bincount(cells, weights, num_rows * NUM_BINS)
    return sums.astype(np.float64, copy=False).reshape(num_rows, NUM_BINS)
