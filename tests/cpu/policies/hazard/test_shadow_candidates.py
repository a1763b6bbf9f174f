"""Leaves leave by index, and are put where they belong as they age."""

import pytest

from kvtier.cpu.policies.hazard.directory import Cohort, Naming, Node
from kvtier.cpu.policies.hazard.model import EDGES_S, NUM_BINS
from kvtier.cpu.policies.hazard.shadow import Candidates
from kvtier.testing.policy_suite import key_of

FALLING, RISING, HUMP = 0, 1, 2
INDICES = {
    FALLING: [float(NUM_BINS - number) for number in range(NUM_BINS)],
    RISING: [number + 0.5 for number in range(NUM_BINS)],
    HUMP: [1.0 + number if number < 5 else 4.25 - 0.25 * number for number in range(NUM_BINS)],
}
OLD_S = 1e6
"""An age in the last bin."""


def make_leaf(number: int, code: int, named_s: float = 0.0) -> Node:
    leaf = Node(key_of(number), None)
    leaf.cohort = Cohort(Naming(named_s, 0, 0), code)
    return leaf


def take_all(candidates: Candidates, now_s: float) -> list[Node]:
    """Withdraw the lowest leaf until there is none."""
    taken = []
    while (lowest := candidates.lowest(now_s)) is not None:
        taken.append(lowest[1])
        candidates.withdraw(lowest[1])
    return taken


def test_the_lowest_index_comes_first_and_each_leaf_once() -> None:
    candidates = Candidates(INDICES)
    leaves = [make_leaf(0, FALLING), make_leaf(1, RISING), make_leaf(2, FALLING, named_s=-5.0)]
    for leaf in leaves:
        candidates.add(leaf, 0.0)

    assert take_all(candidates, 0.0) == [leaves[1], leaves[2], leaves[0]]


def test_asking_for_the_lowest_changes_nothing() -> None:
    candidates = Candidates(INDICES)
    leaf = make_leaf(0, RISING)
    candidates.add(leaf, 0.0)

    assert candidates.lowest(0.0) == candidates.lowest(0.0) == (INDICES[RISING][0], leaf)


def test_a_leaf_that_is_no_candidate_any_more_is_passed_over() -> None:
    candidates = Candidates(INDICES)
    leaf, other = make_leaf(0, FALLING), make_leaf(1, FALLING)
    candidates.add(leaf, 0.0)
    candidates.withdraw(other)
    assert candidates.lowest(0.0) == (INDICES[FALLING][0], leaf)

    candidates.withdraw(leaf)

    assert candidates.lowest(0.0) is None


def test_another_leaf_of_a_naming_takes_the_place_of_the_first() -> None:
    candidates = Candidates(INDICES)
    tail = make_leaf(0, RISING)
    before = make_leaf(1, RISING)
    before.cohort = Cohort(tail.cohort.naming, FALLING)
    candidates.add(tail, 0.0)

    candidates.add(before, 0.0)

    assert take_all(candidates, 0.0) == [before]


@pytest.mark.parametrize("code", INDICES)
def test_indices_follow_age(code: int) -> None:
    candidates = Candidates(INDICES)
    leaf = make_leaf(0, code)
    candidates.add(leaf, 0.0)

    found = []
    for edge_s in EDGES_S:
        candidates.renew(edge_s * 1.01)
        found.append(candidates.lowest(edge_s * 1.01))

    assert found == [(index, leaf) for index in INDICES[code][1:]]


def test_leaves_that_nobody_asks_for_change_places_as_they_age() -> None:
    candidates = Candidates(INDICES)
    leaves = {code: make_leaf(code, code) for code in INDICES}
    for leaf in leaves.values():
        candidates.add(leaf, 0.0)

    candidates.renew(OLD_S)

    assert take_all(candidates, OLD_S) == [leaves[code] for code in (HUMP, FALLING, RISING)]


def test_a_new_model_puts_all_where_they_belong() -> None:
    indices = {code: list(row) for code, row in INDICES.items()}
    candidates = Candidates(indices)
    leaves = {code: make_leaf(code, code) for code in INDICES}
    for leaf in leaves.values():
        candidates.add(leaf, 0.0)

    indices[FALLING][0], indices[RISING][0], indices[RISING][3] = 0.75, 0.8, 0.7
    candidates.rebuild(0.0)

    assert candidates.lowest(0.0) == (0.75, leaves[FALLING])
    rising_s = EDGES_S[2] * 1.01
    candidates.renew(rising_s)
    assert candidates.lowest(rising_s) == (0.7, leaves[RISING])


@pytest.mark.parametrize("named_s", [0.1, 1e6 / 3, 1e9 + 0.7])
def test_rounded_ages_end_no_renewal_in_a_circle(named_s: float) -> None:
    candidates = Candidates(INDICES)
    leaf = make_leaf(0, FALLING, named_s)
    candidates.add(leaf, named_s)

    for edge_s in EDGES_S:
        candidates.renew(named_s + edge_s)

    candidates.renew(named_s + OLD_S)
    assert candidates.lowest(named_s + OLD_S) == (INDICES[FALLING][-1], leaf)


def test_stale_entries_are_dropped_in_time() -> None:
    candidates = Candidates(INDICES)
    leaf = make_leaf(0, FALLING)
    for second in range(1_000):
        candidates.add(leaf, float(second))
        candidates.renew(float(second))

    assert len(candidates) < 300
