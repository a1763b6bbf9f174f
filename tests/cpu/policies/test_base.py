"""What a policy gets for free, proven on one that implements the five methods that must be written and nothing else."""

from collections.abc import Collection
from typing import ClassVar

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus, CachePolicy, clear_policy
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


class TestSmallestPolicy(PolicySuite):
    """The policy contract, on five methods and the defaults."""

    def make_policy(self, cache_capacity: int) -> OldestFirst:
        return OldestFirst(cache_capacity)


class FirstStoredFirst(OldestFirst):
    """A policy in which a use of ready blocks changes nothing."""

    def touch(self, keys: Collection[OffloadKey]) -> None:
        blocks = {key: self.get(key) for key in keys}
        super().touch([key for key, block in blocks.items() if block is not None and not block.is_ready])


class TestOrderOfInsertion(PolicySuite):
    """The policy contract, where uses of ready blocks reorder nothing."""

    orders_by_use: ClassVar[bool] = False

    def make_policy(self, cache_capacity: int) -> FirstStoredFirst:
        return FirstStoredFirst(cache_capacity)


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
    policy.remove(key_of(1))
    with pytest.raises(InvariantError, match="slot 0 is not held by the policy"):
        policy.check({key_of(1): block})


def test_a_policy_without_clear_is_built_again_in_place_with_all_that_it_had_learned_forgotten() -> None:
    policy = OldestFirst(2)
    getter = policy.getter()
    insert_ready(policy, [key_of(1)])
    vars(policy)["learned"] = 1

    assert clear_policy(policy, 7)

    assert getter(key_of(1)) is None
    assert vars(policy) == {"cache_capacity": 7, "order": []}


def test_a_manager_serves_stores_loads_evictions_and_a_reset_with_it() -> None:
    request = ReqContext("a")
    name = f"{OldestFirst.__module__}:{OldestFirst.__qualname__}"
    manager = CPUOffloadingManager(2, name)
    for _ in range(2):
        for number in range(3):
            output = manager.prepare_store([key_of(number)], request)
            assert output is not None
            assert output.evicted_keys == ([key_of(0)] if number == 2 else [])
            manager.complete_store([key_of(number)], request)
            manager.check()
        assert [manager.lookup(key_of(number), request) for number in range(3)] == [False, True, True]
        manager.prepare_load([key_of(1)], request)
        manager.reset()
        manager.check()
        assert [manager.lookup(key_of(number), request) for number in range(3)] == [False] * 3
        manager.table.orphans.settle_keys([key_of(1)], is_write=False)
        manager.check()
