"""Whether a median of ratios is precise enough. Pure.

The precision is that of the ratios of ours to each other contestant, not of single values.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.harness.interval import median_interval
from benchmarks.harness.measurement import OURS

MAX_WIDTH = 0.12
"""Largest width of the 95 % interval of a median, as a share of its lower end: chance alone then rarely puts two runs
more than 15 % apart. Changes of the machine between runs add to it. Half of it would take four times the rounds."""


def is_known(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> bool:
    """Return whether the median ratio of ours to each other contestant has a narrow interval, in every operation.

    Args:
        measured: operation -> contestant -> values above zero, one per round. An operation without values of ours or of
            others counts as precise.
    """
    return all(
        width_of(values[OURS], others) <= MAX_WIDTH
        for values in measured.values()
        for name, others in values.items()
        if name != OURS and OURS in values
    )


def width_of(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the width of the 95 % interval of the median ratio, as a share of its lower end."""
    low, high = median_interval(np.array(ours) / np.array(others))
    return high / low - 1.0
