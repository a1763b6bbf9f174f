"""Hazard: the policy contract, LRU without requests, following its shadow, refusing, golden hit counts."""

import random
from typing import ClassVar

import pytest

from kvtier.base import OffloadKey, make_offload_key
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.hazard import HazardCachePolicy
from kvtier.cpu.policies.hazard.shadow import GHOSTS_PER_BLOCK, HazardShadow
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.errors import InvariantError
from kvtier.sim.host_replay import HostCache, replay_host
from kvtier.sim.trace import Trace, TraceRequest, make_trace
from kvtier.testing.policy_suite import PolicySuite, evicted_keys, insert_ready, key_of

KEYS = [key_of(number) for number in range(12)]


class TestHazard(PolicySuite):
    """The policy contract; told of no request, it hits as often as LRU."""

    golden_hits: ClassVar[dict[int, int]] = {32: 2880, 128: 3879, 512: 5667}

    def make_policy(self, cache_capacity: int) -> HazardCachePolicy:
        return HazardCachePolicy(cache_capacity)


def arrived(number: float, *numbers: int, req_id: str = "r") -> ArrivedRequest:
    return ArrivedRequest(req_id, ([key_of(each) for each in numbers],), number)


def chats_and_scans(num_requests: int = 3_000) -> Trace:
    """Return chats whose next turn comes after 40 to 60 requests, between prompts that never come again."""
    rng = random.Random(5)
    due: dict[int, tuple[int, ...]] = {}
    requests = []
    for number in range(num_requests):
        if number in due:
            prompt = (*due.pop(number), *(1_000_000 + 10 * number + extra for extra in range(2)))
        else:
            prompt = tuple(1_000_000 + 10 * number + extra for extra in range(6))
        if len(prompt) > 6 or rng.random() < 0.3:
            free = (40 + rng.randrange(20) + number for _ in range(50))
            due[next(turn for turn in free if turn not in due)] = prompt[:20]
        requests.append(TraceRequest(float(number), 512 * len(prompt), 1, prompt))
    return make_trace(requests, 512)


def turned(num_requests: int = 4_000) -> Trace:
    """Return prompts that come again after 300 requests, and from the middle on after 15 and never later."""
    due: dict[int, tuple[int, ...]] = {}
    requests = []
    for number in range(num_requests):
        if number == num_requests // 2:
            due.clear()
        prompt = due.pop(number, None)
        if prompt is None:
            prompt = tuple(range(10 * number, 10 * number + 8))
            turn = number + (300 if number < num_requests // 2 else 15)
            while turn in due:
                turn += 1
            due[turn] = prompt
        requests.append(TraceRequest(float(number), 512 * 8, 1, prompt))
    return make_trace(requests, 512)


def num_hits(trace: Trace, policy: str, num_blocks: int) -> int:
    return replay_host(trace, HostCache(num_blocks, policy)).num_hits


def learned_policy(num_blocks: int = 200) -> HazardCachePolicy:
    """Return a policy that has ceased to be LRU."""
    policy = HazardCachePolicy(num_blocks)
    for request in chats_and_scans(1_500).requests:
        policy.note_request(arrived(request.arrival_s, *request.hash_ids))
    assert not policy.follows_lru
    return policy


@pytest.mark.slow
def test_what_it_hits_on_a_synthetic_stream_with_a_request_counter_as_its_clock() -> None:
    trace = chats_and_scans()

    found = {
        num_blocks: (num_hits(trace, "lru", num_blocks), num_hits(trace, "hazard", num_blocks))
        for num_blocks in (100, 200, 400)
    }

    assert found == {100: (0, 5102), 200: (0, 10223), 400: (424, 20447)}


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [120, 160, 240])
def test_where_the_past_misleads_the_guard_keeps_it_close_to_lru(num_blocks: int) -> None:
    trace = turned()
    shadow = HazardShadow(num_blocks)

    num_lru_hits = num_hits(trace, "lru", num_blocks)
    num_unguarded = sum(
        shadow.serve(list(map(key_of, request.hash_ids)), request.arrival_s)[0] for request in trace.requests
    )

    assert num_unguarded < num_lru_hits - 0.009 * trace.num_accesses
    assert num_hits(trace, "hazard", num_blocks) >= num_lru_hits - 0.005 * trace.num_accesses


def test_a_policy_begins_as_lru_and_refuses_nothing() -> None:
    policy = HazardCachePolicy(4)

    policy.note_request(arrived(0.0, 1, 2, 3, 4, 5, 6))

    assert policy.follows_lru
    assert list(policy.admit([key_of(5), key_of(6)], "r")) == [key_of(5), key_of(6)]


def test_a_request_that_it_was_not_told_of_is_stored() -> None:
    policy = learned_policy()

    assert list(policy.admit(KEYS, "stranger")) == KEYS


def test_what_the_shadow_refuses_is_not_stored_and_of_a_prefix_nothing_behind_it() -> None:
    policy = learned_policy()
    refused = 0
    for number in range(100):
        numbers = tuple(9_000_000 + 10 * number + extra for extra in range(6))
        policy.note_request(arrived(1_500.0 + number, *numbers))
        keys = [key_of(each) for each in numbers]
        answer = policy.admit(keys, "r")
        admitted = list(answer)
        assert (answer is keys) == (admitted == keys)
        assert admitted == keys[: len(admitted)]
        refused += len(keys) - len(admitted)

    assert refused > 0


