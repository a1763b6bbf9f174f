"""One measurement: kvtier, the floor and the peers, round by round. Pure.

Contestants of a round run on the machine in the same state, so ratios are taken in each round and the result is the
median of the ratios; the quartiles show its precision.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

OURS = "ours"
FLOOR = "floor"
"""The best that the hardware or the language allows, measured in the same run."""

RATIO_UNITS = ("ratio", "times")
"""Units of values that are themselves ratios within one run."""


class Better(Enum):
    """Which values are better."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles around it.

    Attributes:
        median: half of the values are smaller.
        low: a quarter of them is smaller.
        high: a quarter of them is larger.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bar:
    """The goal of a measurement.

    Attributes:
        against: the contestant to compare with; None: the bar is for kvtier's value itself.
        value: the ratio at least, or the limit of the value.
    """

    against: str | None
    value: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of a table.

    Attributes:
        labels: what was measured, column by column: ``{"operation": "store", "blocks": 16384}``.
        unit: of the values.
        better: which values are better.
        values: by contestant, one value per round, in the order of the rounds; "ours" is one of them.
        bar: the goal of ours, None without one.
    """

    labels: Mapping[str, str | int]
    unit: str
    better: Better
    values: Mapping[str, tuple[float, ...]]
    bar: Bar | None = None

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the contestants except ours and the floor."""
        return tuple(name for name in self.values if name not in (OURS, FLOOR))

    def median(self, contestant: str) -> float | None:
        """Return a contestant's median, None when it did not take part."""
        values = self.values.get(contestant)
        return statistics.median(values) if values else None

    def ratio(self, contestant: str) -> Spread | None:
        """Return how many times as good as ``contestant`` ours is, None when it did not take part."""
        others = self.values.get(contestant)
        if not others:
            return None
        pairs = zip(self.values[OURS], others, strict=True)
        is_rate = self.better is Better.HIGHER
        return spread_of([ours / other if is_rate else other / ours for ours, other in pairs])

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is reached; None without a bar, or when its contestant did not take part."""
        if self.bar is None:
            return None
        if self.bar.against is not None:
            ratio = self.ratio(self.bar.against)
            return None if ratio is None else ratio.median >= self.bar.value
        ours = statistics.median(self.values[OURS])
        return ours >= self.bar.value if self.better is Better.HIGHER else ours <= self.bar.value


def spread_of(values: list[float]) -> Spread:
    """Return the median and the quartiles of at least one value. Pure."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
