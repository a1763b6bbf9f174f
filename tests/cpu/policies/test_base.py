"""What a policy gets for free, proven on one that implements the six methods and nothing else."""

from collections.abc import Collection

import pytest

from kvtier.base import OffloadKey
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus, CachePolicy
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import PolicySuite, insert_ready, key_of


class OldestFirst(CachePolicy):
    """The smallest policy: a list of keys, searched."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.order: list[tuple[OffloadKey, BlockStatus]] = []

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return dict(self.order).get(key)

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.order.append((key, block))

    def remove(self, key: OffloadKey) -> None:
        self.order = [entry for entry in self.order if entry[0] != key]

    def touch(self, keys: Collection[OffloadKey]) -> None:
        for key in reversed(list(keys)):
            block = self.get(key)
            if block is not None:
                self.remove(key)
                self.insert(key, block)

    def evict(self, n: int, protected: Collection[OffloadKey]) -> list[tuple[OffloadKey, BlockStatus]] | None:
        idle = [entry for entry in self.order if entry[1].ref_cnt == 0 and entry[0] not in protected]
        if len(idle) < n:
            return None
        for key, _ in idle[:n]:
            self.remove(key)
        return idle[:n]

    def clear(self) -> None:
        self.order = []


class TestSmallestPolicy(PolicySuite):
    """The policy contract, on six methods and the defaults."""

    def make_policy(self, cache_capacity: int) -> OldestFirst:
        return OldestFirst(cache_capacity)


def test_a_new_block_is_in_flight_until_it_is_not() -> None:
    block = BlockStatus(3)
    assert (block.block_id, block.ref_cnt, block.is_ready) == (3, IN_FLIGHT, False)
    block.ref_cnt = 0
    assert block.is_ready
    assert repr(block) == "BlockStatus(block_id=3, ref_cnt=0)"


def test_a_block_has_no_room_for_surprises() -> None:
    with pytest.raises(AttributeError):
        BlockStatus(0).__setattr__("extra", 1)


def test_the_default_check_finds_a_block_the_policy_lost() -> None:
    policy = OldestFirst(2)
    (block,) = insert_ready(policy, [key_of(1)])
    policy.check({key_of(1): block})
    policy.clear()
    with pytest.raises(InvariantError, match="slot 0 is not held by the policy"):
        policy.check({key_of(1): block})
