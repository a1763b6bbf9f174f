"""The primary tier's manager: the contract on both policies, and what is its own."""

import tracemalloc

import pytest
from tests.cpu.policies.learner import NOTING_LEARNER, NotingLearner

from kvtier.base import OffloadingEvent, ReqContext
from kvtier.config import DEFAULT_MAX_TRACKER_SIZE
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.errors import ConfigError, InvariantError, UnknownNameError
from kvtier.testing.clock import ManualClock
from kvtier.testing.manager_suite import REQUEST, ManagerSuite, keys_of, prepared, slots_of, store
from kvtier.testing.policy_suite import key_of


class TestHazardManager(ManagerSuite):
    """The manager's contract, with hazard."""

    def make_manager(self, num_blocks: int, *, enable_events: bool = False) -> CPUOffloadingManager:
        return CPUOffloadingManager(num_blocks, "hazard", enable_events)


class TestCPUOffloadingManager(ManagerSuite):
    """The manager's contract, with LRU."""

    def make_manager(self, num_blocks: int, *, enable_events: bool = False) -> CPUOffloadingManager:
        return CPUOffloadingManager(num_blocks, enable_events=enable_events)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_tier_without_a_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match="at least one block") as caught:
        CPUOffloadingManager(num_blocks)
    assert (caught.value.setting, caught.value.value) == ("num_blocks", num_blocks)


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'arc'"):
        CPUOffloadingManager(4, cache_policy="arcs")


def test_specs_are_of_the_primary_tiers_medium() -> None:
    manager = CPUOffloadingManager(4)
    assert isinstance(prepared(manager, keys_of(1)).store_spec, CPULoadStoreSpec)
    assert isinstance(prepared(manager, keys_of(1)).store_spec, CPULoadStoreSpec)


@pytest.mark.parametrize("policy", CACHE_POLICIES.names())
def test_a_held_key_of_the_call_stays_with_every_policy(policy: str) -> None:
    manager = CPUOffloadingManager(4, cache_policy=policy)
    store(manager, keys_of(1, 2))
    manager.touch(keys_of(1), REQUEST)
    output = store(manager, keys_of(2, 3, 4, 5))
    assert output.evicted_keys == keys_of(1)
    assert slots_of(output.store_spec) == [2, 3, 0]
    assert manager.lookup(key_of(2), REQUEST) is True
    manager.check()


def test_arc_evicts_from_the_front_of_its_lists() -> None:
    manager = CPUOffloadingManager(4, cache_policy="arc")
    store(manager, keys_of(1, 2, 3, 4))
    manager.touch(keys_of(1, 2), REQUEST)
    assert store(manager, keys_of(5)).evicted_keys == keys_of(3)
    manager.check()


def test_free_and_evictable_follow_every_transition() -> None:
    manager = CPUOffloadingManager(4)
    found = [(manager.num_free, manager.num_evictable)]
    prepared(manager, keys_of(1, 2, 3))
    found.append((manager.num_free, manager.num_evictable))
    manager.complete_store(keys_of(1, 2), REQUEST)
    found.append((manager.num_free, manager.num_evictable))
    manager.complete_store(keys_of(3), REQUEST, success=False)
    manager.prepare_load(keys_of(1), REQUEST)
    found.append((manager.num_free, manager.num_evictable))
    manager.complete_load(keys_of(1), REQUEST)
    found.append((manager.num_free, manager.num_evictable))
    assert found == [(4, 0), (1, 0), (1, 2), (2, 1), (2, 2)]


def test_only_a_ready_block_is_pinned_and_only_a_pinned_one_unpinned() -> None:
    manager = CPUOffloadingManager(2)
    prepared(manager, keys_of(1, 2))
    manager.complete_store(keys_of(1), REQUEST)
    assert [manager.table.pin(key) for key in keys_of(1, 2, 3)] == [True, False, False]
    assert manager.num_evictable == 0
    manager.table.unpin_each(keys_of(2, 3))
    assert manager.num_evictable == 0
    manager.table.unpin_each(keys_of(1, 1, 2, 3))
    assert manager.num_evictable == 1
    manager.check()


