"""The working set of a trace, and the times between two uses of a block.

The working set of a window is the set of distinct blocks that requests accessed within the last so many seconds. A
cache of that size that never evicted a wrong block would find everything that is reused within the window. Windows
slide: every instant is considered, not only multiples of the window.

Source: P. J. Denning, "The Working Set Model for Program Behavior", Communications of the ACM, 1968.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError
from kvtier.sim.trace import Trace

DEFAULT_WINDOWS_S = (60.0, 300.0, 900.0, 3600.0)
"""A user who types, a conversation, a meeting, a working hour."""

PERCENTS = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Distinct blocks accessed within a window.

    Attributes:
        window_s: length of the window.
        mean_blocks: mean over the time from the first arrival to the last.
        peak_blocks: the most at any instant.
        peak_s: time of the first peak, from the start of the trace.
        is_cut: whether the trace is shorter than the window, so that the peak is only a lower bound.
    """

    window_s: float
    mean_blocks: float
    peak_blocks: int
    peak_s: float
    is_cut: bool


@dataclass(frozen=True, slots=True)
class ReuseGaps:
    """Seconds between two uses of one block, over all accesses that are not the first.

    Attributes:
        num_reuses: how many there are.
        percentiles_s: percent -> that percentile of the times; empty without reuses.
    """

    num_reuses: int
    percentiles_s: dict[int, float]


def measure_working_sets(
    trace: Trace, windows_s: Sequence[float] = DEFAULT_WINDOWS_S
) -> tuple[WorkingSet, ...]:
    """Return the working set of each window. Pure.

    Raises:
        ConfigError: a window is not above zero.
    """
    for window_s in windows_s:
        if not window_s > 0:
            raise ConfigError("window_s", window_s, "must be above zero")
    blocks, times_s = _list_accesses(trace)
    return tuple(_measure(window_s, blocks, times_s) for window_s in windows_s)


def measure_reuse_gaps(trace: Trace) -> ReuseGaps:
    """Return the times between two uses of a block; percentiles by the nearest rank. Pure."""
    blocks, times_s = _list_accesses(trace)
    gaps_s = np.sort(np.diff(times_s)[np.diff(blocks) == 0])
    if not len(gaps_s):
        return ReuseGaps(0, {})
    ranks = {percent: -(-percent * len(gaps_s) // 100) - 1 for percent in PERCENTS}
    return ReuseGaps(len(gaps_s), {percent: float(gaps_s[rank]) for percent, rank in ranks.items()})


def _list_accesses(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return block and time of each access, ordered by block and then by time."""
    numbers: dict[int, int] = {}
    blocks = [numbers.setdefault(block, len(numbers)) for one in trace.requests for block in one.hash_ids]
    lengths = [len(one.hash_ids) for one in trace.requests]
    times_s = np.repeat(np.array([one.arrival_s for one in trace.requests], float), lengths)
    found = np.array(blocks, np.int64)
    order = np.lexsort((times_s, found))
    return found[order], times_s[order]


def _measure(window_s: float, blocks: NDArray[np.int64], times_s: NDArray[np.float64]) -> WorkingSet:
    """Count the blocks in use: each from an access until the window after its last access has passed."""
    if not len(times_s):
        return WorkingSet(window_s, 0.0, 0, 0.0, is_cut=False)
    begin_s, end_s = float(times_s.min()), float(times_s.max())
    is_last = np.append(np.diff(blocks) != 0, [True])
    leaves = is_last | (np.append(np.diff(times_s), [0.0]) > window_s)
    enters = np.append([True], leaves[:-1])
    moments_s = np.concatenate((times_s[enters], times_s[leaves] + window_s))
    changes = np.concatenate((np.ones(enters.sum(), np.int64), -np.ones(leaves.sum(), np.int64)))
    # At one instant blocks enter before others leave: a window includes both of its ends.
    order = np.lexsort((-changes, moments_s))
    moments_s, counts = moments_s[order], np.cumsum(changes[order])
    peak = int(np.argmax(counts))
    lasting_s = np.diff(np.minimum(moments_s, end_s), append=end_s)
    mean = float((counts * lasting_s).sum() / (end_s - begin_s)) if end_s > begin_s else float(counts[peak])
    return WorkingSet(
        window_s, mean, int(counts[peak]), float(moments_s[peak]) - begin_s, is_cut=end_s - begin_s < window_s
    )
