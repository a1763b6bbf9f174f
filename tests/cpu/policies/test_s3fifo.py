"""S3-FIFO: the policy contract, the queues and ghosts, golden hit counts."""

from typing import ClassVar

import pytest

from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.fifo import FIFOCachePolicy
from kvtier.cpu.policies.s3fifo import MAX_PASSED_BLOCKS, MAX_USES, S3FIFOCachePolicy
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import PolicySuite, evicted_keys, insert_ready, key_of, make_trace, replay

KEYS = [key_of(number) for number in range(12)]


class TestS3FIFO(PolicySuite):
    """The policy contract, on S3-FIFO."""

    golden_hits: ClassVar[dict[int, int]] = {32: 3920, 128: 5059, 512: 6980}
    orders_by_use: ClassVar[bool] = False

    def make_policy(self, cache_capacity: int) -> S3FIFOCachePolicy:
        return S3FIFOCachePolicy(cache_capacity)


def make_policy(num_small: int, num_main: int, capacity: int = 20) -> S3FIFOCachePolicy:
    """Return a policy with KEYS[:num_small] in small and the next ``num_main`` in main, next to leave first."""
    policy = S3FIFOCachePolicy(capacity)
    insert_ready(policy, KEYS[: num_small + num_main])
    for key in KEYS[num_small : num_small + num_main]:
        policy.main[key] = policy.small.pop(key)
    return policy


def use(policy: S3FIFOCachePolicy, number: int, times: int) -> None:
    for _ in range(times):
        policy.touch([KEYS[number]])


def test_small_gives_while_it_has_its_tenth() -> None:
    policy = make_policy(4, 3)
    assert evicted_keys(policy, 5) == [*KEYS[:3], *KEYS[4:6]]
    assert (list(policy.small), list(policy.main)) == ([KEYS[3]], [KEYS[6]])


@pytest.mark.parametrize(("num_uses", "is_promoted"), [(0, False), (1, False), (2, True), (5, True)])
def test_two_uses_in_small_earn_a_place_in_main(num_uses: int, is_promoted: bool) -> None:
    policy = make_policy(4, 0)
    use(policy, 0, num_uses)
    assert evicted_keys(policy, 1) == [KEYS[1] if is_promoted else KEYS[0]]
    assert (KEYS[0] in policy.main) == is_promoted
    assert KEYS[0] not in policy.uses


def test_what_leaves_small_is_remembered_and_comes_back_to_main() -> None:
    policy = make_policy(3, 1)
    assert evicted_keys(policy, 3) == [KEYS[0], KEYS[1], KEYS[3]]
    assert list(policy.ghosts) == [KEYS[0], KEYS[1]]
    insert_ready(policy, [KEYS[0], KEYS[3]])
    assert (list(policy.small), list(policy.main)) == ([KEYS[2], KEYS[3]], [KEYS[0]])
    assert list(policy.ghosts) == [KEYS[1]]


def test_a_round_of_main_costs_a_use() -> None:
    policy = make_policy(0, 3)
    use(policy, 0, 2)
    use(policy, 1, 1)
    assert evicted_keys(policy, 1) == [KEYS[2]]
    assert (list(policy.main), policy.uses) == ([KEYS[0], KEYS[1]], {KEYS[0]: 1})
    assert evicted_keys(policy, 2) == [KEYS[1], KEYS[0]]


def test_uses_are_counted_to_a_maximum_and_once_a_touch() -> None:
    policy = make_policy(2, 0)
    use(policy, 0, MAX_USES + 2)
    policy.touch([KEYS[1], KEYS[1]])
    assert policy.uses == {KEYS[0]: MAX_USES, KEYS[1]: 1}


def test_a_touch_while_something_of_it_is_in_flight_counts_nothing() -> None:
    policy = make_policy(2, 0)
    policy.insert_many(KEYS[2:4], [BlockStatus(2), BlockStatus(3)])
    policy.touch(KEYS[:4])
    assert (policy.uses, list(policy.small)) == ({}, [KEYS[0], KEYS[1], KEYS[3], KEYS[2]])