@pytest.mark.parametrize("policy", CACHE_POLICIES.names())
def test_a_reservation_spares_protected_keys_or_is_refused(policy: str) -> None:
    manager = CPUOffloadingManager(3, cache_policy=policy)
    store(manager, keys_of(1, 2, 3))
    output = manager.reserve(keys_of(4), protected=set(keys_of(1, 3, 9)))
    assert output is not None
    assert output.evicted_keys == keys_of(2)
    manager.complete_store(keys_of(4), REQUEST)
    assert manager.reserve(keys_of(5, 6), protected=set(keys_of(1, 3))) is None
    assert manager.reserve(keys_of(3, 5), protected=set(keys_of(1, 4))) is None
    assert [manager.lookup(key, REQUEST) for key in keys_of(1, 3, 4)] == [True] * 3
    manager.check()


def test_a_policy_that_fails_leaves_no_pin() -> None:
    manager = CPUOffloadingManager(2)
    store(manager, keys_of(1, 2))

    def explode(n: int, protected: object) -> None:
        raise RuntimeError("policy")

    manager.table.policy.evict = explode  # type: ignore[method-assign] # a policy with a bug
    with pytest.raises(RuntimeError, match="policy"):
        manager.prepare_store(keys_of(1, 3), REQUEST)
    assert manager.num_evictable == 2
    manager.check()


def test_the_filter_admits_a_key_at_its_second_access() -> None:
    manager = CPUOffloadingManager(4, store_threshold=2, max_tracker_size=3)
    for key in keys_of(1, 2):
        manager.lookup(key, REQUEST)
    assert prepared(manager, keys_of(1, 2)).keys_to_store == []
    manager.lookup(key_of(1), REQUEST)
    assert prepared(manager, keys_of(1, 2)).keys_to_store == keys_of(1)
    assert manager.counts == dict(zip(keys_of(2, 1), [1, 2], strict=True))


def test_the_filter_counts_a_waiting_request_once() -> None:
    manager = CPUOffloadingManager(4, store_threshold=2)
    other = ReqContext("other")
    for _ in range(5):
        manager.lookup(key_of(1), REQUEST)
    assert prepared(manager, keys_of(1)).keys_to_store == []
    manager.lookup(key_of(1), other)
    assert prepared(manager, keys_of(1)).keys_to_store == keys_of(1)


def test_a_finished_request_counts_anew() -> None:
    manager = CPUOffloadingManager(4, store_threshold=2)
    for _ in range(2):
        manager.lookup(key_of(1), REQUEST)
        manager.request_finished(REQUEST)
    assert manager.counts == {key_of(1): 2}


def test_a_key_that_the_filter_drops_is_still_not_evicted_by_its_call() -> None:
    manager = CPUOffloadingManager(2, store_threshold=2)
    for request in (REQUEST, ReqContext("other")):
        for key in keys_of(1, 2, 3):
            manager.lookup(key, request)
    store(manager, keys_of(1, 2))
    assert manager.counts is not None
    del manager.counts[key_of(1)]
    assert prepared(manager, keys_of(1, 3)).evicted_keys == keys_of(2)


def test_a_refused_store_ends_no_observation() -> None:
    manager = CPUOffloadingManager(1, store_threshold=2)
    for request in (REQUEST, ReqContext("other")):
        for key in keys_of(1, 2):
            manager.lookup(key, request)
    prepared(manager, keys_of(1))
    assert manager.prepare_store(keys_of(2), REQUEST) is None
    manager.lookup(key_of(2), REQUEST)
    assert manager.counts is not None
    assert manager.counts[key_of(2)] == 2


def test_counts_are_none_without_a_filter_and_bounded_with_one() -> None:
    assert CPUOffloadingManager(1).counts is None
    assert CPUOffloadingManager(1, store_threshold=0).counts is None
    manager = CPUOffloadingManager(1, store_threshold=2)
    for number in range(DEFAULT_MAX_TRACKER_SIZE + 10):
        manager.lookup(key_of(number), REQUEST)
    assert len(manager.counts or ()) == DEFAULT_MAX_TRACKER_SIZE


def test_a_reset_announces_what_is_gone_and_forgets_accesses() -> None:
    manager = CPUOffloadingManager(4, enable_events=True, store_threshold=2)
    for request in (REQUEST, ReqContext("other")):
        for key in keys_of(1, 2):
            manager.lookup(key, request)
    store(manager, keys_of(1))
    prepared(manager, keys_of(2))
    manager.take_events()
    manager.reset()
    assert manager.take_events() == [OffloadingEvent(keys_of(1), "CPU", removed=True)]
    assert manager.counts == {}
    manager.check()


def test_a_reset_forgets_ghosts_and_what_arc_learned() -> None:
    manager = CPUOffloadingManager(2, cache_policy="arc")
    store(manager, keys_of(1, 2))
    store(manager, keys_of(3))
    manager.touch(keys_of(1), REQUEST)
    manager.reset()
    store(manager, keys_of(1, 2))
    assert store(manager, keys_of(3)).evicted_keys == keys_of(1)


