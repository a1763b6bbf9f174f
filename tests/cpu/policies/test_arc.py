"""ARC: the policy contract, the four lists, the target, golden hit counts, what ghosts cost."""

import random
import tracemalloc
from collections import OrderedDict
from typing import ClassVar

import pytest

from kvtier.cpu.policies.arc import ARCCachePolicy, GhostList
from kvtier.cpu.policies.base import IN_FLIGHT, BlockStatus
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.errors import InvariantError
from kvtier.testing.policy_suite import PolicySuite, evicted_keys, insert_ready, key_of, make_trace, replay

KEYS = [key_of(number) for number in range(12)]


class TestARC(PolicySuite):
    """The policy contract, on ARC."""

    golden_hits: ClassVar[dict[int, int]] = {32: 3890, 128: 5427, 512: 7153}

    def make_policy(self, cache_capacity: int) -> ARCCachePolicy:
        return ARCCachePolicy(cache_capacity)


def make_policy(num_recent: int, num_frequent: int, capacity: int = 4) -> ARCCachePolicy:
    """Return a policy with KEYS[:num_recent] in t1 and the next ``num_frequent`` in t2, oldest first."""
    policy = ARCCachePolicy(capacity)
    insert_ready(policy, KEYS[: num_recent + num_frequent])
    policy.touch(KEYS[num_recent : num_recent + num_frequent][::-1])
    return policy


def test_a_second_use_moves_a_block_to_t2() -> None:
    policy = make_policy(2, 0)
    policy.touch([KEYS[0]])
    assert (list(policy.t1), list(policy.t2)) == ([KEYS[1]], [KEYS[0]])


def test_a_touch_in_flight_renews_without_promoting() -> None:
    policy = ARCCachePolicy(4)
    policy.insert_many(KEYS[:2], [BlockStatus(0), BlockStatus(1)])
    policy.touch([KEYS[0]])
    assert (list(policy.t1), list(policy.t2)) == ([KEYS[1], KEYS[0]], [])


def test_evicted_blocks_become_ghosts_of_their_list() -> None:
    policy = make_policy(2, 2)
    policy.target_t1_size = 1.0
    assert evicted_keys(policy, 2) == [KEYS[0], KEYS[2]]
    assert (list(policy.b1), list(policy.b2)) == ([KEYS[0]], [KEYS[2]])


@pytest.mark.parametrize(
    ("target", "expected"),
    [(0.0, [0, 1, 2]), (1.0, [0, 2, 3]), (1.5, [0, 2, 3]), (2.0, [2, 3, 0]), (4.0, [2, 3, 0])],
)
def test_a_batch_follows_the_target_as_t1_shrinks(target: float, expected: list[int]) -> None:
    policy = make_policy(2, 2)
    policy.target_t1_size = target
    assert evicted_keys(policy, 3) == [KEYS[number] for number in expected]


@pytest.mark.parametrize("target", [0.0, 4.0])
def test_the_other_list_gives_when_the_target_has_nothing_idle(target: float) -> None:
    policy = make_policy(2, 2)
    policy.target_t1_size = target
    pinned = policy.t1 if target == 0.0 else policy.t2
    for block in pinned.values():
        block.ref_cnt = 1
    assert set(evicted_keys(policy, 2)).isdisjoint(pinned)


def test_a_ghost_of_t1_raises_the_target_once_a_miss() -> None:
    policy = make_policy(4, 0)
    evicted_keys(policy, 1)
    policy.touch([KEYS[0]])
    policy.touch([KEYS[0]])
    policy.insert(KEYS[0], BlockStatus(0))
    assert policy.target_t1_size == 1.0
    assert KEYS[0] in policy.t2
    assert KEYS[0] not in policy.b1


def test_a_ghost_of_t2_lowers_the_target() -> None:
    policy = make_policy(0, 4)
    policy.target_t1_size = 2.0
    evicted_keys(policy, 1)
    policy.insert(KEYS[0], BlockStatus(0))
    assert policy.target_t1_size == 1.0


def test_the_step_is_the_ratio_of_the_ghost_lists() -> None:
    policy = make_policy(1, 3, capacity=8)
    evicted_keys(policy, 4)
    policy.touch([KEYS[0]])
    assert (len(policy.b1), len(policy.b2)) == (1, 3)
    assert policy.target_t1_size == 3.0


def test_the_target_stays_between_nothing_and_the_capacity() -> None:
    policy = make_policy(0, 4)
    evicted_keys(policy, 1)
    policy.touch([KEYS[0]])
    assert policy.target_t1_size == 0.0
    policy.clear()
    insert_ready(policy, KEYS[:4])
    policy.target_t1_size = 4.0
    evicted_keys(policy, 1, KEYS[1:4])
    policy.touch([KEYS[0]])
    assert policy.target_t1_size == 4.0


