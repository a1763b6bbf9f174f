"""Blocks of tenants in places: names that tell them apart, and a name that was searched for hits no other's blocks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiering.fs.engine import bytes_of_packs
from tests.tiering.tenant_driver import COLLIDING_NAME, TenantDriver, config_of_tenants, key_of_tenant

from kvtier.base import (
    MAX_TENANT_NUMBER,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    get_offload_tenant,
    make_offload_key,
)
from kvtier.cli.main import main
from kvtier.tenants import tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import ROW_BYTES, make_rows
from kvtier.tiering.fs import FSTier
from kvtier.tiering.kit.blobs import FolderNames
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, HEADER_PAGE_BYTES
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.places import open_place
from kvtier.tiering.valkey.blobs import ValkeyNames

HANG_GUARD_S = 60.0
KINDS = ("fs", "obj")
NUM_BLOCKS = 12
"""What an fs tier here has room for."""

NAMESPACE = "0" * 32

PARTS = st.tuples(
    st.binary(min_size=1, max_size=32),
    st.integers(0, 255),
    st.one_of(
        st.just(0),
        st.integers(1, 5),
        st.integers(1, MAX_TENANT_NUMBER).filter(lambda number: number % 2**24 != 0),
    ),
)


@given(st.lists(PARTS, min_size=2, max_size=8, unique=True))
def test_no_two_blocks_of_whatever_hash_group_and_tenant_have_one_name_in_any_place(
    parts: list[tuple[bytes, int, int]],
) -> None:
    keys = [make_offload_key(*one) for one in parts]
    values = [ValkeyNames().block(NAMESPACE, key) for key in keys]
    objects = [FolderNames().block(NAMESPACE, key) for key in keys]
    for names in (values, objects):
        assert len(set(names)) == len(parts)
    for one, value, path in zip(parts, values, objects, strict=True):
        of_value = ValkeyNames().parse(value)
        assert of_value is not None
        of_object = FolderNames().parse(path)
        assert of_object is not None
        for found in (of_value.block, of_object.block):
            key = OffloadKey(found)
            assert (get_offload_block_hash(key), get_offload_group_idx(key), get_offload_tenant(key)) == one


@given(st.lists(PARTS, min_size=2, max_size=8, unique=True))
def test_keyed_names_are_as_different_and_give_the_keys_back(parts: list[tuple[bytes, int, int]]) -> None:
    pytest.importorskip("cryptography", reason="needs kvtier[encryption]")
    from kvtier.tiering.kit.keyed_names import BlockNames

    names = BlockNames(bytes(32), bytes(16))
    keys = [make_offload_key(*one) for one in parts]
    found = [names.name(key) for key in keys]
    assert len(set(found)) == len(parts)
    assert [names.key(name) for name in found] == keys


def place_of(kind: str, folder: Path) -> str:
    return {"fs": str(folder / "fs"), "obj": f"file://{folder / 'obj'}"}[kind]


def open_tier(kind: str, folder: Path, quota_blocks: int | None) -> TenantDriver:
    """Return a tier that has room for NUM_BLOCKS, or a bucket, where each tenant has the same quota."""
    block_bytes = ROW_BYTES + (ENVELOPE_BYTES if kind == "obj" else HEADER_PAGE_BYTES)
    quota_bytes = None if quota_blocks is None else quota_blocks * block_bytes
    config, rows = config_of_tenants(kind, {"alice": quota_bytes, "*": quota_bytes}), make_rows()
    if kind == "obj":
        return TenantDriver(ObjTier(config, rows, url=place_of(kind, folder)), rows)
    tier = FSTier(
        config,
        rows,
        clock=ManualClock(0.0),
        root_dir=folder / "fs",
        capacity_bytes=bytes_of_packs(1, NUM_BLOCKS),
        pack_bytes=bytes_of_packs(1, NUM_BLOCKS),
        num_threads=1,
    )
    assert tier.wait_indexed(HANG_GUARD_S)
    return TenantDriver(tier, rows)


def names_in(place: str) -> set[bytes]:
    """Return the names of the blocks of a place that no tier uses."""
    opened = open_place(place)
    try:
        return {block.name for block in opened.blocks() if block.name is not None}
    finally:
        opened.close()


def keys_of(name: str, numbers: range) -> set[OffloadKey]:
    return {key_of_tenant(name, number) for number in numbers}


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_was_searched_for_takes_nothing_of_anothers_quota(kind: str, tmp_path: Path) -> None:
    driver = open_tier(kind, tmp_path, 4)
    assert len(driver.store_of("alice", range(4))) == 4
    assert len(driver.store_of(COLLIDING_NAME, range(20, 24))) == 4
    assert len(driver.store_of(COLLIDING_NAME, range(24, 28))) == 4
    assert len(driver.store_of("bob", range(40, 44))) == 4
    place = place_of(kind, tmp_path)
    if kind == "obj":  # a quota of a bucket is kept by a thread beside the stores
        driver.poll_until(lambda: len(names_in(place) & keys_of(COLLIDING_NAME, range(20, 28))) <= 4)
    assert driver.tier.shutdown(HANG_GUARD_S)
    left = names_in(place)
    assert left >= keys_of("alice", range(4)), "whose quota was not exceeded"
    assert len(left & keys_of(COLLIDING_NAME, range(20, 28))) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_was_searched_for_is_not_purged_with_the_tenant_nor_the_tenant_with_it(
    kind: str, tmp_path: Path
) -> None:
    driver = open_tier(kind, tmp_path, None)
    driver.store_of("alice", range(3))
    driver.store_of(COLLIDING_NAME, range(20, 24))
    assert driver.tier.shutdown(HANG_GUARD_S)
    place = place_of(kind, tmp_path)
    assert main(["purge", place, "--tenant", COLLIDING_NAME]) == 0
    assert names_in(place) == keys_of("alice", range(3))
    driver = open_tier(kind, tmp_path, None)
    driver.store_of(COLLIDING_NAME, range(20, 24))
    assert driver.tier.shutdown(HANG_GUARD_S)
    assert main(["purge", place, "--tenant", "alice"]) == 0
    assert names_in(place) == keys_of(COLLIDING_NAME, range(20, 24))


@pytest.mark.parametrize("kind", KINDS)
def test_a_living_tier_purges_that_name_alone(kind: str, tmp_path: Path) -> None:
    driver = open_tier(kind, tmp_path, None)
    driver.store_of("alice", range(3))
    driver.store_of(COLLIDING_NAME, range(20, 24))
    tier = driver.tier
    assert tier.purge(tenant_number(COLLIDING_NAME)) is None
    driver.poll_until(lambda: tier.poll_purge() is not None)
    assert tier.shutdown(HANG_GUARD_S)
    assert names_in(place_of(kind, tmp_path)) == keys_of("alice", range(3))