def test_busy_blocks_go_round_in_their_queue() -> None:
    policy = make_policy(4, 3)
    policy.blocks[KEYS[0]].ref_cnt = policy.blocks[KEYS[4]].ref_cnt = 1
    use(policy, 4, 1)
    assert evicted_keys(policy, 4, {KEYS[1]}) == [KEYS[2], KEYS[3], KEYS[5], KEYS[6]]
    assert (list(policy.small), list(policy.main)) == ([KEYS[0], KEYS[1]], [KEYS[4]])
    assert policy.uses == {}


@pytest.mark.parametrize("is_small_busy", [True, False])
def test_the_other_queue_gives_when_one_has_nothing_idle(is_small_busy: bool) -> None:
    policy = make_policy(4, 4)
    busy, idle = (policy.small, policy.main) if is_small_busy else (policy.main, policy.small)
    for block in busy.values():
        block.ref_cnt = 1
    expected = list(idle)
    assert evicted_keys(policy, 4) == expected
    assert policy.evict(1, frozenset()) is None


def test_patience_with_a_small_queue_in_flight_ends() -> None:
    keys = [key_of(number) for number in range(200)]
    policy = S3FIFOCachePolicy(200)
    blocks = insert_ready(policy, keys)
    policy.main[keys[199]] = policy.small.pop(keys[199])
    for block in blocks[: MAX_PASSED_BLOCKS + 1]:
        block.ref_cnt = 1
    assert evicted_keys(policy, 2) == [keys[199], keys[MAX_PASSED_BLOCKS + 1]]
    assert list(policy.small)[: -MAX_PASSED_BLOCKS - 1] == keys[MAX_PASSED_BLOCKS + 2 : 199]


def test_ghosts_are_as_many_as_main_has_room_for() -> None:
    policy = S3FIFOCachePolicy(10)
    for number in range(60):
        insert_ready(policy, [key_of(number)])
        if number >= 10:
            evicted_keys(policy, 1)
    assert list(policy.ghosts) == [key_of(number) for number in range(41, 50)]


def test_a_failed_store_of_a_ghost_leaves_no_trace() -> None:
    policy = make_policy(3, 0)
    evicted_keys(policy, 1)
    policy.insert(KEYS[0], BlockStatus(0))
    policy.remove(KEYS[0])
    assert not any(KEYS[0] in part for part in (policy.small, policy.main, policy.ghosts, policy.uses))


def test_an_eviction_that_fails_moves_nothing() -> None:
    policy = make_policy(3, 3)
    use(policy, 0, 2)
    use(policy, 3, 1)
    before = (list(policy.small), list(policy.main), dict(policy.uses), list(policy.ghosts))
    assert policy.evict(6, {KEYS[5]}) is None
    assert before == (list(policy.small), list(policy.main), dict(policy.uses), list(policy.ghosts))


def test_scans_cost_s3fifo_fewer_hits_than_fifo() -> None:
    trace = make_trace(seed=7)
    assert replay(S3FIFOCachePolicy(64), trace) > replay(FIFOCachePolicy(64), trace)


def test_check_finds_a_key_in_both_queues_wild_uses_and_a_held_ghost() -> None:
    policy = make_policy(2, 0)
    held = dict(policy.blocks)
    policy.main[KEYS[0]] = held[KEYS[0]]
    with pytest.raises(InvariantError, match="in both queues"):
        policy.check(held)
    policy.main.clear()
    policy.uses[KEYS[0]] = MAX_USES + 1
    with pytest.raises(InvariantError, match="exceeds the maximum"):
        policy.check(held)
    policy.uses.clear()
    policy.ghosts[KEYS[0]] = False
    with pytest.raises(InvariantError, match="held and a ghost"):
        policy.check(held)
    policy.ghosts = type(policy.ghosts)()
    for number in range(21):
        policy.ghosts[key_of(100 + number)] = False
    with pytest.raises(InvariantError, match="21 ghosts"):
        policy.check(held)
