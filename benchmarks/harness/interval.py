"""The confidence of a median of ratios: its bootstrap interval. Pure."""

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement

NUM_RESAMPLES = 10_000
"""Bootstrap samples: with so many the ends of the interval move by less than 0.001."""


def lines_of(name: str, ratios: Sequence[float], bar: float | None) -> Iterator[Measurement]:
    """Yield the median of the time ratios of pairs and the ends of its 95 % interval; the bar is for the upper one.

    Args:
        name: the configuration of kvtier.
        ratios: time with it over time without, pair by pair.
        bar: limit of the upper end; None for a control.
    """
    low, high = median_interval(np.array(ratios))
    for what, value, bar_of in (
        ("median", float(np.median(ratios)), None),
        ("interval's low end", low, None),
        ("interval's high end", high, bar),
    ):
        labels: dict[str, str | int] = {"time with / without": name, "of": what, "pairs": len(ratios)}
        yield Measurement(
            labels, "ratio", Better.LOWER, {OURS: (value,)}, Bar(None, bar_of) if bar_of else None
        )


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median, percentile method, with a fixed seed. Pure."""
    drawn = np.random.default_rng(0).integers(0, len(values), (NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5))
    return float(low), float(high)
