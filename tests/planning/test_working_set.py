"""Working sets and reuse gaps equal what counting by hand, and a naive count at each instant, gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.planning.working_set import ReuseGaps, WorkingSet, measure_reuse_gaps, measure_working_sets
from kvtier.sim.trace import Trace, TraceRequest, make_trace


def trace_of(*requests: tuple[float, tuple[int, ...]]) -> Trace:
    return make_trace([TraceRequest(time_s, 16 * len(ids), 1, ids) for time_s, ids in requests], 16)


def test_a_window_counts_a_block_once_and_lets_it_go_when_it_has_passed() -> None:
    trace = trace_of((0, (1, 2)), (10, (1, 3)), (100, (4,)))

    (found,) = measure_working_sets(trace, [20])

    # Two blocks for 10 s, three until 20 s, two until 30 s, none until 100 s.
    assert found == WorkingSet(20, (20 + 30 + 20) / 100, 3, 10.0, is_cut=False)


def test_a_trace_shorter_than_the_window_gives_a_lower_bound_and_says_so() -> None:
    (found,) = measure_working_sets(trace_of((5, (1,)), (15, (2,))), [60])

    assert found == WorkingSet(60, 1.0, 2, 10.0, is_cut=True)


def test_a_trace_of_one_instant_has_all_its_blocks_in_use() -> None:
    (found,) = measure_working_sets(trace_of((7, (1, 2, 3))), [60])

    assert (found.mean_blocks, found.peak_blocks, found.peak_s) == (3.0, 3, 0.0)


def test_an_empty_trace_has_no_working_set() -> None:
    assert measure_working_sets(make_trace([], 16), [60])[0].peak_blocks == 0
    assert measure_reuse_gaps(make_trace([], 16)) == ReuseGaps(0, {})


def test_gaps_are_between_uses_of_one_block() -> None:
    trace = trace_of((0, (1, 2)), (3, (1,)), (10, (1, 2)))

    assert measure_reuse_gaps(trace) == ReuseGaps(3, {10: 3.0, 50: 7.0, 90: 10.0, 99: 10.0})


def test_a_window_without_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_s=0"):
        measure_working_sets(trace_of((0, (1,))), [0])


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True)),
        min_size=1,
    ),
    st.integers(1, 30),
)
def test_the_peak_is_the_most_that_any_instant_has(
    requests: list[tuple[int, list[int]]], window_s: int
) -> None:
    trace = trace_of(*((float(time_s), tuple(ids)) for time_s, ids in requests))

    (found,) = measure_working_sets(trace, [window_s])

    def in_use(now_s: int) -> int:
        named = [one for one in trace.requests if now_s - window_s <= one.arrival_s <= now_s]
        return len({block for one in named for block in one.hash_ids})

    assert found.peak_blocks == max(in_use(now_s) for now_s in range(41))