def test_an_orphan_read_twice_waits_for_both_reports() -> None:
    manager = CPUOffloadingManager(1)
    store(manager, keys_of(1))
    for _ in range(2):
        manager.prepare_load(keys_of(1), REQUEST)
    manager.reset()
    for _ in range(2):
        assert manager.prepare_store(keys_of(2), REQUEST) is None
        manager.complete_load(keys_of(1), REQUEST)
        manager.check()
    assert store(manager, keys_of(2)).keys_to_store == keys_of(2)


def test_orphans_settled_by_slot_in_any_order_are_freed() -> None:
    manager = CPUOffloadingManager(3)
    prepared(manager, keys_of(1, 2, 3))
    manager.reset()
    manager.table.orphans.settle_slots([2, 0], is_write=True)
    manager.table.orphans.settle_slots([2, 7], is_write=True)
    manager.table.orphans.settle_slots([1], is_write=False)
    manager.check()
    assert slots_of(prepared(manager, keys_of(4, 5)).store_spec) == [0, 2]
    assert manager.prepare_store(keys_of(6), REQUEST) is None


def test_a_claimed_slot_is_not_freed_by_a_newer_load_of_its_key() -> None:
    manager = CPUOffloadingManager(2)
    store(manager, keys_of(1))
    manager.prepare_load(keys_of(1), REQUEST)
    manager.reset()
    manager.table.orphans.claim([0], is_write=False)
    store(manager, keys_of(1))
    manager.prepare_load(keys_of(1), REQUEST)
    manager.complete_load(keys_of(1), REQUEST)
    assert (manager.num_evictable, manager.num_free) == (1, 0)
    manager.table.orphans.settle_slots([0], is_write=False)
    assert (manager.num_evictable, manager.num_free) == (1, 1)
    manager.check()


def test_stats_add_up() -> None:
    manager = CPUOffloadingManager(3, store_threshold=2)
    for request in (REQUEST, ReqContext("other")):
        for key in keys_of(1, 2, 3, 4):
            manager.lookup(key, request)
    store(manager, keys_of(1, 2))
    prepared(manager, keys_of(3))
    manager.prepare_load(keys_of(1), REQUEST)
    store(manager, keys_of(4))
    manager.prepare_store(keys_of(2), REQUEST)
    manager.reset()
    assert manager.stats() == {
        "primary.capacity_blocks": 3.0,
        "primary.held_blocks": 0.0,
        "primary.free_blocks": 0.0,
        "primary.evictable_blocks": 0.0,
        "primary.in_flight_blocks": 0.0,
        "primary.orphaned_blocks": 3.0,
        "primary.leased_blocks": 0.0,
        "primary.refused_pins": 0.0,
        "primary.tracked_keys": 0.0,
        "primary.loaded": 1.0,
        "primary.stored": 3.0,
        "primary.failed": 0.0,
        "primary.evicted": 2.0,
        "primary.refused": 0.0,
        "primary.event_merges": 0.0,
        "primary.pinned_ratio": 1.0,
        "primary.read_pinned_ratio": 1.0,
        "primary.write_pinned_ratio": 0.0,
    }


def test_check_finds_a_leaked_slot_a_shared_slot_and_a_wrong_counter() -> None:
    leaked = CPUOffloadingManager(2)
    leaked.table.slots.take(keys_of(1))
    with pytest.raises(InvariantError, match="expected 1 from 0"):
        leaked.check()

    shared = CPUOffloadingManager(2)
    store(shared, keys_of(1))
    shared.table.slots.give_back([0])
    with pytest.raises(InvariantError, match="slots held, freed, orphaned"):
        shared.check()

    miscounted = CPUOffloadingManager(2)
    store(miscounted, keys_of(1))
    miscounted.table.num_evictable = 2
    with pytest.raises(InvariantError, match="counted were"):
        miscounted.check()


