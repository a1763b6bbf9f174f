"""Pins with a lease: kept while it lasts, never more than requests and tenants may, no slot lost whatever happens."""

import random

import pytest

from kvtier.base import OffloadKey, ReqContext, make_offload_keys
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.errors import PinLimitError
from kvtier.tenants import parse_tenants, tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.testing.policy_suite import key_of

POLICIES = ("lru", "arc", "hazard")


def keys_of(first: int, num: int) -> list[OffloadKey]:
    return [key_of(number) for number in range(first, first + num)]


def serve(manager: CPUOffloadingManager, name: str, keys: list[OffloadKey], **hints: object) -> None:
    """Serve a request as the connector does, and store what it may."""
    context = ReqContext(name, dict(hints))
    manager.note_request([keys], context)
    for key in keys:
        manager.lookup(key, context)
    manager.touch(keys, context)
    output = manager.prepare_store(keys, context)
    manager.complete_store(output.keys_to_store if output else [], context)
    manager.request_finished(context)
    manager.check()


def held_of(manager: CPUOffloadingManager, keys: list[OffloadKey]) -> int:
    return sum(manager.is_ready(key) for key in keys)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_prompt_stays_until_its_lease_ends(policy: str) -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(100, policy, clock=clock)
    pinned = keys_of(0, 7)
    serve(manager, "pin", pinned, pin_s=600)
    for number in range(1, 60):
        clock.advance(9.9)
        serve(manager, f"r{number}", keys_of(1_000 * number, 10))
    assert held_of(manager, pinned) == 7
    assert manager.stats()["primary.leased_blocks"] == 7

    clock.advance(600)
    for number in range(100, 160):
        serve(manager, f"r{number}", keys_of(1_000 * number, 10))
    assert manager.stats()["primary.leased_blocks"] == 0
    assert manager.num_evictable == 100
    assert held_of(manager, pinned) == 0


def test_a_client_that_pins_everything_holds_three_quarters_of_a_tenth_and_others_are_served() -> None:
    manager = CPUOffloadingManager(100, clock=ManualClock())
    for number in range(50):
        serve(
            manager,
            f"r{number}",
            keys_of(1_000 * number, 10),
            pin_s=86_400,
            session=f"s{number}",
            tenant=str(number),
        )
    assert manager.stats()["primary.leased_blocks"] == 7
    assert manager.stats()["primary.refused_pins"] == 493
    other = keys_of(10**6, 90)
    serve(manager, "other", other)
    assert held_of(manager, other) == 90


def test_of_a_prompt_longer_than_the_share_the_head_is_pinned() -> None:
    manager = CPUOffloadingManager(100, clock=ManualClock())
    prompt = keys_of(0, 20)
    serve(manager, "long", prompt, pin_s=60)
    serve(manager, "other", keys_of(1_000, 93))
    assert [manager.is_ready(key) for key in prompt] == [True] * 7 + [False] * 13


def test_a_quarter_of_the_pins_is_the_operators_whatever_requests_pin() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(80, clock=clock)
    serve(manager, "greedy", keys_of(0, 40), pin_s=86_400)
    of_operator = keys_of(1_000, 2)
    manager.pin(of_operator, 600)
    serve(manager, "system prompt", of_operator)
    serve(manager, "greedy too", keys_of(2_000, 40), pin_s=86_400)
    for number in range(3, 20):
        serve(manager, "other", keys_of(1_000 * number, 40))
    assert held_of(manager, of_operator) == 2
    assert held_of(manager, keys_of(0, 40)) == 6
    with pytest.raises(PinLimitError, match="1 blocks cannot be pinned: 8 of at most 8"):
        manager.pin(keys_of(5_000, 1), 600)


def test_an_operator_may_use_what_requests_leave() -> None:
    manager = CPUOffloadingManager(80, clock=ManualClock())
    manager.pin(keys_of(0, 8), 600)
    serve(manager, "late", keys_of(1_000, 4), pin_s=600)
    assert manager.stats()["primary.leased_blocks"] == 8
    assert manager.stats()["primary.refused_pins"] == 4


def test_a_request_does_not_lengthen_an_operators_pin_beyond_what_requests_may_pin() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(80, clock=clock)
    of_operator = keys_of(0, 8)
    manager.pin(of_operator, 600)
    serve(manager, "greedy", of_operator, pin_s=86_400)
    clock.advance(601)
    manager.end_step()
    assert manager.stats()["primary.leased_blocks"] == 6
    assert manager.stats()["primary.refused_pins"] == 2
    manager.pin(keys_of(1_000, 2), 600)
    manager.check()


def test_what_a_request_pins_of_an_operators_counts_for_requests_until_their_lease_ends() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(80, clock=clock)
    manager.pin(keys_of(0, 4), 600)
    serve(manager, "short", keys_of(0, 4), pin_s=10)
    serve(manager, "second", keys_of(1_000, 4), pin_s=600)
    assert manager.stats()["primary.refused_pins"] == 2
    clock.advance(11)
    serve(manager, "third", keys_of(2_000, 4), pin_s=600)
    assert manager.stats()["primary.leased_blocks"] == 8
    assert manager.stats()["primary.refused_pins"] == 4
    manager.unpin(keys_of(0, 4))
    manager.check()
    serve(manager, "fourth", keys_of(3_000, 4), pin_s=600)
    assert manager.stats()["primary.leased_blocks"] == 6


QUOTA_BLOCKS = 4


def make_with_tenants() -> CPUOffloadingManager:
    """Return a manager of 200 slots, of which requests may pin 15; alice's quota has 4, others have none."""
    setting = {"alice": {"quota_bytes": f"{QUOTA_BLOCKS * 100}B"}, "*": {}}
    tenants = parse_tenants(setting, "", ("host",))
    return CPUOffloadingManager(200, clock=ManualClock(), tenants=tenants, block_bytes=100)


