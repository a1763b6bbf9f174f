"""Tenants beyond their quotas in a directory give their own blocks first."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiering.fs.engine import HANG_GUARD_S, bytes_of_packs
from tests.tiering.tenant_driver import NAMES, TenantDriver, config_of_tenants, count_by_name, key_of_tenant

from kvtier.base import OffloadKey
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.testing.tier_driver import ROW_BYTES, make_rows
from kvtier.tiering.base import parse_tier_settings
from kvtier.tiering.fs import FSTier

SLOT_BYTES = ROW_BYTES + 4096
NUM_SLOTS = 12

StartTenants = Callable[..., TenantDriver]


def open_tier(path: Path, quotas: dict[str, int | None], policy: str = "lru") -> TenantDriver:
    """Return a tier with quotas in blocks, and what drives it."""
    sizes = {name: None if num is None else num * SLOT_BYTES for name, num in quotas.items()}
    rows = make_rows()
    options = {"policy": policy}
    one_pack = bytes_of_packs(1, NUM_SLOTS)
    tier = FSTier(
        config_of_tenants("fs", sizes),
        rows,
        parse_tier_settings(options),
        root_dir=path,
        capacity_bytes=one_pack,
        pack_bytes=one_pack,
        num_threads=1,
        has_thread=False,  # which brings tenants back to their quotas each second, whether room is needed or not
    )
    tier.keeper.tick()
    assert tier.wait_indexed(HANG_GUARD_S)
    return TenantDriver(tier, rows)


def end(driver: TenantDriver) -> None:
    """End a tier."""
    assert driver.tier.shutdown(HANG_GUARD_S)


@pytest.fixture
def start(root: Path) -> Iterator[StartTenants]:
    """Build tiers with quotas in blocks, one after another."""
    drivers: list[TenantDriver] = []

    def start(quotas: dict[str, int | None]) -> TenantDriver:
        drivers.append(open_tier(root, quotas))
        return drivers[-1]

    yield start
    for driver in drivers:
        end(driver)


def held_by(driver: TenantDriver, keys: set[OffloadKey]) -> set[OffloadKey]:
    """Return which of ``keys`` the tier holds."""
    return {key for key in keys if driver.tier.lookup(key, driver.request) is True}


def keys_of(name: str, *numbers: int) -> set[OffloadKey]:
    return {key_of_tenant(name, number) for number in numbers}


def test_a_tenant_may_take_all_slots_while_there_are_some(start: StartTenants) -> None:
    driver = start({"alice": 2})
    assert len(driver.store_of("alice", range(NUM_SLOTS))) == NUM_SLOTS


def test_who_is_beyond_his_quota_gives_his_own_blocks_first(start: StartTenants) -> None:
    driver = start({"alice": 4, "*": None})
    driver.store_of("bob", range(4))
    driver.store_of("alice", range(8))
    assert len(driver.store_of("bob", [10, 11])) == 2
    assert held_by(driver, keys_of("alice", *range(8))) == keys_of("alice", 2, 3, 4, 5, 6, 7)
    assert len(driver.store_of("carol", [1, 2, 3])) == 3
    assert held_by(driver, keys_of("alice", *range(8))) == keys_of("alice", 4, 5, 6, 7)
    assert held_by(driver, keys_of("bob", 0, 1, 2, 3, 10, 11)) == keys_of("bob", 1, 2, 3, 10, 11)


def test_a_tenant_at_his_quota_replaces_his_own_blocks_also_after_a_restart(start: StartTenants) -> None:
    quotas = {"alice": 4, "bob": 8}
    driver = start(quotas)
    driver.store_of("bob", range(8))
    driver.store_of("alice", range(4))
    end(driver)
    driver = start(quotas)
    for first in range(4, 12, 2):
        assert len(driver.store_of("alice", [first, first + 1])) == 2
    assert held_by(driver, keys_of("bob", *range(8))) == keys_of("bob", *range(8))
    assert held_by(driver, keys_of("alice", *range(12))) == keys_of("alice", 8, 9, 10, 11)


def test_of_what_was_found_at_the_start_the_oldest_of_a_tenant_leaves(start: StartTenants) -> None:
    quotas = {"alice": 4, "bob": None}
    driver = start(quotas)
    driver.store_of("bob", range(4))
    driver.store_of("alice", range(8))
    end(driver)
    driver = start(quotas)
    assert len(driver.store_of("bob", [10, 11])) == 2
    assert held_by(driver, keys_of("alice", *range(8))) == keys_of("alice", 4, 5, 6, 7)
    assert held_by(driver, keys_of("bob", *range(4))) == keys_of("bob", *range(4))


def test_a_store_beyond_a_quota_without_blocks_of_its_own_takes_no_slot_of_others(
    start: StartTenants,
) -> None:
    driver = start({"alice": 1, "bob": None})
    driver.store_of("bob", range(NUM_SLOTS))
    assert len(driver.store_of("alice", range(4))) == 1
    assert len(held_by(driver, keys_of("bob", *range(NUM_SLOTS)))) == NUM_SLOTS - 1


def test_what_is_beyond_a_quota_leaves_within_a_second_whether_room_is_needed_or_not(
    start: StartTenants,
) -> None:
    driver = start({"alice": 4, "bob": None})
    driver.store_of("bob", range(4))
    driver.store_of("alice", range(8))
    driver.tier.keeper.tick(is_due=True)  # type: ignore[attr-defined]  # a disk tier
    assert held_by(driver, keys_of("alice", *range(8))) == keys_of("alice", 4, 5, 6, 7)
    assert held_by(driver, keys_of("bob", *range(4))) == keys_of("bob", *range(4))


QUOTAS = st.fixed_dictionaries({name: st.none() | st.integers(1, NUM_SLOTS) for name in NAMES})
STEPS = st.lists(
    st.tuples(st.sampled_from([*NAMES, "restart"]), st.integers(0, 20), st.integers(1, 8)), max_size=25
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(QUOTAS, STEPS, st.sampled_from(sorted(CACHE_POLICIES.names())))
def test_nobody_within_his_quota_pays_for_one_beyond_it(
    tmp_path_factory: pytest.TempPathFactory,
    quotas: dict[str, int | None],
    steps: list[tuple[str, int, int]],
    policy: str,
) -> None:
    path = tmp_path_factory.mktemp("tenants") / "fs"
    driver = open_tier(path, quotas, policy)
    known = {key_of_tenant(name, number) for name in NAMES for number in range(30)}
    before: set[OffloadKey] = set()
    try:
        for name, first, num in steps:
            if name == "restart":
                end(driver)
                driver = open_tier(path, quotas, policy)
                after = held_by(driver, known)  # what is beyond a quota leaves with the first look around
                assert after <= before
                had = count_by_name(before)
                beyond = {each: num - (quotas[each] or num) for each, num in had.items()}
                assert count_by_name(before - after) == {each: num for each, num in beyond.items() if num > 0}
                before = after
                continue
            keys = keys_of(name, *range(first, first + num))
            stored = driver.store_keys(sorted(keys))
            after = held_by(driver, known)
            assert stored == keys & after
            require_laws(quotas, name, keys, before, after)
            before = after
            stats = driver.tier.stats()
            by_name = count_by_name(after)
            assert {each: stats[f"tenant_blocks.{each}"] for each in NAMES} == {
                each: by_name.get(each, 0) for each in NAMES
            }
    finally:
        end(driver)


def require_laws(
    quotas: dict[str, int | None],
    storer: str,
    keys: set[OffloadKey],
    before: set[OffloadKey],
    after: set[OffloadKey],
) -> None:
    """Compare what a store has done with what it must and may do."""

    def excess(name: str, num: int) -> int:
        quota = quotas[name]
        return 0 if quota is None else max(0, num - quota)

    new, lost = keys - before, count_by_name(before - after)
    had = count_by_name(before)
    num_needed = max(0, len(before | new) - NUM_SLOTS)
    num_beyond = min(num_needed, excess(storer, had.get(storer, 0) + len(new)))
    own = len([key for key in before - keys if key in keys_of(storer, *range(30))])
    others_beyond = sum(excess(name, num) for name, num in had.items() if name != storer)
    # What a store may take: his own as far as he is beyond, what others are beyond, and for the rest anybody's.
    most = min(num_beyond, own) + others_beyond + num_needed - num_beyond
    assert sum(lost.values()) == min(num_needed, most) or len(before - keys) < num_needed
    lost_within = sum(max(0, num - excess(name, had[name])) for name, num in lost.items() if name != storer)
    assert lost_within <= num_needed - num_beyond
    if lost_within:
        has = count_by_name(after)
        assert all(not excess(name, num) for name, num in has.items() if name != storer)
