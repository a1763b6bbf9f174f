"""Tenants beyond their quotas in a directory give their own blocks first, whoever shares it."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.tiering.encrypted_suite import encrypted
from tests.tiering.fs.conftest import HANG_GUARD_S
from tests.tiering.fs.peer import Peer
from tests.tiering.tenant_driver import (
    NAMES,
    TenantDriver,
    config_of_tenants,
    count_by_name,
    key_of_tenant,
)

from kvtier.base import OffloadKey
from kvtier.tenants import tenant_number
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, make_rows
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.place import open_fs_place
from kvtier.tiering.fs.tenant_usage import unpack_table
from kvtier.tiering.kit.key_ring import add_entry, make_ring, write_ring

BLOCK_BYTES = ROW_BYTES + 4096
CAPACITY_BLOCKS = 12

StartTenants = Callable[..., TenantDriver]


def open_tier(root: Path, quotas: dict[str, int | None], **options: object) -> TenantDriver:
    """Return a tier with quotas in blocks, whose clock stands still, and what drives it."""
    sizes = {name: None if num is None else num * BLOCK_BYTES for name, num in quotas.items()}
    arguments: dict[str, object] = {
        "capacity_bytes": CAPACITY_BLOCKS * BLOCK_BYTES,
        "num_threads": 1,
    } | options
    rows, clock = make_rows(), arguments.pop("clock", ManualClock(0.0))
    tier = FSTier(config_of_tenants("fs", sizes), rows, clock=clock, root_dir=root, **arguments)  # type: ignore[arg-type]
    assert tier.wait_indexed(HANG_GUARD_S)
    return TenantDriver(tier, rows)


@pytest.fixture
def start(root: Path) -> Iterator[StartTenants]:
    """Build tiers with quotas in blocks."""
    drivers: list[TenantDriver] = []

    def start(quotas: dict[str, int | None], **options: object) -> TenantDriver:
        drivers.append(open_tier(root, quotas, **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


def held_in(root: Path) -> set[OffloadKey]:
    """Return the blocks of a directory."""
    return {OffloadKey(bytes.fromhex(path.stem)) for path in root.glob("*/*/*/*.kv")}


def age(root: Path, name: str, number: int, seconds: float) -> None:
    """Make a block look as if it had last been used ``seconds`` ago."""
    [path] = root.glob(f"*/*/*/{key_of_tenant(name, number).hex()}.kv")
    then_s = path.stat().st_mtime - seconds
    os.utime(path, (then_s, then_s))


def table_of(root: Path) -> dict[str, int]:
    """Return the blocks of each tenant as the shared table has them."""
    found = unpack_table((root / ".tenants").read_bytes()).num_bytes
    by_name = {name: found.get(tenant_number(name), 0) // BLOCK_BYTES for name in NAMES}
    return {name: num for name, num in by_name.items() if num}


def test_a_tenant_may_take_all_room_while_there_is_some(start: StartTenants, root: Path) -> None:
    driver = start({"alice": 2, "bob": 2})
    assert len(driver.store_of("alice", range(CAPACITY_BLOCKS))) == CAPACITY_BLOCKS
    assert len(held_in(root)) == CAPACITY_BLOCKS


def test_who_is_beyond_his_quota_gives_his_own_blocks_first(start: StartTenants, root: Path) -> None:
    driver = start({"alice": 4, "*": None})
    driver.store_of("bob", range(4))
    driver.store_of("alice", range(8))
    for number in range(4):
        age(root, "bob", number, 1000)
    assert len(driver.store_of("bob", [10, 11])) == 2
    assert count_by_name(held_in(root)) == {"alice": 6, "bob": 6}
    assert len(driver.store_of("carol", [1, 2, 3])) == 3
    # Alice keeps her quota now, and bob's four oldest were used longest ago.
    assert count_by_name(held_in(root)) == {"alice": 4, "bob": 5, "carol": 3}


def test_a_tenant_at_his_quota_replaces_his_own_blocks(start: StartTenants, root: Path) -> None:
    driver = start({"alice": 4, "bob": 8})
    driver.store_of("bob", range(8))
    for number in range(8):
        age(root, "bob", number, 1000)
    driver.store_of("alice", range(4))
    for first in range(4, 16, 2):
        assert len(driver.store_of("alice", [first, first + 1])) == 2
    assert count_by_name(held_in(root)) == {"alice": 4, "bob": 8}
    assert {key_of_tenant("alice", number) for number in (14, 15)} <= held_in(root)


class SlowStart:
    """A clock on which a start takes long, so that the next walk is not due soon; then it stands still."""

    def __init__(self) -> None:
        self.is_starting = True
        self._now_s = 0.0

    def __call__(self) -> float:
        """Return the current reading, in seconds."""
        if self.is_starting:
            self._now_s += 1.0
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


def test_blocks_that_are_newer_than_the_last_walk_leave_before_those_of_others(
    start: StartTenants, root: Path
) -> None:
    quotas: dict[str, int | None] = {"alice": 6, "bob": 2}
    start(quotas).store_of("alice", range(6))
    for number in range(6):
        age(root, "alice", number, 1000)
    clock = SlowStart()
    driver = start(quotas, clock=clock)
    clock.is_starting = False
    driver.store_of("bob", range(6))
    for first in range(6, 30, 2):
        driver.store_of("bob", [first, first + 1])
        assert count_by_name(held_in(root))["alice"] == 6
    assert key_of_tenant("bob", 29) in held_in(root)


def test_a_store_beyond_a_quota_without_blocks_of_its_own_takes_nobody_elses(
    start: StartTenants, root: Path
) -> None:
    driver = start({"alice": 1, "bob": None})
    driver.store_of("bob", range(CAPACITY_BLOCKS))
    assert len(driver.store_of("alice", range(4))) <= 1
    assert count_by_name(held_in(root))["bob"] >= CAPACITY_BLOCKS - 1


def test_requests_without_a_tenant_share_a_quota(start: StartTenants, root: Path) -> None:
    driver = start({"bob": None, "*": 2})
    driver.store_of("", range(6))
    driver.store_of("bob", range(6))
    assert len(driver.store_of("bob", [10, 11, 12])) == 3
    assert count_by_name(held_in(root)) == {"": 3, "bob": 9}


def test_without_quotas_there_is_no_table(start: StartTenants, root: Path) -> None:
    start({"alice": None}).store_of("alice", range(16))
    assert not (root / ".tenants").exists()


def test_a_restart_knows_what_each_tenant_has(start: StartTenants, root: Path) -> None:
    quotas = {"alice": 4, "bob": None}
    first = start(quotas)
    first.store_of("alice", range(8))
    first.store_of("bob", range(4))
    assert first.tier.shutdown(HANG_GUARD_S)
    assert table_of(root) == {"alice": 8, "bob": 4}
    second = start(quotas)
    assert len(second.store_of("bob", [20, 21])) == 2
    assert count_by_name(held_in(root)) == {"alice": 6, "bob": 6}


def test_a_purge_has_the_table_counted_again(start: StartTenants, root: Path) -> None:
    quotas = {"alice": 4, "bob": None}
    driver = start(quotas)
    driver.store_of("alice", range(8))
    driver.store_of("bob", range(4))
    for number in range(4):
        age(root, "bob", number, 1000)
    place = open_fs_place({"root_dir": str(root)})
    alices = [block for block in place.blocks() if block.tenant == tenant_number("alice")]
    place.begin_removal()
    place.remove(alices[:6], unless_changed=False)
    place.end_removal(())
    assert not (root / ".tenants").exists()
    driver.store_of("bob", range(10, 16))
    driver.store_of("bob", range(20, 22))
    assert count_by_name(held_in(root)) == {"alice": 2, "bob": 10}


def test_blocks_of_an_older_layout_count_for_no_tenant(start: StartTenants, root: Path) -> None:
    quotas = {"alice": 4, "bob": None}
    driver = start(quotas)
    driver.store_of("alice", range(2))
    assert driver.tier.shutdown(HANG_GUARD_S)
    (root / ".tenants").unlink()
    [own] = [path for path in root.iterdir() if len(path.name) == 32]
    older = root / ("0" * 32)
    name = (bytes(32) + b"\x36\x9a\xa2\x00").hex()  # of a number of three bytes
    (older / name[0] / name[1]).mkdir(parents=True)
    (older / name[0] / name[1] / f"{name}.kv").write_bytes(bytes(BLOCK_BYTES))
    document = json.loads((own / "namespace.json").read_text())
    (older / "namespace.json").write_text(json.dumps({**document, "layout_version": 1}))
    driver = start(quotas)
    driver.store_of("alice", range(2, 4))
    assert driver.tier.shutdown(HANG_GUARD_S)
    found = unpack_table((root / ".tenants").read_bytes())
    assert found.is_counted
    assert found.num_bytes == {tenant_number("alice"): 4 * BLOCK_BYTES}


def test_the_names_of_encrypted_blocks_tell_their_tenants_in_the_engines_own_namespace(
    tmp_path: Path, root: Path
) -> None:
    ring = tmp_path / "ring.json"
    write_ring(ring, add_entry(make_ring(), None, 1.0))
    config = encrypted(config_of_tenants("fs", {"alice": 4 * BLOCK_BYTES, "bob": None}), ring)
    rows = make_rows()
    tier = FSTier(
        config, rows, root_dir=root, capacity_bytes=CAPACITY_BLOCKS * BLOCK_BYTES, clock=ManualClock(0.0)
    )
    driver = TenantDriver(tier, rows)
    try:
        driver.store_of("bob", range(4))
        driver.store_of("alice", range(8))
        for path in root.glob("*/*/*/*.kv"):
            os.utime(path, (1, 1))
        assert driver.store_of("bob", [10])
        assert driver.store_of("bob", [11])
        by_name = {name: driver.tier.stats()[f"tenant_blocks.{name}"] for name in ("alice", "bob")}
        assert by_name == {"alice": 6, "bob": 6}
    finally:
        assert tier.shutdown(HANG_GUARD_S)


def test_two_processes_know_what_the_other_stores(start: StartTenants, root: Path) -> None:
    driver = start({"alice": 2, "bob": None})
    driver.store_of("bob", range(6))
    for number in range(6):
        age(root, "bob", number, 1000)
    peer = Peer(root, CAPACITY_BLOCKS * BLOCK_BYTES, "--alice-blocks", "2")
    try:
        assert peer.call("store_alice", *range(6)) == 6
        driver.poll_until(lambda: table_of(root).get("alice") == 6)
        assert len(driver.store_of("bob", [10, 11])) == 2
        assert count_by_name(held_in(root)) == {"alice": 4, "bob": 8}
        assert peer.call("store_alice", 10, 11) == 2
        assert count_by_name(held_in(root)) == {"alice": 4, "bob": 8}
    finally:
        peer.close()


def test_a_process_knows_at_once_what_another_has_stored(start: StartTenants, root: Path) -> None:
    driver = start({"alice": 2, "bob": None})
    driver.store_of("bob", range(6))
    for number in range(6):
        age(root, "bob", number, 1000)
    peer = Peer(root, CAPACITY_BLOCKS * BLOCK_BYTES, "--alice-blocks", "2")
    try:
        assert peer.call("store_alice", *range(6)) == 6
        assert len(driver.store_of("bob", [10, 11])) == 2
        assert count_by_name(held_in(root)) == {"alice": 4, "bob": 8}
    finally:
        peer.close()


def test_what_a_killed_process_did_not_report_is_found_by_the_next_recount(
    start: StartTenants, root: Path
) -> None:
    peer = Peer(root, 1000 * BLOCK_BYTES, "--alice-blocks", "2")
    assert peer.call("store_alice", *range(8)) == 8
    peer.kill()
    driver = start({"alice": 2, "bob": None}, allow_shrink=True)
    driver.poll_until(lambda: table_of(root) == {"alice": 8})
    assert len(driver.store_of("bob", range(7))) == 7
    assert count_by_name(held_in(root)) == {"alice": 5, "bob": 7}


def test_which_blocks_another_engine_has_written_is_known_when_a_walk_is_due(
    start: StartTenants, root: Path
) -> None:
    quotas: dict[str, int | None] = {"alice": 2, "bob": 6, "carol": 6}
    other = start(quotas)
    other.store_of("bob", range(6))
    for number in range(6):
        age(root, "bob", number, 1000)
    clock = SlowStart()
    driver = start(quotas, clock=clock)
    clock.is_starting = False
    other.store_of("alice", range(6))
    # That alice is beyond her quota is known, which of the files are hers is not: the oldest leave.
    driver.store_of("carol", range(2))
    assert count_by_name(held_in(root)) == {"alice": 6, "bob": 4, "carol": 2}
    clock.advance(3600.0)
    driver.store_of("carol", range(2, 4))
    assert count_by_name(held_in(root)) == {"alice": 4, "bob": 4, "carol": 4}


QUOTAS = st.fixed_dictionaries({name: st.none() | st.integers(1, CAPACITY_BLOCKS) for name in NAMES})
STORE = st.tuples(st.sampled_from(NAMES), st.integers(0, 30), st.integers(1, NUM_ROWS // 2))
STORES = st.lists(STORE, max_size=25)


def within(quotas: dict[str, int | None], name: str, num: int) -> bool:
    quota = quotas[name]
    return quota is None or num <= quota


@settings(max_examples=25, deadline=None)
@example(
    {"alice": None, "bob": 2, "carol": None},
    [("alice", 0, 3), ("alice", 3, 8), ("bob", 0, 1), ("bob", 0, 3)],
).via("a tenant far from his quota is brought beyond it by what he writes")
@given(QUOTAS, STORES)
def test_nobody_within_his_quota_pays_for_one_beyond_it(
    tmp_path_factory: pytest.TempPathFactory,
    quotas: dict[str, int | None],
    stores: list[tuple[str, int, int]],
) -> None:
    root = tmp_path_factory.mktemp("tenants")
    driver = open_tier(root, quotas)
    try:
        before: set[OffloadKey] = set()
        for name, first, num in stores:
            keys = {key_of_tenant(name, number) for number in range(first, first + num)}
            stored = driver.store_of(name, range(first, first + num))
            after = held_in(root)
            require_laws(quotas, name, keys, before, after)
            if len(before | keys) <= CAPACITY_BLOCKS:
                assert stored == keys
                assert after == before | keys
            before = after
    finally:
        assert driver.tier.shutdown(HANG_GUARD_S)
    if any(quota is not None for quota in quotas.values()):
        assert table_of(root) == count_by_name(before)


@settings(max_examples=25, deadline=None)
@example(
    {"alice": 2, "bob": None, "carol": None},
    [(False, ("bob", 0, 6)), (True, ("alice", 0, 6)), (False, ("carol", 0, 2))],
).via("a tenant is brought beyond his quota through another engine")
@example(
    {"alice": None, "bob": None, "carol": None},
    [
        (True, ("alice", 6, 1)),
        (True, ("alice", 0, 6)),
        (False, ("alice", 0, 3)),
        (False, ("bob", 0, 8)),
        (True, ("alice", 6, 8)),
        (True, ("alice", 3, 4)),
    ],
).via("a block that another engine has evicted is stored again, and soon once more")
@given(QUOTAS, st.lists(st.tuples(st.booleans(), STORE), max_size=25))
def test_nobody_within_his_quota_pays_for_what_another_engine_has_stored(
    tmp_path_factory: pytest.TempPathFactory,
    quotas: dict[str, int | None],
    stores: list[tuple[bool, tuple[str, int, int]]],
) -> None:
    root = tmp_path_factory.mktemp("engines")
    drivers = open_tier(root, quotas), open_tier(root, quotas)
    try:
        before: set[OffloadKey] = set()
        for is_second, (name, number, num) in stores:
            first = number + 100 * is_second  # an engine may write again what it does not know of another
            keys = {key_of_tenant(name, number) for number in range(first, first + num)}
            drivers[is_second].store_of(name, range(first, first + num))
            after = held_in(root)
            require_laws(quotas, name, keys, before, after)
            before = after
    finally:
        for driver in drivers:
            assert driver.tier.shutdown(HANG_GUARD_S)


def require_laws(
    quotas: dict[str, int | None],
    storer: str,
    keys: set[OffloadKey],
    before: set[OffloadKey],
    after: set[OffloadKey],
) -> None:
    """Compare what a store has done with what it may do."""
    assert len(after) <= CAPACITY_BLOCKS
    had, has, lost = count_by_name(before), count_by_name(after), count_by_name(before - after)
    num_new = len(keys - before)
    quota = quotas[storer]
    num_beyond = 0 if quota is None else min(num_new, max(0, had.get(storer, 0) + num_new - quota))
    # Blocks of others who were within their quotas leave at most for what the storer may keep.
    lost_within = sum(
        num for name, num in lost.items() if name != storer and within(quotas, name, had.get(name, 0))
    )
    assert lost_within <= num_new - num_beyond
    # And only when no other tenant is beyond his.
    if lost_within:
        assert all(within(quotas, name, num) for name, num in has.items() if name != storer)
    # Nobody gives more than what he is beyond his quota while somebody else is beyond his.
    for name in lost:
        if name != storer and not within(quotas, name, had[name]) and has.get(name, 0) < (quotas[name] or 0):
            assert all(within(quotas, other, n) for other, n in has.items() if other not in (storer, name))