def test_a_held_block_costs_at_most_250_bytes_beyond_its_key() -> None:
    num_blocks = 16_384
    batches = [keys_of(*range(start, start + 64)) for start in range(0, 3 * num_blocks, 64)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    manager = CPUOffloadingManager(num_blocks)
    for keys in batches:
        store(manager, keys)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / num_blocks <= 250


def make_learning_manager(store_threshold: int = 1) -> tuple[CPUOffloadingManager, NotingLearner]:
    clock = ManualClock(7.0)
    manager = CPUOffloadingManager(4, NOTING_LEARNER, store_threshold=store_threshold, clock=clock)
    return manager, NotingLearner.made[-1]


def test_a_policy_that_learns_is_told_of_each_request_with_time_and_hints() -> None:
    manager, learner = make_learning_manager()
    context = ReqContext("r", {"max_load_tokens": 9})

    manager.note_request([keys_of(1, 2), keys_of(3)], context)
    manager.request_finished(context)

    (told,) = learner.requests
    assert (told.req_id, told.chains) == ("r", (keys_of(1, 2), keys_of(3)))
    assert (told.arrival_s, told.params) == (7.0, {"max_load_tokens": 9})
    assert learner.finished == ["r"]


def test_a_policy_that_does_not_learn_is_told_nothing() -> None:
    CPUOffloadingManager(4).note_request([keys_of(1)], REQUEST)


def test_what_the_policy_refuses_is_not_stored_and_its_held_neighbours_stay() -> None:
    manager, learner = make_learning_manager()
    store(manager, keys_of(1, 2, 3, 4))
    learner.refused = {key_of(5)}

    output = store(manager, keys_of(1, 6, 5))

    assert output.keys_to_store == keys_of(6)
    assert output.evicted_keys == keys_of(2)
    manager.check()


def test_a_call_of_which_the_policy_refuses_everything_has_nothing_to_store() -> None:
    manager, learner = make_learning_manager()
    learner.refused = {key_of(1)}

    assert store(manager, keys_of(1)).keys_to_store == []


def test_the_policy_is_offered_what_the_reuse_filter_lets_through() -> None:
    manager, learner = make_learning_manager(store_threshold=2)
    for req_id in ("a", "b"):
        manager.lookup(key_of(1), ReqContext(req_id))
    manager.lookup(key_of(2), ReqContext("b"))

    store(manager, keys_of(1, 2))

    assert learner.offered == [(REQUEST.req_id, keys_of(1))]


def test_a_request_waits_for_a_store_that_never_ends_up_to_its_deadline() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(4, clock=clock, lookup_deadline_s=5.0)
    first, second = ReqContext("first"), ReqContext("second")
    store(manager, keys_of(1))
    prepared(manager, keys_of(2))
    answers = []
    for _ in range(4):
        answers.append([manager.lookup(key, first) for key in keys_of(1, 2)])
        clock.advance(2.0)
    assert answers == [[True, None]] * 3 + [[True, False]]
    assert manager.lookup(key_of(2), second) is None, "each request has a deadline of its own"
    manager.complete_store(keys_of(2), REQUEST)
    assert [manager.lookup(key_of(2), one) for one in (first, second)] == [True, True]
    manager.check()


def test_a_request_that_ends_or_loads_waits_anew_and_a_reset_keeps_its_deadline() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(4, clock=clock, lookup_deadline_s=5.0)
    store(manager, keys_of(1))
    prepared(manager, keys_of(2))
    request = ReqContext("request")
    for forget in (
        lambda: manager.request_finished(request),
        lambda: manager.prepare_load(keys_of(1), request),
        lambda: None,
    ):
        assert manager.lookup(key_of(2), request) is None
        clock.advance(3.0)
        forget()
    manager.reset()
    prepared(manager, keys_of(2))
    assert manager.lookup(key_of(2), request) is None
    clock.advance(2.0)
    assert manager.lookup(key_of(2), request) is False


def test_a_block_beyond_its_time_is_no_reason_to_wait_and_its_next_store_has_a_deadline() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(4, clock=clock, ttl_s=3.0, lookup_deadline_s=5.0)
    store(manager, keys_of(1))
    clock.advance(4.0)
    manager.end_step()
    assert manager.lookup(key_of(1), REQUEST) is False
    prepared(manager, keys_of(1))
    assert manager.lookup(key_of(1), REQUEST) is None
    clock.advance(5.0)
    assert manager.lookup(key_of(1), REQUEST) is False


def test_a_request_whose_block_arrived_while_its_engine_kept_it_may_wait_once_more() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(4, clock=clock, lookup_deadline_s=5.0)
    request = ReqContext("kept in the queue")
    prepared(manager, keys_of(1, 2))
    assert manager.lookup(key_of(1), request) is None
    manager.complete_store(keys_of(1), REQUEST)
    clock.advance(60.0)
    assert manager.lookup(key_of(2), request) is None
    clock.advance(5.0)
    assert manager.lookup(key_of(2), request) is False
