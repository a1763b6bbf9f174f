"""By how many times a cost per block or request grows with their number, and what it may."""

from collections.abc import Mapping, Sequence

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement

GROWTH_BAR = 2.5
"""Times from the smallest to the largest number, which is 16 to 64 times as large. What grows with the logarithm is
then up to 1.7 times as slow, and memory that no cache holds adds to that; with the square root it would be 4 times or
more."""


def growth_of(what: str, of: str, costs: Mapping[int, Sequence[float]]) -> Measurement:
    """Return the growth of a cost from the smallest to the largest number that it was measured at. Pure.

    Args:
        what: whose cost.
        of: what is counted.
        costs: by that number, two or more, one a round; the same share of the work in each. Rounds are compared one by
            one, so that what changes from minute to minute changes both.
    """
    first, last = min(costs), max(costs)
    labels: dict[str, str | int] = {"growth of": what, "with": of, "from": first, "to": last}
    growths = tuple(many / few for few, many in zip(costs[first], costs[last], strict=True))
    return Measurement(labels, "times", Better.LOWER, {OURS: growths}, Bar(None, GROWTH_BAR))
