"""By how many times a cost per block or request grows with their number, and what it may."""

from collections.abc import Mapping

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement

GROWTH_BAR = 2.5
"""Times from the smallest to the largest number, which is 16 to 64 times as large. What grows with the logarithm is
then up to 1.7 times as slow, and memory that no cache holds adds to that; with the square root it would be 4 times or
more."""


def growth_of(what: str, of: str, costs: Mapping[int, float]) -> Measurement:
    """Return the growth of a cost from the smallest to the largest number that it was measured at. Pure.

    Args:
        what: whose cost.
        of: what is counted.
        costs: by that number, two or more; the same share of the work in each.
    """
    first, last = min(costs), max(costs)
    labels: dict[str, str | int] = {"growth of": what, "with": of, "from": first, "to": last}
    return Measurement(
        labels, "times", Better.LOWER, {OURS: (costs[last] / costs[first],)}, Bar(None, GROWTH_BAR)
    )
