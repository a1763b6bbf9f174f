"""Busy blocks at the old end are out of the way of evictions, and leave in their old order once they are idle."""

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.parked_blocks import MIN_BUSY_BLOCKS
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import evicted_keys, insert_ready, key_of

CONTEXT = ReqContext("request")


def make_lru(num_busy: int, num_idle: int) -> tuple[LRUCachePolicy, list[BlockStatus]]:
    """Return a policy that is told of idle blocks, whose oldest blocks are pinned, and its blocks, oldest first."""
    policy = LRUCachePolicy(num_busy + num_idle)
    policy.expect_idle()
    blocks = insert_ready(policy, keys(0, num_busy + num_idle))
    for block in blocks[:num_busy]:
        block.ref_cnt = 1
    return policy, blocks


def keys(begin: int, end: int) -> list[OffloadKey]:
    return [key_of(number) for number in range(begin, end)]


def test_many_busy_blocks_are_passed_once() -> None:
    policy, _ = make_lru(num_busy=MIN_BUSY_BLOCKS, num_idle=3)

    assert evicted_keys(policy, 1) == keys(MIN_BUSY_BLOCKS, MIN_BUSY_BLOCKS + 1)

    assert len(policy.parked) == MIN_BUSY_BLOCKS
    assert next(iter(policy.blocks)) == key_of(MIN_BUSY_BLOCKS + 1)


def test_few_busy_blocks_keep_their_place_in_the_queue() -> None:
    policy, _ = make_lru(num_busy=MIN_BUSY_BLOCKS - 1, num_idle=2)

    evicted_keys(policy, 1)

    assert list(policy.blocks) == [*keys(0, MIN_BUSY_BLOCKS - 1), key_of(MIN_BUSY_BLOCKS)]


def test_what_becomes_idle_leaves_in_its_old_order_and_before_all_others() -> None:
    policy, blocks = make_lru(num_busy=MIN_BUSY_BLOCKS, num_idle=3)
    evicted_keys(policy, 1)

    for number in (40, 7):
        blocks[number].ref_cnt = 0
        policy.on_idle([key_of(number)])

    expected = [key_of(7), key_of(40), key_of(MIN_BUSY_BLOCKS + 1)]
    assert policy.next_victims(3) == expected
    assert evicted_keys(policy, 3) == expected


def test_what_is_used_again_is_as_new_as_anything() -> None:
    policy, blocks = make_lru(num_busy=MIN_BUSY_BLOCKS, num_idle=3)
    evicted_keys(policy, 1)

    blocks[7].ref_cnt = 0
    policy.on_idle([key_of(7)])
    policy.touch([key_of(7)])

    assert evicted_keys(policy, 3) == [*keys(MIN_BUSY_BLOCKS + 1, MIN_BUSY_BLOCKS + 3), key_of(7)]


def test_what_is_pinned_again_stays() -> None:
    policy, blocks = make_lru(num_busy=MIN_BUSY_BLOCKS, num_idle=3)
    evicted_keys(policy, 1)
    blocks[7].ref_cnt = 0
    policy.on_idle([key_of(7)])

    blocks[7].ref_cnt = 1

    assert evicted_keys(policy, 1) == [key_of(MIN_BUSY_BLOCKS + 1)]
    blocks[7].ref_cnt = 0
    policy.on_idle([key_of(7)])
    assert evicted_keys(policy, 2) == [key_of(7), key_of(MIN_BUSY_BLOCKS + 2)]


def test_a_protected_or_refused_block_leaves_later_from_the_same_place() -> None:
    policy, blocks = make_lru(num_busy=MIN_BUSY_BLOCKS, num_idle=2)
    evicted_keys(policy, 1)
    blocks[7].ref_cnt = 0
    policy.on_idle([key_of(7)])

    assert policy.evict(1, {key_of(7)}) == [(key_of(MIN_BUSY_BLOCKS + 1), blocks[MIN_BUSY_BLOCKS + 1])]
    assert policy.evict(2, ()) is None
    assert policy.evict(1, ()) == [(key_of(7), blocks[7])]


def test_nothing_is_parked_without_notifications() -> None:
    policy = LRUCachePolicy(200)
    for block in insert_ready(policy, keys(0, 200))[:150]:
        block.ref_cnt = 1

    evicted_keys(policy, 1)

    assert len(policy.parked) == 0
    assert list(policy.blocks) == [*keys(0, 150), *keys(151, 200)]


def test_check_names_an_idle_block_that_nobody_was_told_of() -> None:
    policy, blocks = make_lru(num_busy=MIN_BUSY_BLOCKS, num_idle=2)
    evicted_keys(policy, 1)

    blocks[7].ref_cnt = 0

    with pytest.raises(InvariantError, match=key_of(7).hex()):
        policy.parked.check()


def test_a_block_that_becomes_idle_again_and_again_is_listed_a_bounded_number_of_times() -> None:
    policy, blocks = make_lru(num_busy=MIN_BUSY_BLOCKS, num_idle=2)
    evicted_keys(policy, 1)
    blocks[7].ref_cnt = 0

    for _ in range(1_000):
        policy.on_idle([key_of(7)])

    assert len(policy.parked._listed) <= 2 * MIN_BUSY_BLOCKS
    assert evicted_keys(policy, 2) == [key_of(7), key_of(MIN_BUSY_BLOCKS + 1)]


@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
def test_the_manager_tells_whatever_way_a_block_becomes_idle(cache_policy: str) -> None:
    num_busy = 2 * MIN_BUSY_BLOCKS
    manager = CPUOffloadingManager(num_busy + 4, cache_policy)
    manager.prepare_store(keys(0, num_busy + 4), CONTEXT)
    manager.complete_store(keys(10, num_busy + 4), CONTEXT)
    manager.prepare_load(keys(10, num_busy), CONTEXT)
    policy = manager.table.policy
    assert isinstance(policy, LRUCachePolicy | ARCCachePolicy)
    parked = policy.parked if isinstance(policy, LRUCachePolicy) else policy.parked[0]

    stored = manager.prepare_store([key_of(1_000)], CONTEXT)
    assert stored is not None
    assert (stored.evicted_keys, len(parked)) == ([key_of(num_busy)], num_busy)
    manager.complete_load([key_of(50)], CONTEXT)
    manager.complete_store([key_of(5)], CONTEXT)
    manager.complete_store([key_of(6)], CONTEXT, success=False)
    manager.check()

    stored = manager.prepare_store(keys(1_001, 1_005), CONTEXT)
    assert stored is not None
    assert stored.evicted_keys == [key_of(5), key_of(50), key_of(num_busy + 1)]
