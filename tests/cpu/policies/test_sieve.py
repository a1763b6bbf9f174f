"""SIEVE: the policy contract, the hand, golden hit counts."""

from typing import ClassVar

import pytest

from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus
from kvtier.cpu.policies.sieve import SieveCachePolicy
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import PolicySuite, evicted_keys, insert_ready, key_of

KEYS = [key_of(number) for number in range(12)]


class TestSieve(PolicySuite):
    """The policy contract, on SIEVE."""

    golden_hits: ClassVar[dict[int, int]] = {32: 3640, 128: 4757, 512: 6815}
    orders_by_use: ClassVar[bool] = False

    def make_policy(self, cache_capacity: int) -> SieveCachePolicy:
        return SieveCachePolicy(cache_capacity)


def make_policy(num_blocks: int, marked: tuple[int, ...] = ()) -> SieveCachePolicy:
    """Return a policy with KEYS[:num_blocks], oldest first, the hand at the oldest."""
    policy = SieveCachePolicy(len(KEYS))
    insert_ready(policy, KEYS[:num_blocks])
    policy.touch([KEYS[number] for number in marked])
    return policy


def queue_of(policy: SieveCachePolicy) -> list[int]:
    """Return the numbers of the keys, oldest first, whatever the hand has passed."""
    return [KEYS.index(key) for key in [*policy.passed, *policy.ahead]]


def test_the_hand_spares_what_was_used_once_and_takes_its_mark() -> None:
    policy = make_policy(4, marked=(0, 2))
    assert evicted_keys(policy, 2) == [KEYS[1], KEYS[3]]
    assert (queue_of(policy), policy.marked) == ([0, 2], set())
    assert evicted_keys(policy, 1) == [KEYS[0]]


def test_the_hand_goes_on_where_it_stopped() -> None:
    policy = make_policy(5, marked=(0,))
    assert evicted_keys(policy, 1) == [KEYS[1]]
    policy.touch([KEYS[2]])
    assert evicted_keys(policy, 1) == [KEYS[3]]
    assert queue_of(policy) == [0, 2, 4]


def test_what_is_stored_new_is_the_last_of_the_round() -> None:
    policy = make_policy(3, marked=(0, 1))
    insert_ready(policy, [KEYS[3]])
    assert evicted_keys(policy, 3) == [KEYS[2], KEYS[3], KEYS[0]]


def test_a_round_that_ended_at_the_newest_does_not_wait_for_what_comes_next() -> None:
    policy = make_policy(3, marked=(0, 1))
    assert evicted_keys(policy, 1) == [KEYS[2]]
    insert_ready(policy, [KEYS[3]])
    assert evicted_keys(policy, 2) == [KEYS[0], KEYS[1]]


def test_when_all_are_marked_the_hand_goes_round_once() -> None:
    policy = make_policy(3, marked=(0, 1, 2))
    assert evicted_keys(policy, 2) == [KEYS[0], KEYS[1]]


@pytest.mark.parametrize("ref_cnt", [IN_FLIGHT, 1])
def test_busy_blocks_are_passed_in_their_place(ref_cnt: int) -> None:
    policy = make_policy(4, marked=(2,))
    policy.blocks[KEYS[0]].ref_cnt = ref_cnt
    assert evicted_keys(policy, 1, {KEYS[1]}) == [KEYS[3]]
    assert queue_of(policy) == [0, 1, 2]


def test_a_touch_while_something_of_it_is_in_flight_marks_nothing() -> None:
    policy = make_policy(2)
    policy.insert_many(KEYS[2:4], [BlockStatus(2), BlockStatus(3)])
    policy.touch(KEYS[:4])
    assert (policy.marked, queue_of(policy)) == (set(), [0, 1, 3, 2])


def test_a_block_in_flight_that_the_hand_has_passed_becomes_the_newest() -> None:
    policy = SieveCachePolicy(4)
    policy.insert(KEYS[0], BlockStatus(0))
    insert_ready(policy, KEYS[1:4])
    evicted_keys(policy, 1)
    assert list(policy.passed) == [KEYS[0]]
    policy.touch([KEYS[0]])
    assert queue_of(policy) == [2, 3, 0]


def test_the_last_block_ahead_of_the_hand_can_be_removed() -> None:
    policy = make_policy(3, marked=(0,))
    evicted_keys(policy, 1)
    policy.remove(KEYS[2])
    assert evicted_keys(policy, 1) == [KEYS[0]]


def test_an_eviction_that_fails_moves_neither_hand_nor_marks() -> None:
    policy = make_policy(4, marked=(0, 1))
    assert policy.evict(4, {KEYS[3]}) is None
    assert (list(policy.ahead), policy.marked) == (KEYS[:4], {KEYS[0], KEYS[1]})


def test_check_finds_a_key_on_both_sides_a_lost_hand_and_a_stray_mark() -> None:
    policy = make_policy(2)
    held = dict(policy.blocks)
    policy.passed[KEYS[0]] = held[KEYS[0]]
    with pytest.raises(InvariantError, match="both ahead of the hand and passed"):
        policy.check(held)
    policy.passed.update(held)
    policy.ahead.clear()
    with pytest.raises(InvariantError, match="none is ahead of the hand"):
        policy.check(held)
    policy.ahead, policy.passed = policy.passed, policy.ahead
    policy.marked.add(KEYS[5])
    with pytest.raises(InvariantError, match="marked and not held"):
        policy.check(held)
