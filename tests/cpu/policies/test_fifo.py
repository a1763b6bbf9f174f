"""FIFO: the policy contract, exact order, golden hit counts."""

from typing import ClassVar

from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.fifo import FIFOCachePolicy
from kvtier.testing.policy_suite import PolicySuite, evicted_keys, insert_ready, key_of

KEYS = [key_of(number) for number in range(12)]


class TestFIFO(PolicySuite):
    """The policy contract, on FIFO."""

    golden_hits: ClassVar[dict[int, int]] = {32: 2690, 128: 3665, 512: 5248}
    orders_by_use: ClassVar[bool] = False

    def make_policy(self, cache_capacity: int) -> FIFOCachePolicy:
        return FIFOCachePolicy(cache_capacity)


def make_policy(num_blocks: int) -> FIFOCachePolicy:
    policy = FIFOCachePolicy(len(KEYS))
    insert_ready(policy, KEYS[:num_blocks])
    return policy


def test_a_use_changes_nothing() -> None:
    policy = make_policy(4)
    policy.touch([KEYS[0], KEYS[2]])
    assert evicted_keys(policy, 4) == KEYS[:4]


def test_a_touch_moves_only_what_is_in_flight() -> None:
    policy = make_policy(2)
    policy.insert_many(KEYS[2:5], [BlockStatus(number) for number in range(3)])
    policy.touch(KEYS[:4])
    assert list(policy.blocks) == [KEYS[0], KEYS[1], KEYS[4], KEYS[3], KEYS[2]]


def test_busy_blocks_at_the_front_go_to_the_end_and_are_not_met_again() -> None:
    policy = make_policy(6)
    policy.blocks[KEYS[0]].ref_cnt = 1
    assert evicted_keys(policy, 1, {KEYS[1]}) == [KEYS[2]]
    assert list(policy.blocks) == [KEYS[3], KEYS[4], KEYS[5], KEYS[0], KEYS[1]]
