"""MQ: the policy contract, classes of use, sinking, golden hit counts."""

from typing import ClassVar

import pytest

from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.mq import GHOSTS, MAX_USES, NUM_QUEUES, MQCachePolicy
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import PolicySuite, evicted_keys, insert_ready, key_of, make_trace, replay

KEYS = [key_of(number) for number in range(12)]


class TestMQ(PolicySuite):
    """The policy contract, on MQ."""

    golden_hits: ClassVar[dict[int, int]] = {32: 3181, 128: 4611, 512: 6587}

    def make_policy(self, cache_capacity: int) -> MQCachePolicy:
        return MQCachePolicy(cache_capacity)


def make_policy(*uses: int, capacity: int = 12, lifetime: int = 1_000) -> MQCachePolicy:
    """Return a policy with one block for each of ``uses``, its store included, oldest first."""
    policy = MQCachePolicy(capacity)
    policy.lifetime = lifetime
    insert_ready(policy, KEYS[: len(uses)])
    for number, num_uses in enumerate(uses):
        for _ in range(num_uses - 1):
            policy.touch([KEYS[number]])
    return policy


def levels(policy: MQCachePolicy) -> dict[int, list[int]]:
    """Return the numbers of the keys in each queue that has any, oldest first."""
    return {level: [KEYS.index(key) for key in queue] for level, queue in enumerate(policy.queues) if queue}


def test_a_block_is_in_the_queue_of_the_logarithm_of_its_uses() -> None:
    policy = make_policy(1, 2, 3, 4, 7, 8, 64, 127, 128, 500)
    assert levels(policy) == {0: [0], 1: [1, 2], 2: [3, 4], 3: [5], 6: [6, 7], 7: [8, 9]}
    assert NUM_QUEUES == 8
    assert policy.uses[KEYS[9]] == MAX_USES


def test_the_lowest_queue_gives_its_oldest() -> None:
    policy = make_policy(2, 1, 4, 1, 2)
    assert evicted_keys(policy, 5) == [KEYS[number] for number in (1, 3, 0, 4, 2)]


def test_a_block_that_is_not_used_for_its_lifetime_sinks_one_queue() -> None:
    policy = make_policy(4, 1, lifetime=6)
    assert policy.num_uses == 5
    for _ in range(6):
        policy.touch([KEYS[1]])
    assert levels(policy) == {2: [0, 1]}
    policy.touch([KEYS[1]])
    assert levels(policy) == {1: [0], 3: [1]}
    for _ in range(7):
        policy.touch([KEYS[1]])
    assert levels(policy) == {0: [0], 3: [1]}


def test_a_block_that_has_sunk_rises_with_its_next_use_to_where_it_was() -> None:
    policy = make_policy(4, 1, lifetime=6)
    for _ in range(7):
        policy.touch([KEYS[1]])
    policy.touch([KEYS[0]])
    assert levels(policy)[2] == [0]
    assert policy.uses[KEYS[0]] == 5


def test_a_block_that_comes_back_goes_on_with_its_count() -> None:
    policy = make_policy(3, 1)
    evicted_keys(policy, 2)
    assert dict(policy.ghosts) == {KEYS[1]: 1, KEYS[0]: 3}
    insert_ready(policy, [KEYS[0]])
    assert (levels(policy), dict(policy.ghosts)) == ({2: [0]}, {KEYS[1]: 1})


def test_ghosts_are_bounded_and_the_first_to_leave_is_forgotten_first() -> None:
    policy = MQCachePolicy(2)
    for number in range(20):
        insert_ready(policy, [key_of(number)])
        evicted_keys(policy, 1)
    assert list(policy.ghosts) == [key_of(number) for number in range(20 - 2 * GHOSTS, 20)]


def test_a_touch_while_something_of_it_is_in_flight_renews_and_counts_nothing() -> None:
    policy = make_policy(1, 2, 1, 2)
    policy.insert(KEYS[4], BlockStatus(4))
    policy.touch([KEYS[0], KEYS[1], KEYS[4]])
    assert levels(policy) == {0: [2, 4, 0], 1: [3, 1]}


def test_busy_blocks_are_renewed_in_their_queue() -> None:
    policy = make_policy(1, 1, 1, 2, 2)
    policy.blocks[KEYS[0]].ref_cnt = 1
    assert evicted_keys(policy, 2, {KEYS[1], KEYS[3]}) == [KEYS[2], KEYS[4]]
    assert (levels(policy), policy.uses[KEYS[0]]) == ({0: [0, 1], 1: [3]}, 1)


def test_a_failed_store_of_a_ghost_leaves_no_trace() -> None:
    policy = make_policy(3)
    evicted_keys(policy, 1)
    policy.insert(KEYS[0], BlockStatus(0))
    policy.remove(KEYS[0])
    assert (levels(policy), policy.uses, dict(policy.ghosts)) == ({}, {}, {})


def test_scans_cost_mq_fewer_hits_than_lru() -> None:
    trace = make_trace(seed=7)
    assert replay(MQCachePolicy(64), trace) > replay(LRUCachePolicy(64), trace)


def test_check_finds_what_disagrees() -> None:
    policy = make_policy(1, 1)
    held = dict(policy.blocks)
    policy.queues[1][KEYS[0]] = 5
    with pytest.raises(InvariantError, match="each block once"):
        policy.check(held)
    del policy.queues[0][KEYS[0]]
    with pytest.raises(InvariantError, match="above its uses"):
        policy.check(held)
    policy.uses[KEYS[0]] = 2
    policy.queues[1][KEYS[1]] = policy.queues[0].pop(KEYS[1])
    policy.queues[1][KEYS[1]], policy.uses[KEYS[1]] = 1, 2
    with pytest.raises(InvariantError, match="in which its blocks sink"):
        policy.check(held)
    policy.ghosts[KEYS[0]] = 1
    with pytest.raises(InvariantError, match="held and a ghost"):
        policy.check(held)
