"""Blocks of tenants are counted as they come and go, in the slot table of the disk tier."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, get_offload_tenant, make_offload_key
from kvtier.config import parse_settings
from kvtier.cpu.policies import create_cache_policy
from kvtier.namespace import Namespace
from kvtier.tenants import OTHERS_LABEL, make_tenants, tenant_number
from kvtier.testing.tier_suite import make_config
from kvtier.tiering.fs.block_accounts import BlockAccounts
from kvtier.tiering.fs.neighbours import NO_CONTENTS, Neighbours, PackContents, PackNamespace
from kvtier.tiering.fs.slot_table import SlotTable
from kvtier.tiering.kit.tenant_counts import TenantCounts, make_tenant_counts

NUMBERS = (0, tenant_number("alice"), tenant_number("bob"))
KEYS = [make_offload_key(bytes([number]), 0, tenant) for tenant in NUMBERS for number in range(5)]


def make_counts() -> TenantCounts:
    tenants = make_tenants(parse_settings({"tenants": {"alice": {}, "*": {}}}))
    assert tenants is not None
    return TenantCounts(tenants, "fs", 10)


def make_namespace() -> PackNamespace:
    return PackNamespace(Namespace("", bytes(32)), Neighbours(None, lambda: 1e9))


def expected(keys: Sequence[OffloadKey]) -> dict[int, int]:
    counts = {number: sum(get_offload_tenant(key) == number for key in keys) for number in NUMBERS}
    return {number: num for number, num in counts.items() if num}


def test_labels_are_those_of_the_tenants() -> None:
    counts = make_counts()
    counts.add(KEYS)
    stats = counts.stats()
    assert stats["tenant_blocks.alice"] == stats[f"tenant_blocks.{OTHERS_LABEL}"] == 5
    assert stats["tenant_bytes.alice"] == 50


def test_without_tenants_nothing_is_counted() -> None:
    assert make_tenant_counts(make_config("m"), "fs", 10) is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from(KEYS), max_size=6, unique=True)), max_size=30
    )
)
def test_the_slot_table_counts_what_it_holds(policy: str, steps: list[tuple[bool, list[OffloadKey]]]) -> None:
    counts = make_counts()
    table = SlotTable(
        lambda: create_cache_policy(policy, 6), lambda: 1e9, BlockAccounts(tenant_counts=counts)
    )
    namespace = make_namespace()
    table.open_namespace(namespace)
    for number in (1, 2):
        assert table.add_pack(namespace, number, 3, NO_CONTENTS)
    for is_good, keys in steps:
        plan = table.prepare_store(namespace, keys)
        table.complete_drops(plan, ())
        table.complete_store(plan.pins, keys if is_good else keys[:1])
        pins = [pin for pin in table.prepare_load(namespace, keys) if pin is not None]
        table.complete_load(pins, () if is_good else keys[-1:])
        assert counts.num_blocks == expected([key for key in KEYS if table.is_held(namespace, key)])
    table.remove_pack(1)
    assert counts.num_blocks == expected([key for key in KEYS if table.is_held(namespace, key)])
    table.open_namespace(make_namespace())
    assert not counts.num_blocks


def test_what_was_adopted_and_what_neighbours_hold_counts() -> None:
    counts = make_counts()
    table = SlotTable(lambda: create_cache_policy("lru", 6), lambda: 1e9, BlockAccounts(tenant_counts=counts))
    namespace = make_namespace()
    table.open_namespace(namespace)
    times = np.ones(3, np.uint32)
    table.add_pack(namespace, 1, 3, PackContents(np.arange(3), KEYS[:3], times, times))
    assert counts.num_blocks == expected(KEYS[:3])
    table.count_neighbours(KEYS[5:8], ())
    assert counts.num_blocks == expected([*KEYS[:3], *KEYS[5:8]])
    table.count_neighbours((), KEYS[5:7])
    assert counts.num_blocks == expected([*KEYS[:3], KEYS[7]])
