"""Leaves leave by index, and are put where they belong as they age."""

import pytest

from kvtier.cpu.policies.hazard.candidates import Candidates
from kvtier.cpu.policies.hazard.directory import Cohort, Naming, Node
from kvtier.cpu.policies.hazard.model import EDGES_S, NUM_BINS
from kvtier.testing.policy_suite import key_of

FALLING, RISING = 0, 1
INDICES = {
    FALLING: [float(NUM_BINS - number) for number in range(NUM_BINS)],
    RISING: [number + 0.5 for number in range(NUM_BINS)],
}


def make_leaf(number: int, code: int, named_s: float = 0.0) -> Node:
    leaf = Node(key_of(number), None)
    leaf.cohort = Cohort(Naming(named_s, 0, 0), code)
    return leaf


def test_the_lowest_index_leaves_first_and_each_leaf_once() -> None:
    candidates = Candidates(INDICES)
    leaves = [make_leaf(0, FALLING), make_leaf(1, RISING), make_leaf(2, FALLING, named_s=-5.0)]
    for leaf in leaves:
        candidates.add(leaf, 0.0)

    left = [candidates.pop() for _ in range(4)]

    assert [found and found[1] for found in left] == [leaves[1], leaves[2], leaves[0], None]


def test_a_leaf_that_is_no_candidate_any_more_is_passed_over() -> None:
    candidates = Candidates(INDICES)
    leaf = make_leaf(0, FALLING)
    candidates.add(leaf, 0.0)
    leaf.ticket = 0

    assert candidates.pop() is None


def test_indices_follow_age() -> None:
    candidates = Candidates(INDICES)
    falling, rising = make_leaf(0, FALLING), make_leaf(1, RISING)
    candidates.add(falling, 0.0)
    candidates.add(rising, 0.0)

    candidates.renew(1e6)

    found = candidates.pop()
    assert found == (INDICES[FALLING][-1], falling)


@pytest.mark.parametrize("named_s", [0.1, 1e6 / 3, 1e9 + 0.7])
def test_rounded_ages_end_no_renewal_in_a_circle(named_s: float) -> None:
    candidates = Candidates(INDICES)
    leaf = make_leaf(0, FALLING, named_s)
    candidates.add(leaf, named_s)

    for edge_s in EDGES_S:
        candidates.renew(named_s + edge_s)

    candidates.renew(named_s + 1e6)
    assert candidates.pop() == (INDICES[FALLING][-1], leaf)


def test_stale_entries_are_dropped_in_time() -> None:
    candidates = Candidates(INDICES)
    leaf = make_leaf(0, FALLING)
    for second in range(1_000):
        candidates.add(leaf, float(second))
        candidates.renew(float(second))

    assert len(candidates) < 300
