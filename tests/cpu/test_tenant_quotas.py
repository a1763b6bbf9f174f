"""Quotas in host memory: who is beyond his own pays first, with every policy."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiering.tenant_driver import COLLIDING_NAME

from kvtier.base import OffloadKey, ReqContext, get_offload_tenant, make_offload_key
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.tenants import OTHERS_LABEL, UNNAMED_LABEL, parse_tenants, tenant_number

BLOCK_BYTES = 1024
NUM_BLOCKS = 8
REQUEST = ReqContext("r")
ALICE, BOB, CAROL = map(tenant_number, ("alice", "bob", "carol"))
POLICIES = CACHE_POLICIES.names()


def make(
    policy: str = "lru", num_blocks: int = NUM_BLOCKS, **quota_blocks: int | None
) -> CPUOffloadingManager:
    setting = {
        name: {} if num is None else {"quota_bytes": {"host": num * BLOCK_BYTES}}
        for name, num in quota_blocks.items()
    }
    tenants = parse_tenants(setting | {"*": {}}, "", ("host",))
    return CPUOffloadingManager(num_blocks, policy, tenants=tenants, block_bytes=BLOCK_BYTES)


def keys_of(tenant: int, *numbers: int) -> list[OffloadKey]:
    return [make_offload_key(number.to_bytes(8, "big"), 0, tenant) for number in numbers]


def store(manager: CPUOffloadingManager, keys: Sequence[OffloadKey]) -> list[OffloadKey] | None:
    """Store blocks; return what was evicted, None when the store was refused."""
    output = manager.prepare_store(keys, REQUEST)
    if output is None:
        return None
    manager.complete_store(output.keys_to_store, REQUEST)
    return output.evicted_keys


def held(manager: CPUOffloadingManager, tenant: int) -> int:
    assert manager.tenant_blocks is not None
    return len(manager.tenant_blocks.held.get(tenant, ()))


@pytest.mark.parametrize("policy", POLICIES)
def test_while_there_is_room_a_quota_refuses_nothing(policy: str) -> None:
    manager = make(policy, alice=2)
    assert store(manager, keys_of(ALICE, *range(8))) == []
    assert held(manager, ALICE) == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_beyond_his_quota_evicts_his_own_blocks(policy: str) -> None:
    manager = make(policy, alice=3, bob=5)
    store(manager, keys_of(BOB, *range(5)))
    store(manager, keys_of(ALICE, 10, 11, 12))
    for number in range(20, 60):
        evicted = store(manager, keys_of(ALICE, number))
        assert evicted is not None
        assert {get_offload_tenant(key) for key in evicted} == {ALICE}
        manager.check()
    assert (held(manager, ALICE), held(manager, BOB)) == (3, 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_who_took_free_room_gives_it_back_to_those_within_their_quota(policy: str) -> None:
    manager = make(policy, alice=3, bob=5)
    store(manager, keys_of(ALICE, *range(8)))
    for number in range(10, 15):
        evicted = store(manager, keys_of(BOB, number))
        assert evicted is not None
        assert [get_offload_tenant(key) for key in evicted] == [ALICE]
    assert (held(manager, ALICE), held(manager, BOB)) == (3, 5)
    manager.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_with_his_own_in_use_he_is_refused_and_nothing_changes(policy: str) -> None:
    manager = make(policy, alice=3, bob=5)
    store(manager, keys_of(BOB, *range(5)))
    own = keys_of(ALICE, 10, 11, 12)
    store(manager, own)
    manager.prepare_load(own, REQUEST)
    assert store(manager, keys_of(ALICE, 13)) is None
    assert (held(manager, ALICE), held(manager, BOB)) == (3, 5)
    manager.check()
    manager.complete_load(own, REQUEST)
    assert store(manager, keys_of(ALICE, 13)) is not None


def test_a_store_that_is_partly_within_the_quota_takes_the_rest_from_anybody() -> None:
    manager = make(alice=5)
    store(manager, keys_of(ALICE, 0, 1, 2, 3))
    store(manager, keys_of(CAROL, 10, 11, 12, 13))
    evicted = store(manager, keys_of(ALICE, 4, 5, 6))
    assert evicted is not None
    # Two beyond the quota are his own; the third is whatever the policy takes next.
    assert len(evicted) == 3
    assert [get_offload_tenant(key) for key in evicted[:2]] == [ALICE, ALICE]
    assert held(manager, ALICE) <= 5
    manager.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_name_that_was_searched_for_takes_nothing_of_the_tenant_that_it_was_to_hit(policy: str) -> None:
    quota = {"quota_bytes": {"host": 4 * BLOCK_BYTES}}
    tenants = parse_tenants({"alice": quota, "*": quota}, "", ("host",))
    manager = CPUOffloadingManager(12, policy, tenants=tenants, block_bytes=BLOCK_BYTES)
    alices = keys_of(ALICE, *range(4))
    store(manager, alices)
    store(manager, keys_of(tenant_number(COLLIDING_NAME), *range(10, 18)))
    assert store(manager, keys_of(BOB, *range(20, 24))) is not None
    assert all(map(manager.is_ready, alices)), "whose quota was not full"
    manager.purge(None, tenant_number(COLLIDING_NAME))
    assert all(map(manager.is_ready, alices))
    assert held(manager, tenant_number(COLLIDING_NAME)) == 0
    manager.check()


def test_tenants_without_a_quota_compete_as_ever() -> None:
    manager, plain = make(alice=None), CPUOffloadingManager(NUM_BLOCKS)
    for number in range(30):
        keys = keys_of((ALICE, BOB)[number % 2], number)
        assert store(manager, keys) == store(plain, keys)


def test_blocks_and_bytes_are_counted_by_name() -> None:
    manager = make(alice=2)
    store(manager, keys_of(ALICE, 1, 2))
    store(manager, keys_of(CAROL, 1))
    store(manager, keys_of(0, 1))
    stats = manager.stats()
    assert stats["primary.tenant_blocks.alice"] == 2
    assert stats["primary.tenant_bytes.alice"] == 2 * BLOCK_BYTES
    assert stats[f"primary.tenant_blocks.{OTHERS_LABEL}"] == 1
    assert stats[f"primary.tenant_blocks.{UNNAMED_LABEL}"] == 1
    assert manager.purge_blocks()
    assert manager.stats()["primary.tenant_blocks.alice"] == 0
    manager.check()


STEP = st.tuples(
    st.sampled_from(["store", "store", "store", "pin", "unpin", "touch", "fail"]),
    st.sampled_from([ALICE, BOB, CAROL, 0]),
    st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True),
)


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=st.lists(STEP, max_size=40), quotas=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_nobody_pays_for_a_tenant_beyond_his_quota(
    policy: str, steps: list[tuple[str, int, list[int]]], quotas: tuple[int, int]
) -> None:
    quota = {ALICE: quotas[0], BOB: quotas[1]}
    manager = make(policy, alice=quotas[0], bob=quotas[1])
    blocks = manager.tenant_blocks
    assert blocks is not None
    pinned: list[OffloadKey] = []
    for what, tenant, numbers in steps:
        keys = keys_of(tenant, *numbers)
        if what == "pin":
            ready = manager.table.ready_among(keys)
            manager.prepare_load(ready, REQUEST)
            pinned += ready
        elif what == "unpin" and pinned:
            manager.complete_load([pinned.pop()], REQUEST)
        elif what == "touch":
            manager.touch(keys, REQUEST)
        elif what in ("store", "fail"):
            check_store(manager, quota, tenant, keys, set(pinned), success=what == "store")
        manager.check()


def check_store(
    manager: CPUOffloadingManager,
    quota: dict[int, int],
    tenant: int,
    keys: list[OffloadKey],
    pinned: set[OffloadKey],
    *,
    success: bool,
) -> None:
    """Store blocks, and compare what was evicted with the laws."""
    assert manager.tenant_blocks is not None
    before = {number: set(group) for number, group in manager.tenant_blocks.held.items()}
    new = [key for key in keys if key not in before.get(tenant, ())]
    output = manager.prepare_store(keys, REQUEST)
    if output is None:
        assert {number: set(group) for number, group in manager.tenant_blocks.held.items()} == before
        return
    num_own_beyond = max(0, len(before.get(tenant, ())) + len(new) - quota.get(tenant, 10**9))
    evicted = output.evicted_keys
    lost = {
        number: [key for key in evicted if get_offload_tenant(key) == number] for number in (*before, tenant)
    }
    idle_own = before.get(tenant, set()) - pinned - set(keys)
    # He evicts nobody's block on account of what is beyond his quota while he has an idle one.
    assert len(lost[tenant]) >= min(len(evicted), num_own_beyond, len(idle_own))
    num_taken_within = 0
    for other, gone in lost.items():
        if other != tenant:
            excess = max(0, len(before[other]) - quota.get(other, 10**9))
            num_taken_within += max(0, len(gone) - excess)
    # What is taken from those within their quotas is for what the storer has within his.
    assert num_taken_within <= max(0, len(evicted) - min(len(evicted), num_own_beyond))
    assert not set(evicted) & (pinned | set(keys))
    manager.complete_store(output.keys_to_store, REQUEST, success=success)
