"""Counts of observations by size: what a histogram of Prometheus is made from.

A bucket keeps the sum of its observations beside their number. So a reader in another process, which can only be given
single observations, gets each bucket's mean as often as the bucket has counted: every count and the sum stay right.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LATENCY_BOUNDS_S = (
    1e-5, 5e-5, 1e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper ends of the buckets of latencies, seconds: from a search in memory to the deadline of a waiting request. Fewer
hide whether a disk or a server answers; each costs a time series for each tier."""

SIZE_BOUNDS_BYTES = (1e4, 1e5, 1e6, 5e6, 1e7, 2e7, 4e7, 6e7, 8e7, 1e8, 1.5e8, 2e8, 5e8, 1e9)
"""Upper ends of the buckets of transfers, bytes: vLLM's own, and some below and above for small and large models."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """The state of a histogram at one moment.

    Attributes:
        bounds: upper ends of the buckets, ascending; the last bucket, which is not among them, has none.
        counts: observations in each bucket, one more than bounds.
        sums: sum of the observations in each bucket.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sums: tuple[float, ...]

    @property
    def count(self) -> int:
        """How many observations there are."""
        return sum(self.counts)

    @property
    def sum(self) -> float:
        """Sum of all observations."""
        return sum(self.sums)

    def since(self, earlier: "HistogramSnapshot") -> "HistogramSnapshot":
        """Return what was observed after ``earlier``, a snapshot of the same histogram. Pure."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        sums = tuple(now - then for now, then in zip(self.sums, earlier.sums, strict=True))
        return HistogramSnapshot(self.bounds, counts, sums)

    def observations(self) -> Iterator[float]:
        """Yield the mean of each bucket as often as the bucket has counted. Pure."""
        for count, total in zip(self.counts, self.sums, strict=True):
            for _ in range(count):
                yield total / count


@dataclass(slots=True, init=False)
class Histogram:
    """Counts observations by size. One thread observes; any thread may take a snapshot.

    A snapshot that another thread takes during an observation may lack it in one of its two lists: it is whole in
    the next.

    Args:
        bounds: upper ends of the buckets, ascending.
    """

    bounds: tuple[float, ...]
    _counts: list[int]
    _sums: list[float]

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sums = [0.0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count ``value``, which belongs to the first bucket whose upper end is not below it."""
        bucket = bisect_left(self.bounds, value)
        self._counts[bucket] += 1
        self._sums[bucket] += value

    def snapshot(self) -> HistogramSnapshot:
        """Return the present state."""
        return HistogramSnapshot(self.bounds, tuple(self._counts), tuple(self._sums))
