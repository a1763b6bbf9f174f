"""Belady's bound: no order of eviction finds more, and some order finds as much."""

import random
from functools import cache

import pytest

from kvtier.cpu.policies import CACHE_POLICIES, create_cache_policy
from kvtier.sim.bound import count_belady_hits, list_next_accesses
from kvtier.testing.policy_suite import make_trace, replay


def count_best_hits(accesses: tuple[int, ...], cache_capacity: int) -> int:
    """Return the most hits of all choices of victims, by trying each."""

    @cache
    def best_from(position: int, held: frozenset[int]) -> int:
        if position == len(accesses):
            return 0
        key = accesses[position]
        if key in held:
            return 1 + best_from(position + 1, held)
        if len(held) < cache_capacity:
            return best_from(position + 1, held | {key})
        return max(best_from(position + 1, held - {victim} | {key}) for victim in held)

    return best_from(0, frozenset())


@pytest.mark.parametrize("cache_capacity", [1, 2, 3, 4])
def test_the_bound_is_what_trying_everything_finds(cache_capacity: int) -> None:
    for seed in range(20):
        draw = random.Random(seed).randrange
        accesses = tuple(draw(7) for _ in range(30))
        assert count_belady_hits(accesses, cache_capacity) == count_best_hits(accesses, cache_capacity)


def count_best_counted_hits(accesses: tuple[int, ...], is_counted: list[bool], cache_capacity: int) -> int:
    """Return the most hits that count, by trying each choice of victims."""

    @cache
    def best_from(position: int, held: frozenset[int]) -> int:
        if position == len(accesses):
            return 0
        key = accesses[position]
        if key in held:
            return is_counted[position] + best_from(position + 1, held)
        if len(held) < cache_capacity:
            return best_from(position + 1, held | {key})
        return max(best_from(position + 1, held - {victim} | {key}) for victim in held)

    return best_from(0, frozenset())


@pytest.mark.parametrize("cache_capacity", [1, 2, 3, 4])
def test_the_bound_of_the_hits_that_count_is_what_trying_everything_finds(cache_capacity: int) -> None:
    for seed in range(30):
        draw = random.Random(seed).randrange
        accesses = tuple(draw(7) for _ in range(30))
        is_counted = [draw(3) > 0 for _ in accesses]
        found = count_belady_hits(accesses, cache_capacity, is_counted)
        assert found == count_best_counted_hits(accesses, is_counted, cache_capacity)


@pytest.mark.parametrize("policy", CACHE_POLICIES.names())
def test_no_policy_finds_more(policy: str) -> None:
    trace = make_trace(seed=8, length=5_000)
    for cache_capacity in (32, 256):
        bound = count_belady_hits(trace, cache_capacity)
        assert replay(create_cache_policy(policy, cache_capacity), trace) <= bound


def test_golden_hit_counts() -> None:
    trace = make_trace(seed=1)
    found = {capacity: count_belady_hits(trace, capacity) for capacity in (32, 128, 512)}
    assert found == {32: 5194, 128: 7093, 512: 8601}


def test_next_accesses_are_positions_and_the_length_when_there_is_none() -> None:
    assert list_next_accesses("abacb") == [2, 4, 5, 5, 5]
    assert list_next_accesses([]) == []


def test_room_for_everything_misses_each_block_once() -> None:
    assert count_belady_hits("abcabcabc", 3) == 6
    assert count_belady_hits([], 3) == 0


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_capacity is 0"):
        count_belady_hits("abc", 0)
