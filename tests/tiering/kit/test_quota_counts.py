"""Sums by tenant are what a listing found and what was stored since; who is most beyond a quota gives first."""

import random

import pytest
from tests.tiering.tenant_driver import config_of_tenants, key_of_tenant

from kvtier.tenants import tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.tiering.kit.quota_counts import (
    RECOUNT_S,
    Candidate,
    QuotaCounts,
    TenantSums,
    choose_victims,
    make_quota_counts,
    plan_shares,
    take_oldest,
)

BLOCK_BYTES = 1024

ALICE, BOB = tenant_number("alice"), tenant_number("bob")


def make_counts(clock: ManualClock, **quotas: int | None) -> QuotaCounts:
    counts = make_quota_counts(config_of_tenants("valkey", quotas), "valkey", clock)
    assert counts is not None
    return counts


def found(**num_blocks: int) -> TenantSums:
    """Return sums of blocks of BLOCK_BYTES."""
    sums = TenantSums()
    for name, num in num_blocks.items():
        sums.add(tenant_number(name), num, BLOCK_BYTES * num)
    return sums


def listed(counts: QuotaCounts, **num_blocks: int) -> None:
    counts.begin_listing()
    counts.end_listing(found(**num_blocks))
    counts.end_pass()


def test_without_a_quota_in_the_tier_nothing_is_counted() -> None:
    clock = ManualClock()
    assert make_quota_counts(config_of_tenants("valkey", {"alice": None}), "valkey", clock) is None
    assert make_quota_counts(config_of_tenants("fs", {"alice": BLOCK_BYTES}), "valkey", clock) is None


def test_sums_are_what_was_found_and_what_came_and_went_since() -> None:
    counts = make_counts(ManualClock(), alice=10 * BLOCK_BYTES, bob=None)
    listed(counts, alice=3, bob=2)
    counts.on_stored([key_of_tenant("alice", 1), key_of_tenant("bob", 2)], BLOCK_BYTES)
    counts.on_removed(ALICE, 2, 2 * BLOCK_BYTES)
    stats = counts.stats()
    assert stats == {
        "tenant_blocks.alice": 2,
        "tenant_blocks.bob": 3,
        "tenant_bytes.alice": 2 * BLOCK_BYTES,
        "tenant_bytes.bob": 3 * BLOCK_BYTES,
    }
    listed(counts, bob=1)
    assert counts.stats()["tenant_blocks.alice"] == 0
    assert counts.stats()["tenant_bytes.bob"] == BLOCK_BYTES


def test_a_name_that_tells_no_tenant_is_not_counted() -> None:
    sums = TenantSums()
    sums.add_found(None, BLOCK_BYTES)
    sums.add_found(key_of_tenant("alice", 1), BLOCK_BYTES)
    assert sums.num_blocks == {ALICE: 1}


def test_the_first_store_and_then_an_eighth_of_a_quota_asks_for_a_listing() -> None:
    clock = ManualClock()
    counts = make_counts(clock, alice=8 * BLOCK_BYTES, bob=None)
    assert not counts.is_due
    counts.on_stored([key_of_tenant("alice", 1)], 1)
    assert counts.is_due
    listed(counts)
    assert not counts.is_due
    counts.on_stored([key_of_tenant("bob", number) for number in range(100)], BLOCK_BYTES)
    counts.on_stored([key_of_tenant("alice", 1)], BLOCK_BYTES)
    assert not counts.is_due
    counts.on_stored([key_of_tenant("alice", 2)], 1)
    assert counts.is_due


def test_what_others_may_have_stored_is_looked_for_after_a_while() -> None:
    clock = ManualClock()
    counts = make_counts(clock, alice=8 * BLOCK_BYTES)
    listed(counts)
    clock.advance(RECOUNT_S)
    assert not counts.is_due
    counts.on_stored([key_of_tenant("alice", 1)], 1)
    assert counts.is_due


def test_a_pass_that_did_not_end_is_due_again() -> None:
    counts = make_counts(ManualClock(), alice=8 * BLOCK_BYTES)
    counts.begin_listing()
    assert counts.is_due
    counts.end_listing(found(alice=9))
    assert counts.is_due
    assert counts.excesses() == {ALICE: BLOCK_BYTES}
    counts.end_pass()
    assert not counts.is_due


@pytest.mark.parametrize(
    ("needed_bytes", "shares"),
    [
        (None, {1: 5, 2: 9}),
        (0, {}),
        (-4, {}),
        (7, {2: 7}),
        (9, {2: 9}),
        (11, {2: 9, 1: 2}),
        (99, {1: 5, 2: 9}),
    ],
)
def test_who_is_most_beyond_gives_first(needed_bytes: int | None, shares: dict[int, int]) -> None:
    assert plan_shares({1: 5, 2: 9, 3: 0}, needed_bytes) == shares


def test_the_oldest_blocks_of_each_leave_and_no_more() -> None:
    draw = random.Random(7)
    blocks = [
        (number, Candidate(float(draw.randrange(50)), f"{number}-{index}", draw.randrange(1, 9), None))
        for number in (ALICE, BOB, 3)
        for index in range(200)
    ]
    draw.shuffle(blocks)
    shares = {ALICE: 60, BOB: 10_000}
    victims = choose_victims(iter(blocks), shares)
    assert victims.keys() == shares.keys()
    for number, share in shares.items():
        own = sorted(one for other, one in blocks if other == number)
        assert victims[number] == take_oldest(own, share) == own[: len(victims[number])]
    assert sum(one.num_bytes for one in victims[ALICE][:-1]) < 60
    assert len(victims[BOB]) == 200