def test_ghosts_never_outnumber_the_capacity() -> None:
    policy = ARCCachePolicy(4)
    for key in make_trace(seed=6, length=500):
        if policy.get(key) is None:
            if len(policy.t1) + len(policy.t2) == 4:
                evicted_keys(policy, 1)
            insert_ready(policy, [key])
        policy.touch([key])
        assert len(policy.b1) + len(policy.b2) <= 4


def test_recent_blocks_and_ghosts_share_one_capacity() -> None:
    policy = make_policy(2, 2)
    policy.target_t1_size = 1.0
    for key in KEYS[4:8]:
        evicted_keys(policy, 1)
        insert_ready(policy, [key])
        assert len(policy.t1) + len(policy.b1) <= 4
    assert list(policy.b1) == [KEYS[4], KEYS[5]]


def test_the_last_that_left_a_cache_of_recent_blocks_alone_is_remembered() -> None:
    policy = make_policy(4, 0)
    for key in KEYS[4:8]:
        evicted_keys(policy, 1)
        insert_ready(policy, [key])
    assert list(policy.b1) == [KEYS[3]]
    policy.touch([KEYS[3]])
    assert policy.target_t1_size == 1.0


def test_a_failed_store_of_a_ghost_leaves_no_trace() -> None:
    policy = make_policy(4, 0)
    evicted_keys(policy, 1)
    policy.insert(KEYS[0], BlockStatus(0))
    policy.remove(KEYS[0])
    assert not any(KEYS[0] in part for part in (policy.t1, policy.t2, policy.b1, policy.b2))


def test_scans_cost_arc_fewer_hits_than_lru() -> None:
    trace = make_trace(seed=7)
    assert replay(ARCCachePolicy(64), trace) > replay(LRUCachePolicy(64), trace)


def test_check_finds_a_key_in_two_lists() -> None:
    policy = make_policy(1, 0)
    policy.b2[KEYS[0]] = False
    with pytest.raises(InvariantError, match="two of t1"):
        policy.check(dict(policy.t1))


def test_check_finds_too_many_ghosts_and_a_wild_target() -> None:
    policy = ARCCachePolicy(1)
    policy.b1[KEYS[0]] = policy.b1[KEYS[1]] = policy.b2[KEYS[2]] = False
    with pytest.raises(InvariantError, match="3 ghosts and 0 blocks"):
        policy.check({})
    policy.b1.clear()
    policy.b2.clear()
    policy.target_t1_size = 1.5
    with pytest.raises(InvariantError, match=r"target_t1_size=1\.5"):
        policy.check({})


def test_in_flight_blocks_never_leave() -> None:
    policy = make_policy(2, 2)
    for block in [*policy.t1.values(), *policy.t2.values()]:
        block.ref_cnt = IN_FLIGHT
    assert policy.evict(1, frozenset()) is None


def test_ghosts_answer_like_an_ordered_dictionary() -> None:
    draw = random.Random(5)
    ghosts, reference = GhostList(), OrderedDict[bytes, bool]()
    for _ in range(20_000):
        key = key_of(draw.randrange(600))
        choice = draw.random()
        if choice < 0.5:
            ghosts[key] = reference[key] = draw.random() < 0.5
        elif choice < 0.8 and key in reference:
            del ghosts[key], reference[key]
        elif reference:
            assert ghosts.pop_oldest() == reference.popitem(last=False)[0]
        assert len(ghosts) == len(reference)
    assert list(ghosts.items()) == list(reference.items())


def test_a_ghost_that_comes_back_is_the_newest() -> None:
    ghosts = GhostList()
    for number in (1, 2):
        ghosts[key_of(number)] = False
    del ghosts[key_of(1)]
    ghosts[key_of(1)] = False
    assert [ghosts.pop_oldest(), ghosts.pop_oldest()] == [key_of(2), key_of(1)]


def test_the_oldest_of_no_ghosts_is_an_error() -> None:
    ghosts = GhostList()
    ghosts[key_of(1)] = False
    del ghosts[key_of(1)]
    with pytest.raises(KeyError, match="empty"):
        ghosts.pop_oldest()


def test_clear_forgets_stale_ghosts_too() -> None:
    ghosts = GhostList()
    ghosts[key_of(1)] = False
    del ghosts[key_of(1)]
    ghosts.clear()
    ghosts[key_of(1)] = True
    assert ghosts.pop_oldest() == key_of(1)
    assert repr(ghosts) == "GhostList(0 keys, 0 stale)"


@pytest.mark.parametrize("length", [9_000, 10_000, 16_384, 17_500])
def test_a_ghost_costs_at_most_150_bytes_beyond_its_key(length: int) -> None:
    keys = [key_of(number) for number in range(4 * length)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    ghosts = GhostList()
    worst = 0
    for number, key in enumerate(keys):
        ghosts[key] = False
        if len(ghosts) > length:
            if number % 3:
                ghosts.pop_oldest()
            else:
                del ghosts[keys[number - length // 2]]
            if number % 509 == 0:
                worst = max(worst, tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    assert worst / length <= 150
