"""Buckets of observations: nothing is lost or moved, also on the way to another process."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.histogram import Histogram, HistogramSnapshot

BOUNDS = (0.1, 1.0, 10.0)


def histogram_of(values: list[float]) -> Histogram:
    """Return a histogram that has observed ``values``."""
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    return histogram


def test_an_observation_at_the_end_of_a_bucket_belongs_to_it_and_one_beyond_all_to_the_last() -> None:
    snapshot = histogram_of([0.1, 0.1001, 10.0, 11.0]).snapshot()

    assert snapshot.counts == (1, 1, 1, 1)
    assert snapshot.sums == (0.1, 0.1001, 10.0, 11.0)
    assert (snapshot.count, snapshot.sum) == (4, 21.2001)


def test_a_snapshot_does_not_change_with_its_histogram() -> None:
    histogram = histogram_of([0.5])
    before = histogram.snapshot()
    histogram.observe(0.5)

    assert before.count == 1
    assert histogram.snapshot().since(before) == HistogramSnapshot(BOUNDS, (0, 1, 0, 0), (0.0, 0.5, 0.0, 0.0))


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_what_a_snapshot_gives_to_another_histogram_has_its_counts_and_its_sum(values: list[float]) -> None:
    snapshot = histogram_of(values).snapshot()

    again = histogram_of(list(snapshot.observations())).snapshot()

    assert again.counts == snapshot.counts
    assert abs(again.sum - snapshot.sum) <= 1e-9 * max(1.0, snapshot.sum)
