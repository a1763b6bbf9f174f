"""Tenants beyond their quotas in a bucket lose their own oldest objects first."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiering.tenant_driver import NAMES, TenantDriver, config_of_tenants, count_by_name, key_of_tenant

from kvtier.base import OffloadKey
from kvtier.errors import ConfigError
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, make_config, make_rows
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.obj import ObjTier

HANG_GUARD_S = 60.0
BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES
CAPACITY_BLOCKS = 64
TTL_S = 86_400

StartTenants = Callable[..., TenantDriver]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def open_tier(folder: Path, quotas: dict[str, int | None], **own: object) -> TenantDriver:
    """Return a tier on a folder with quotas in blocks, and what drives it."""
    sizes = {name: None if num is None else num * BLOCK_BYTES for name, num in quotas.items()}
    config = config_of_tenants("obj", sizes, make_config("m"))
    rows = make_rows()
    options = {"url": f"file://{folder}"} | own
    tier = ObjTier(config, rows, **options)  # type: ignore[arg-type]  # a test's own
    return TenantDriver(tier, rows)


@pytest.fixture
def start(folder: Path) -> Iterator[StartTenants]:
    drivers: list[TenantDriver] = []

    def make(quotas: dict[str, int | None], **own: object) -> TenantDriver:
        drivers.append(open_tier(folder, quotas, **own))
        return drivers[-1]

    yield make
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


def paths_in(folder: Path) -> dict[OffloadKey, Path]:
    """Return the blocks of a folder, and where each is."""
    return {OffloadKey(bytes.fromhex(path.stem)): path for path in folder.rglob("*.kv")}


def make_old(folder: Path, name: str, number: int, age_s: float) -> None:
    path = paths_in(folder)[key_of_tenant(name, number)]
    then_s = path.stat().st_mtime - age_s
    os.utime(path, (then_s, then_s))


def counts_of(driver: TenantDriver, *names: str) -> dict[str, float]:
    """Return what a pass finds at rest; before, what was written while another was read may count twice."""
    driver.tier._block_store._evictor._run_pass()  # type: ignore[attr-defined]  # an obj tier's
    stats = driver.tier.stats()
    return {name: stats[f"tenant_blocks.{name}"] for name in names}


def fill(driver: TenantDriver, name: str, numbers: range) -> None:
    """Store blocks, each until it is taken: what is declined finds room after a pass."""
    for begin in range(numbers.start, numbers.stop, 4):
        part = range(begin, min(begin + 4, numbers.stop))
        driver.poll_until(lambda part=part: len(driver.store_of(name, part)) == len(part))  # type: ignore[misc]  # a default


def test_what_leaves_because_its_time_is_over_leaves_for_the_quota_too(
    start: StartTenants, folder: Path
) -> None:
    start({"alice": None, "bob": None}).store_of("alice", range(6))
    make_old(folder, "alice", 4, 2 * TTL_S)
    make_old(folder, "alice", 1, 3 * TTL_S)
    for number in (0, 2, 3):
        make_old(folder, "alice", number, 100)
    driver = start({"alice": 4, "bob": None}, ttl_s=TTL_S)
    driver.tier._block_store._evictor._run_pass()  # type: ignore[attr-defined]  # an obj tier's
    assert paths_in(folder).keys() == {key_of_tenant("alice", number) for number in (0, 2, 3, 5)}


def test_with_a_capacity_a_tenant_may_take_all_room_while_there_is_some(
    start: StartTenants, folder: Path
) -> None:
    driver = start({"alice": 4, "bob": None}, capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES)
    fill(driver, "alice", range(48))
    assert count_by_name(set(paths_in(folder))) == {"alice": 48}


def test_with_a_capacity_who_is_beyond_his_quota_gives_first(start: StartTenants, folder: Path) -> None:
    driver = start({"alice": 8, "bob": 40, "carol": None}, capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES)
    fill(driver, "bob", range(32))
    for number in range(32):
        make_old(folder, "bob", number, 1000)
    fill(driver, "alice", range(16))
    fill(driver, "carol", range(40))
    assert driver.tier.shutdown(HANG_GUARD_S)
    held = count_by_name(set(paths_in(folder)))
    # All that alice has beyond her quota left before anything else did; bob's are the oldest after that.
    assert held["alice"] == 8
    assert held["bob"] < 32
    assert held["carol"] == 40
    assert counts_of(driver, *NAMES) == {name: held.get(name, 0) for name in NAMES}


def test_where_quotas_cannot_be_kept_they_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quota_bytes.*where nothing can be listed"):
        ObjTier(config_of_tenants("obj", {"alice": 2**20}), make_rows(), url="https://host/x")


QUOTAS = st.fixed_dictionaries({name: st.none() | st.integers(1, 40) for name in NAMES})
STORES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 60), st.integers(1, NUM_ROWS // 2)), max_size=30
)


@settings(max_examples=15, deadline=None)
@given(QUOTAS.filter(lambda quotas: any(quotas.values())), STORES)
def test_sums_are_what_is_held_and_nobody_within_his_quota_pays_for_one_beyond_it(
    tmp_path_factory: pytest.TempPathFactory,
    quotas: dict[str, int | None],
    stores: list[tuple[str, int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("tenants") / "bucket"
    driver = open_tier(folder, quotas, capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES)
    evictor = driver.tier._block_store._evictor  # type: ignore[attr-defined]  # an obj tier's
    evictor._start_thread = lambda: None  # each pass runs here
    evictor._mark_bytes = 24 * BLOCK_BYTES
    try:
        for name, first, num in stores:
            driver.store_of(name, range(first, first + num))
            before = count_by_name(set(paths_in(folder)))
            evictor._run_pass()
            after = count_by_name(set(paths_in(folder)))
            assert counts_of(driver, *NAMES) == {each: after.get(each, 0) for each in NAMES}
            lost_within = any(
                num > after.get(each, 0) and after.get(each, 0) < (quotas[each] or num + 1)
                for each, num in before.items()
            )
            if lost_within:
                assert all(num <= (quotas[each] or num) for each, num in after.items())
            assert sum(after.values()) == min(24, sum(before.values()))
    finally:
        assert driver.tier.shutdown(HANG_GUARD_S)