def test_what_the_shadow_has_released_leaves_before_the_oldest() -> None:
    policy = learned_policy()
    nodes = policy._shadow.tree.nodes
    wanted = [key for key, node in nodes.items() if node.is_held][:3]
    unwanted = [key for key, node in nodes.items() if not node.is_held][:3]
    insert_ready(policy, [*wanted, *unwanted])

    assert policy.next_victims(6) == [*unwanted, *wanted]
    assert evicted_keys(policy, 4) == [*unwanted, wanted[0]]
    policy.check({key: block for key in wanted[1:] if (block := policy.get(key)) is not None})


def test_busy_and_protected_blocks_stay_also_when_the_shadow_has_released_them() -> None:
    policy = learned_policy()
    nodes = policy._shadow.tree.nodes
    unwanted = [key for key, node in nodes.items() if not node.is_held][:3]
    blocks = insert_ready(policy, unwanted)
    blocks[0].ref_cnt = 1

    assert policy.evict(2, {unwanted[1]}) is None
    assert evicted_keys(policy, 1, {unwanted[1]}) == [unwanted[2]]


def test_an_answer_continues_its_request_and_is_found_by_the_next_turn() -> None:
    policy = HazardCachePolicy(20)
    policy.note_request(arrived(0.0, 1, 2))

    policy.admit([key_of(3), key_of(4)], "r")
    policy.note_request(arrived(9.0, 1, 2, 3, 4, 5, req_id="next"))

    nodes = policy._shadow.tree.nodes
    parent = nodes[key_of(3)].parent
    assert parent is not None
    assert parent.key == key_of(2)
    assert nodes[key_of(5)].cohort.access.turn == 1
    assert policy._selector.num_hazard_hits == policy._selector.num_lru_hits == 4


def test_an_answer_that_another_request_has_had_before_is_passed_over() -> None:
    policy = HazardCachePolicy(20)
    policy.note_request(arrived(0.0, 1, 2, 3))
    policy.note_request(arrived(1.0, 1, 2, req_id="again"))

    policy.admit([key_of(3)], "again")
    policy.admit([key_of(4)], "again")

    parent = policy._shadow.tree.nodes[key_of(4)].parent
    assert parent is not None
    assert parent.key == key_of(3)


def test_a_prompt_that_goes_on_in_two_ways_can_leave_by_both() -> None:
    policy = HazardCachePolicy(6)
    policy.note_request(arrived(0.0, 1, 2))
    policy.note_request(arrived(1.0, 1, 2, 5, 6, req_id="other"))

    policy.admit([key_of(3), key_of(4)], "r")
    policy._shadow.tree.check()
    policy.note_request(arrived(2.0, 7, 8, 9, 10, req_id="new"))

    held = {key for key, node in policy._shadow.tree.nodes.items() if node.is_held}
    assert held == set(map(key_of, (1, 2, 7, 8, 9, 10)))


def test_the_answer_to_a_prompt_of_less_than_a_block_is_stored() -> None:
    policy = learned_policy()
    policy.note_request(ArrivedRequest("r", ([],), 2_000.0))

    assert list(policy.admit(KEYS[:2], "r")) == KEYS[:2]


def test_each_group_has_its_own_chain() -> None:
    policy = HazardCachePolicy(20)
    chains = tuple(
        [make_offload_key(bytes([number]) * 8, group) for number in range(3)] for group in range(2)
    )

    policy.note_request(ArrivedRequest("r", chains, 0.0))
    policy.admit([make_offload_key(bytes([9]) * 8, group) for group in range(2)], "r")

    nodes = policy._shadow.tree.nodes
    for group in range(2):
        parent = nodes[make_offload_key(bytes([9]) * 8, group)].parent
        assert parent is not None
        assert parent.key == chains[group][-1]


def test_what_a_running_request_needs_is_forgotten_at_its_end() -> None:
    policy = HazardCachePolicy(20)
    policy.note_request(arrived(0.0, 1, 2))
    policy.on_finished("r")
    policy.on_finished("r")

    assert list(policy.admit([key_of(3)], "r")) == [key_of(3)]
    assert key_of(3) not in policy._shadow.tree.nodes


def test_keys_that_are_no_chain_end_it_and_break_nothing() -> None:
    policy = HazardCachePolicy(4)
    held: dict[OffloadKey, BlockStatus] = {}
    rng = random.Random(1)
    for number in range(500):
        numbers = [rng.randrange(10) for _ in range(rng.randrange(6))]
        policy.note_request(arrived(float(number), *numbers))
        policy.admit([key_of(rng.randrange(12)) for _ in range(2)], "r")
        policy.check(held)


def test_ghosts_are_at_most_four_for_each_block_and_nothing_else_grows() -> None:
    policy = HazardCachePolicy(50)
    for number in range(4_000):
        policy.note_request(arrived(0.1 * number, *range(10 * number, 10 * number + 8)))
        policy.on_finished("r")
        shadow = policy._shadow
        assert shadow.tree.num_ghosts <= GHOSTS_PER_BLOCK * 50
        assert len(shadow.tree.nodes) <= (1 + GHOSTS_PER_BLOCK) * 50
    assert len(shadow._cohorts) < 2 * 1024 + 500
    assert len(shadow._queue) < 500
    assert len(policy._lru) <= 50


def test_check_finds_a_surplus_block_that_is_not_held() -> None:
    policy = learned_policy()
    policy._surplus[key_of(77)] = None

    with pytest.raises(InvariantError, match="is surplus, but not held"):
        policy.check({})


def test_evicting_none_takes_no_block_that_is_to_leave() -> None:
    policy = learned_policy()
    ghost = next(key for key, node in policy._shadow.tree.nodes.items() if not node.is_held)
    insert_ready(policy, [ghost])

    assert policy.evict(0, frozenset()) == []
    assert evicted_keys(policy, 1) == [ghost]
