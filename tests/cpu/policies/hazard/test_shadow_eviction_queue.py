"""Leaves leave by index, and are put where they belong as they age."""

import pytest

from kvtier.cpu.policies.hazard.model import EDGES_S, NUM_BINS
from kvtier.cpu.policies.hazard.prefix_tree import Access, Cohort, PrefixNode
from kvtier.cpu.policies.hazard.shadow import EvictionQueue
from kvtier.testing.policy_suite import key_of

FALLING, RISING, HUMP = 0, 1, 2
INDICES = {
    FALLING: [float(NUM_BINS - number) for number in range(NUM_BINS)],
    RISING: [number + 0.5 for number in range(NUM_BINS)],
    HUMP: [1.0 + number if number < 5 else 4.25 - 0.25 * number for number in range(NUM_BINS)],
}
OLD_S = 1e6
"""An age in the last bin."""


def make_leaf(number: int, code: int, named_s: float = 0.0) -> PrefixNode:
    leaf = PrefixNode(key_of(number), None)
    leaf.cohort = Cohort(Access(named_s, 0, 0), code)
    return leaf


def take_all(queue: EvictionQueue, now_s: float) -> list[PrefixNode]:
    """Withdraw the lowest leaf until there is none."""
    taken = []
    while (lowest := queue.lowest(now_s)) is not None:
        taken.append(lowest[1])
        queue.remove(lowest[1])
    return taken


def test_the_lowest_index_comes_first_and_each_leaf_once() -> None:
    queue = EvictionQueue(INDICES)
    leaves = [make_leaf(0, FALLING), make_leaf(1, RISING), make_leaf(2, FALLING, named_s=-5.0)]
    for leaf in leaves:
        queue.add(leaf, 0.0)

    assert take_all(queue, 0.0) == [leaves[1], leaves[2], leaves[0]]


def test_asking_for_the_lowest_changes_nothing() -> None:
    queue = EvictionQueue(INDICES)
    leaf = make_leaf(0, RISING)
    queue.add(leaf, 0.0)

    assert queue.lowest(0.0) == queue.lowest(0.0) == (INDICES[RISING][0], leaf)


def test_a_leaf_that_is_no_candidate_any_more_is_passed_over() -> None:
    queue = EvictionQueue(INDICES)
    leaf, other = make_leaf(0, FALLING), make_leaf(1, FALLING)
    queue.add(leaf, 0.0)
    queue.remove(other)
    assert queue.lowest(0.0) == (INDICES[FALLING][0], leaf)

    queue.remove(leaf)

    assert queue.lowest(0.0) is None


def test_another_leaf_of_a_naming_takes_the_place_of_the_first() -> None:
    queue = EvictionQueue(INDICES)
    tail = make_leaf(0, RISING)
    before = make_leaf(1, RISING)
    before.cohort = Cohort(tail.cohort.access, FALLING)
    queue.add(tail, 0.0)

    queue.add(before, 0.0)

    assert take_all(queue, 0.0) == [before]


@pytest.mark.parametrize("code", INDICES)
def test_indices_follow_age(code: int) -> None:
    queue = EvictionQueue(INDICES)
    leaf = make_leaf(0, code)
    queue.add(leaf, 0.0)

    found = []
    for edge_s in EDGES_S:
        queue.update(edge_s * 1.01)
        found.append(queue.lowest(edge_s * 1.01))

    assert found == [(index, leaf) for index in INDICES[code][1:]]


def test_leaves_that_nobody_asks_for_change_places_as_they_age() -> None:
    queue = EvictionQueue(INDICES)
    leaves = {code: make_leaf(code, code) for code in INDICES}
    for leaf in leaves.values():
        queue.add(leaf, 0.0)

    queue.update(OLD_S)

    assert take_all(queue, OLD_S) == [leaves[code] for code in (HUMP, FALLING, RISING)]


def test_a_new_model_puts_all_where_they_belong() -> None:
    indices = {code: list(row) for code, row in INDICES.items()}
    queue = EvictionQueue(indices)
    leaves = {code: make_leaf(code, code) for code in INDICES}
    for leaf in leaves.values():
        queue.add(leaf, 0.0)

    indices[FALLING][0], indices[RISING][0], indices[RISING][3] = 0.75, 0.8, 0.7
    queue.rebuild(0.0)

    assert queue.lowest(0.0) == (0.75, leaves[FALLING])
    rising_s = EDGES_S[2] * 1.01
    queue.update(rising_s)
    assert queue.lowest(rising_s) == (0.7, leaves[RISING])


@pytest.mark.parametrize("named_s", [0.1, 1e6 / 3, 1e9 + 0.7])
def test_rounded_ages_end_no_renewal_in_a_circle(named_s: float) -> None:
    queue = EvictionQueue(INDICES)
    leaf = make_leaf(0, FALLING, named_s)
    queue.add(leaf, named_s)

    for edge_s in EDGES_S:
        queue.update(named_s + edge_s)

    queue.update(named_s + OLD_S)
    assert queue.lowest(named_s + OLD_S) == (INDICES[FALLING][-1], leaf)


def test_stale_entries_are_dropped_in_time() -> None:
    queue = EvictionQueue(INDICES)
    leaf = make_leaf(0, FALLING)
    for second in range(1_000):
        queue.add(leaf, float(second))
        queue.update(float(second))

    assert len(queue) < 300