def keys_of_tenant(name: str, first: int, num: int) -> list[OffloadKey]:
    return make_offload_keys(
        [bytes([number]) * 32 for number in range(first, first + num)], 0, tenant_number(name)
    )


def test_a_tenant_pins_no_more_than_its_quota_with_any_number_of_requests() -> None:
    manager = make_with_tenants()
    for number in range(5):
        serve(manager, f"r{number}", keys_of_tenant("alice", 10 * number, 3), pin_s=86_400)
    assert manager.stats()["primary.leased_blocks"] == QUOTA_BLOCKS
    bobs = keys_of_tenant("bob", 100, 11)
    serve(manager, "bob", bobs, pin_s=86_400)
    assert manager.stats()["primary.leased_blocks"] == 15
    for number in range(10):
        serve(manager, "other", keys_of(1_000 * number, 100))
    assert held_of(manager, bobs) == 11
    assert (
        held_of(manager, [key for number in range(5) for key in keys_of_tenant("alice", 10 * number, 3)]) == 4
    )


def test_a_pin_that_ends_leaves_its_part_of_the_quota_to_the_tenants_next() -> None:
    manager = make_with_tenants()
    first, second = keys_of_tenant("alice", 0, 4), keys_of_tenant("alice", 50, 4)
    serve(manager, "first", first, pin_s=60)
    serve(manager, "again", first, pin_s=600)
    serve(manager, "second", second, pin_s=60)
    assert manager.stats()["primary.refused_pins"] == 4
    manager.unpin(first)
    serve(manager, "third", second, pin_s=60)
    assert manager.stats()["primary.refused_pins"] == 4
    assert manager.stats()["primary.leased_blocks"] == 4


def test_tenants_with_names_that_were_made_up_pin_no_more_together_and_leave_nothing_behind() -> None:
    manager = make_with_tenants()
    for number in range(40):
        serve(manager, f"r{number}", keys_of_tenant(f"made-up-{number}", 0, 2), pin_s=86_400)
    assert manager.stats()["primary.leased_blocks"] == 15
    manager.check()  # counts of tenants are of those with pins alone
    manager.unpin(None)
    manager.check()


def test_pins_that_are_declined_are_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    manager = CPUOffloadingManager(100, clock=ManualClock())
    for number in range(3):
        serve(manager, f"r{number}", keys_of(1_000 * number, 10), pin_s=60)
    [said] = [record.getMessage() for record in caplog.records if "pin_s" in record.getMessage()]
    assert "3 of the 10 blocks" in said
    assert "7 of 100 slots" in said
    assert manager.stats()["primary.refused_pins"] == 23


def test_a_lease_is_extended_and_not_shortened() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(100, clock=clock)
    prompt = keys_of(0, 5)
    serve(manager, "a", prompt, pin_s=100)
    serve(manager, "b", prompt, pin_s=300)
    serve(manager, "c", prompt, pin_s=1)
    clock.advance(250)
    serve(manager, "other", keys_of(1_000, 95))
    serve(manager, "more", keys_of(2_000, 95))
    assert held_of(manager, prompt) == 5
    clock.advance(60)
    serve(manager, "last", keys_of(3_000, 100))
    assert held_of(manager, prompt) == 0


@pytest.mark.slow
def test_a_pinned_prompt_is_stored_although_the_policy_would_refuse_it() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(200, "hazard", clock=clock)
    for number in range(2_000):
        clock.advance(1.0)
        serve(
            manager,
            f"r{number}",
            keys_of(10 * (number % 15), 6) if number % 2 else keys_of(10**5 + 100 * number, 12),
        )
    scan, pinned = keys_of(10**8, 12), keys_of(10**9, 12)
    serve(manager, "scan", scan)
    serve(manager, "pin", pinned, pin_s=60)
    assert held_of(manager, scan) < 12
    assert held_of(manager, pinned) == 12


def test_a_reset_ends_leases_and_loses_no_slot() -> None:
    clock = ManualClock()
    manager = CPUOffloadingManager(50, clock=clock)
    serve(manager, "a", keys_of(0, 5), pin_s=600)
    manager.reset()
    manager.check()
    assert manager.num_free == 50
    serve(manager, "b", keys_of(0, 50))
    assert manager.num_free == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_slot_is_lost_whatever_is_pinned_failed_and_reset(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    clock = ManualClock()
    manager = CPUOffloadingManager(40, policy, clock=clock)
    for number in range(300):
        clock.advance(rng.random() * 20)
        context = ReqContext(str(number), {"pin_s": rng.choice([0, 5, 100, 10**9, "x"]), "session": "a"})
        keys = keys_of(10 * rng.randrange(12), rng.randrange(1, 9))
        manager.note_request([keys], context)
        ready = [key for key in keys if manager.lookup(key, context)]
        manager.prepare_load(ready, context)
        output = manager.prepare_store(keys, context)
        manager.check()
        if rng.random() < 0.05:
            manager.reset()
            manager.check()
        manager.complete_store(output.keys_to_store if output else [], context, success=rng.random() < 0.8)
        manager.complete_load(ready, context)
        manager.request_finished(context)
        manager.check()
        assert manager.stats()["primary.leased_blocks"] <= 3
    clock.advance(1e6)
    serve(manager, "end", keys_of(10**6, 40))
    assert manager.stats()["primary.leased_blocks"] == 0


def test_every_policy_that_comes_with_kvtier_is_tried() -> None:
    ours = {
        name
        for name in CACHE_POLICIES.names()
        if CACHE_POLICIES.resolve(name).__module__.startswith("kvtier.")
    }
    assert ours == set(POLICIES)
