"""When a median of ratios is known well enough to be told. Pure.

It decides nothing about single values: what is looked at is how ours compares with each other contestant.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.harness.interval import median_interval
from benchmarks.harness.measurement import OURS

MAX_WIDTH = 0.12
"""What the 95 % interval of a median may span, as a share of its lower end: chance alone then seldom puts two runs more
than 15 % apart. What changes from one run to the next comes on top. Half of it would take four times the rounds."""


def is_known(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> bool:
    """Return whether the median ratio of ours to each other contestant has a narrow interval, in every operation.

    Args:
        measured: operation -> contestant -> values above zero, one a round. An operation of which ours or the others
            have measured nothing is known.
    """
    return all(
        width_of(values[OURS], others) <= MAX_WIDTH
        for values in measured.values()
        for name, others in values.items()
        if name != OURS and OURS in values
    )


def width_of(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return what the 95 % interval of the median ratio spans, as a share of its lower end."""
    low, high = median_interval(np.array(ours) / np.array(others))
    return high / low - 1.0
