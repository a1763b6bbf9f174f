"""An engine of which there are only its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.histogram import HistogramSnapshot


@dataclass
class FakeEngine:
    """Numbers that a test sets."""

    numbers: dict[str, float] = field(default_factory=dict)
    snapshots: dict[str, HistogramSnapshot] = field(default_factory=dict)

    def stats(self) -> Mapping[str, float]:
        return self.numbers

    def histograms(self) -> Mapping[str, HistogramSnapshot]:
        return self.snapshots
