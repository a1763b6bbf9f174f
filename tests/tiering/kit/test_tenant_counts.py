"""Blocks of tenants are counted as they come and go, in the fs tier's index and the slab's slot table."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import OffloadKey, get_offload_tenant, make_offload_key
from kvtier.config import parse_settings
from kvtier.cpu.policies import create_cache_policy
from kvtier.namespace import Namespace
from kvtier.tenants import OTHERS_LABEL, make_tenants, tenant_number
from kvtier.testing.tier_suite import make_config
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.kit.tenant_counts import TenantCounts, make_tenant_counts
from kvtier.tiering.slab.slot_table import SlabNamespace, SlotTable

NUMBERS = (0, tenant_number("alice"), tenant_number("bob"))
KEYS = [make_offload_key(bytes([number]), 0, tenant) for tenant in NUMBERS for number in range(5)]


def make_counts() -> TenantCounts:
    tenants = make_tenants(parse_settings({"tenants": {"alice": {}, "*": {}}}))
    assert tenants is not None
    return TenantCounts(tenants, "slab", 10)


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


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "evict", "discard", "forget"]), st.lists(st.sampled_from(KEYS), max_size=6)
    ),
    max_size=30,
)


@given(STEPS)
def test_the_index_counts_what_it_holds(steps: list[tuple[str, list[OffloadKey]]]) -> None:
    counts = make_counts()
    index = KeyIndex(8, is_complete=True, tenant_counts=counts)
    for what, keys in steps:
        if what == "forget":
            index.forget_prefix(keys[0][:1] if keys else b"")
        else:
            getattr(index, what)(keys)
        assert counts.num_blocks == expected([key for key in KEYS if key in index])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from(KEYS), max_size=6, unique=True)), max_size=30
    )
)
def test_the_slot_table_counts_what_it_holds(policy: str, steps: list[tuple[bool, list[OffloadKey]]]) -> None:
    counts = make_counts()
    table = SlotTable(6, lambda: create_cache_policy(policy, 6), is_empty=True, tenant_counts=counts)
    namespace = SlabNamespace(Namespace("", bytes(32)))
    table.open_namespace(namespace)
    for is_good, keys in steps:
        plan = table.prepare_store(namespace, keys)
        table.complete_store(plan.pins, keys if is_good else keys[:1])
        pins = [pin for pin in table.prepare_load(namespace, keys) if pin is not None]
        table.complete_load(pins, () if is_good else keys[-1:])
        assert counts.num_blocks == expected([key for key in KEYS if table.is_held(namespace, key)])
    table.open_namespace(SlabNamespace(Namespace("", bytes(32))))
    assert not counts.num_blocks
