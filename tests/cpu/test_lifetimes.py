"""A block in host memory is a miss when its time to live is over, counted from its store."""

import pytest

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.misses import MissCause
from kvtier.testing.clock import ManualClock
from kvtier.testing.manager_suite import REQUEST, keys_of, prepared, store
from kvtier.testing.policy_suite import key_of


def make(clock: ManualClock, num_blocks: int = 8, policy: str = "lru") -> CPUOffloadingManager:
    return CPUOffloadingManager(num_blocks, policy, enable_events=True, clock=clock, ttl_s=10.0)


def arrive(manager: CPUOffloadingManager, *keys: OffloadKey) -> None:
    manager.note_request([keys], ReqContext("another"))


@pytest.mark.parametrize("policy", CACHE_POLICIES.names())
def test_a_block_lives_as_long_as_it_may_however_often_it_is_used(policy: str) -> None:
    clock = ManualClock()
    manager = make(clock, policy=policy)
    keys = keys_of(1, 2)
    store(manager, keys)
    for _ in range(9):
        clock.advance(1.0)
        manager.touch(keys, REQUEST)
        arrive(manager, *keys)
        assert manager.lookup(keys[0], REQUEST)
    clock.advance(1.0)
    arrive(manager, *keys)
    assert manager.lookup(keys[0], REQUEST) is False
    assert manager.num_free == 8
    miss = manager.explain(keys[0], REQUEST)
    assert miss is not None
    assert miss.cause is MissCause.EXPIRED
    assert [event.removed for event in manager.take_events()] == [False, True]
    assert manager.stats()["primary.expired"] == 2
    manager.check()


def test_a_block_that_is_stored_again_lives_from_then_on() -> None:
    clock = ManualClock()
    manager = make(clock, num_blocks=1)
    store(manager, keys_of(1))
    clock.advance(6.0)
    store(manager, keys_of(2))
    store(manager, keys_of(1))
    clock.advance(6.0)
    manager.end_step()
    assert manager.lookup(key_of(1), REQUEST)
    clock.advance(4.0)
    manager.end_step()
    assert manager.lookup(key_of(1), REQUEST) is False


def test_a_block_in_use_beyond_its_time_is_not_found_and_stays_until_its_load_has_ended() -> None:
    clock = ManualClock()
    manager = make(clock)
    store(manager, keys_of(1, 2))
    manager.prepare_load(keys_of(1), REQUEST)
    clock.advance(10.0)
    manager.end_step()
    assert [manager.table.held_among([key]) != () for key in keys_of(1, 2)] == [True, False]
    assert manager.lookup(key_of(1), REQUEST) is False
    miss = manager.explain(key_of(1), REQUEST)
    assert miss is not None
    assert miss.cause is MissCause.EXPIRED
    manager.complete_load(keys_of(1), REQUEST)
    manager.end_step()
    assert not manager.table.held_among(keys_of(1))
    manager.check()


def test_a_block_that_is_always_in_use_ends_all_the_same() -> None:
    clock = ManualClock()
    manager = make(clock)
    store(manager, keys_of(1))
    num_found = 0
    for _ in range(8):  # at the end of each step some request loads it
        clock.advance(2.0)
        is_found = manager.lookup(key_of(1), REQUEST)
        if is_found:
            manager.prepare_load(keys_of(1), REQUEST)
        manager.end_step()
        if is_found:
            manager.complete_load(keys_of(1), REQUEST)
            num_found += 1
    assert num_found == 4


def test_a_lease_keeps_no_block_beyond_its_time() -> None:
    clock = ManualClock()
    manager = make(clock, num_blocks=20)
    store(manager, keys_of(1))
    manager.pin(keys_of(1), 1000.0)
    clock.advance(10.0)
    manager.end_step()
    assert manager.lookup(key_of(1), REQUEST) is False
    assert manager.stats()["primary.leased_blocks"] == 0
    manager.check()


def test_a_block_whose_write_is_under_way_has_no_age_yet() -> None:
    clock = ManualClock()
    manager = make(clock)
    prepared(manager, keys_of(1))
    clock.advance(100.0)
    manager.end_step()
    assert manager.lookup(key_of(1), REQUEST) is None
    manager.complete_store(keys_of(1), REQUEST)
    manager.end_step()
    assert manager.lookup(key_of(1), REQUEST)
    manager.check()


def test_evicted_failed_and_reset_blocks_leave_no_time_behind() -> None:
    clock = ManualClock()
    manager = make(clock, num_blocks=2)
    store(manager, keys_of(1, 2))
    store(manager, keys_of(3))
    prepared(manager, keys_of(4))
    manager.complete_store(keys_of(4), REQUEST, success=False)
    manager.check()
    manager.reset()
    manager.check()
    assert manager.lifetimes is not None
    assert not manager.lifetimes.stored_s


def test_without_the_setting_nothing_is_remembered() -> None:
    manager = CPUOffloadingManager(2)
    store(manager, keys_of(1))
    assert not manager.lifetimes.stored_s
    assert manager.table.listeners == ()
