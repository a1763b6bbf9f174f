"""LRU: the policy contract, exact order, golden hit counts."""

import random
from typing import ClassVar

import pytest

from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import PolicySuite, evicted_keys, insert_ready, key_of, make_trace, replay

KEYS = [key_of(number) for number in range(4)]


class TestLRU(PolicySuite):
    """The policy contract, on LRU."""

    golden_hits: ClassVar[dict[int, int]] = {32: 2880, 128: 3879, 512: 5667}

    def make_policy(self, cache_capacity: int) -> LRUCachePolicy:
        return LRUCachePolicy(cache_capacity)


def test_blocks_lists_the_oldest_first() -> None:
    policy = LRUCachePolicy(4)
    insert_ready(policy, KEYS)
    policy.touch([KEYS[1], KEYS[0]])
    assert list(policy.blocks) == [KEYS[2], KEYS[3], KEYS[0], KEYS[1]]


def test_a_use_protects_longer_than_a_later_insert_of_another_key() -> None:
    policy = LRUCachePolicy(4)
    insert_ready(policy, KEYS[:3])
    policy.touch([KEYS[0]])
    assert evicted_keys(policy, 3) == [KEYS[1], KEYS[2], KEYS[0]]


def test_a_repeated_key_in_one_touch_counts_at_its_first_place() -> None:
    policy = LRUCachePolicy(4)
    insert_ready(policy, KEYS[:3])
    policy.touch([KEYS[1], KEYS[0], KEYS[1]])
    assert list(policy.blocks) == [KEYS[2], KEYS[0], KEYS[1]]


@pytest.mark.parametrize("busy", range(4))
def test_an_eviction_that_fails_changes_no_order(busy: int) -> None:
    policy = LRUCachePolicy(4)
    blocks = insert_ready(policy, KEYS)
    blocks[busy].ref_cnt = 1

    assert policy.evict(4, ()) is None
    assert list(policy.blocks) == KEYS
    assert evicted_keys(policy, 3) == KEYS[:busy] + KEYS[busy + 1 :]


def test_hits_equal_a_list_that_is_searched() -> None:
    trace = make_trace(seed=random.Random(4).randrange(1000), length=3_000)
    order: list[bytes] = []
    expected = 0
    for key in trace:
        if key in order:
            expected += 1
            order.remove(key)
        elif len(order) == 50:
            order.pop(0)
        order.append(key)
    assert replay(LRUCachePolicy(50), trace) == expected


def test_check_names_a_block_that_only_one_side_holds() -> None:
    policy = LRUCachePolicy(4)
    (block,) = insert_ready(policy, KEYS[:1])
    with pytest.raises(InvariantError, match="held only by the policy"):
        policy.check({})
    with pytest.raises(InvariantError, match="held only by the manager"):
        policy.check({KEYS[0]: block, KEYS[1]: BlockStatus(1)})
    with pytest.raises(InvariantError, match=r"ref_cnt=0\) in the policy"):
        policy.check({KEYS[0]: BlockStatus(0)})
