"""The shared table of tenants' bytes: its form on disk, changes of several tiers, recounts."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import make_offload_key
from kvtier.tiering.fs.shared_usage import lock_file, open_shared_file
from kvtier.tiering.fs.tenant_usage import MAX_TENANTS, TenantTable, TenantUsage, forget_table, unpack_table
from kvtier.tiering.kit.health import OutageLog

BLOCK_BYTES = 10
KEYS = {number: make_offload_key(bytes(32), 0, number) for number in (0, 1, 2)}
TABLES = st.dictionaries(st.integers(0, 2**24 - 1), st.integers(1, 2**62), max_size=40)


def beyond_hundred(held: Mapping[int, int]) -> dict[int, int]:
    return {number: num_bytes - 100 for number, num_bytes in held.items() if num_bytes > 100}


def open_table(path: Path) -> TenantUsage:
    return TenantUsage(path, 0o600, BLOCK_BYTES, beyond_hundred, OutageLog("test"), 2 * BLOCK_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".tenants"


@given(TABLES)
def test_a_table_comes_back_from_its_form_on_disk(num_bytes: dict[int, int]) -> None:
    table = TenantTable(num_bytes, is_counted=True)
    assert unpack_table(table.pack()) == table


@given(TABLES.filter(bool), st.data())
def test_a_damaged_or_cut_table_is_none(num_bytes: dict[int, int], data: st.DataObject) -> None:
    text = bytearray(TenantTable(num_bytes, is_counted=True).pack())
    cut = data.draw(st.integers(0, len(text) - 1))
    assert unpack_table(bytes(text[:cut])) == TenantTable()
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert unpack_table(bytes(text)) in (TenantTable(), TenantTable(num_bytes, is_counted=True))


def test_of_too_many_tenants_those_with_the_most_bytes_stay() -> None:
    table = TenantTable({number: number + 1 for number in range(MAX_TENANTS + 5)}, is_counted=True)
    found = unpack_table(table.pack())
    assert len(found.num_bytes) == MAX_TENANTS
    assert min(found.num_bytes.values()) == 6


@given(TABLES, TABLES, TABLES)
def test_a_recount_adds_what_changed_meanwhile_and_nothing_is_below_zero(
    found: dict[int, int], begun: dict[int, int], now: dict[int, int]
) -> None:
    counted = TenantTable(now, is_counted=True).recounted(found, TenantTable(begun, is_counted=True))
    numbers = found.keys() | begun.keys() | now.keys()
    expected = {
        number: found.get(number, 0) + now.get(number, 0) - begun.get(number, 0) for number in numbers
    }
    assert counted.num_bytes == {number: total for number, total in expected.items() if total > 0}
    assert counted.is_counted


def test_two_tiers_see_each_others_changes(path: Path) -> None:
    one, other = open_table(path), open_table(path)
    one.recount({1: 50}, one.begin_recount())
    with other.counting([KEYS[1], KEYS[2]]) as written:
        written.append(KEYS[2])
    other.remove(1, 20)
    other.refresh()
    one.refresh()
    assert one.on_disk() == other.on_disk() == {1: 30, 2: 10}
    assert not other.has_changes


def test_many_changes_are_told_without_waiting_and_each_once(path: Path) -> None:
    one, other = open_table(path), open_table(path)
    one.recount({1: 50}, one.begin_recount())
    for expected in ({1: 50}, {1: 50}, {1: 50, 2: 30}, {1: 50, 2: 30}):
        with one.counting([KEYS[2]]) as written:
            written.append(KEYS[2])
        other.refresh()
        assert other.on_disk() == expected
    assert one.on_disk() == {1: 50, 2: 40}


def test_what_is_being_written_counts_for_its_own_tier_alone(path: Path) -> None:
    one, other = open_table(path), open_table(path)
    one.recount({1: 95}, one.begin_recount())
    with one.counting([KEYS[1]]) as written:
        assert one.plan_evictions() == ({1: 5}, 0)
        other.refresh()
        assert other.plan_evictions() == ({}, 0)
        written.append(KEYS[1])
    one.refresh()
    other.refresh()
    assert other.plan_evictions() == ({1: 5}, 0)


def test_what_is_written_beyond_a_quota_is_told_from_what_is_on_the_disk(path: Path) -> None:
    usage = open_table(path)
    usage.recount({1: 20}, usage.begin_recount())
    with usage.counting([KEYS[1]] * 11 + [KEYS[2]] * 12):
        assert usage.plan_evictions() == ({1: 20}, 10 + 20)


def test_who_keeps_more_than_half_of_his_quota_is_near_it(path: Path) -> None:
    usage = open_table(path)
    usage.recount({1: 50, 2: 51, 3: 300}, usage.begin_recount())
    assert usage.list_near() == [3, 2]


def test_a_removed_table_is_counted_again(path: Path) -> None:
    usage = open_table(path)
    usage.recount({1: 50}, usage.begin_recount())
    forget_table(path)
    forget_table(path)
    usage.refresh()
    assert not usage.is_counted
    usage.recount({1: 7}, usage.begin_recount())
    assert usage.on_disk() == {1: 7}


def test_changes_wait_until_the_table_can_be_written(path: Path) -> None:
    usage = open_table(path.parent / "missing" / ".tenants")
    usage.remove(1, 5)
    usage.remove(None, 5)
    usage.refresh()
    assert usage.has_changes
    path.with_name("missing").mkdir()
    usage.recount({1: 7}, usage.begin_recount())
    assert usage.on_disk() == {1: 7}


def test_a_table_that_cannot_be_opened_is_said_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    usage = open_table(path)
    usage.refresh()
    usage.refresh()
    assert len(caplog.records) == 1
    path.rmdir()
    usage.refresh()
    assert "works again" in caplog.text


def test_while_another_keeps_the_lock_nothing_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiering.fs.shared_usage.LOCK_ATTEMPTS", 2)
    usage = open_table(path)
    usage.recount({1: 50}, usage.begin_recount())
    fd = open_shared_file(path, 0o600)
    assert lock_file(fd)
    usage.remove(1, 10)
    usage.refresh()
    assert usage.has_changes
    assert usage.on_disk() == {1: 40}
