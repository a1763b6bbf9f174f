"""The growth of a cost per block or request with their number, and its bar."""

from collections.abc import Mapping, Sequence

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement

GROWTH_BAR = 2.5
"""Largest growth from the smallest to the largest number, which is 16 to 64 times as large. A logarithmic cost grows up
to 1.7 times, plus the cost of memory beyond the caches; a cost with the square root grows 4 times or more."""


def growth_of(what: str, of: str, costs: Mapping[int, Sequence[float]]) -> Measurement:
    """Return the growth of a cost from the smallest to the largest measured number. Pure.

    Args:
        what: the measured operation.
        of: what is counted.
        costs: by number, at least two, one value per round, for the same share of the work. Rounds are compared one by
            one, so that changes of the machine affect both numbers.
    """
    first, last = min(costs), max(costs)
    labels: dict[str, str | int] = {"growth of": what, "with": of, "from": first, "to": last}
    growths = tuple(many / few for few, many in zip(costs[first], costs[last], strict=True))
    return Measurement(labels, "times", Better.LOWER, {OURS: growths}, Bar(None, GROWTH_BAR))
