"""The count of bytes never misses a block, whatever happens between the beginning and the end of a recount."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiering.fs.shared_usage import (
    RECORD_PAGE_BYTES,
    Change,
    MemberId,
    UsageMember,
    UsageRecord,
    unpack_record,
)
from kvtier.tiering.fs.system import Owner, current_owner

ME = MemberId(current_owner(), 1)
OTHER = MemberId(Owner("0" * 16, 1, 1), 2)


def counted(used_bytes: int = 0, capacity_bytes: int = 1000) -> UsageRecord:
    """Return a counted record with one member."""
    return UsageRecord(used_bytes, is_counted=True).joined(ME, capacity_bytes, 0.0)


def test_the_smallest_capacity_of_any_member_counts() -> None:
    record = counted(used_bytes=100).joined(OTHER, 300, 0.0)
    assert record.limit_bytes == 300
    assert record.room_bytes == 200
    assert record.left(OTHER).limit_bytes == 1000


def test_there_is_no_room_before_somebody_has_counted_or_beyond_the_limit() -> None:
    assert UsageRecord().joined(ME, 1000, 0.0).room_bytes == 0
    assert counted(used_bytes=2000).room_bytes == 0


def test_a_reservation_is_used_room_until_what_was_not_written_is_given_back() -> None:
    record = counted().changed(ME, Change(used_bytes=300, in_flight_bytes=300))
    assert (record.used_bytes, record.in_flight_bytes) == (300, 300)
    record = record.changed(ME, Change(used_bytes=-100, in_flight_bytes=-300, finished_bytes=200))
    assert (record.used_bytes, record.in_flight_bytes, record.finished_bytes) == (200, 0, 200)


def test_a_sign_of_life_keeps_what_is_in_flight() -> None:
    record = counted().changed(ME, Change(in_flight_bytes=5)).joined(ME, 77, 9.0)
    assert record.members[ME] == UsageMember(5, 77, 9.0)


def test_a_recount_includes_what_was_finished_since_and_what_is_in_flight() -> None:
    begun = counted()
    record = begun.changed(ME, Change(used_bytes=50, in_flight_bytes=50))
    record = record.changed(ME, Change(in_flight_bytes=-20, finished_bytes=20))
    assert record.recounted(500, begun.finished_bytes).used_bytes == 500 + 20 + 30


def test_dead_members_are_dropped_and_others_on_other_hosts_given_an_hour() -> None:
    here = current_owner()
    dead = MemberId(Owner(here.host, here.pid, here.start_ticks + 1), 3)
    record = counted().joined(OTHER, 300, 0.0).joined(dead, 10, 0.0)
    assert set(record.without_dead(here, 3000.0).members) == {ME, OTHER}
    assert set(record.without_dead(here, 4000.0).members) == {ME}


def test_a_record_survives_its_form_on_disk_and_fills_whole_pages() -> None:
    record = counted(17).joined(OTHER, 300, 1.5).changed(ME, Change(in_flight_bytes=5, finished_bytes=2**40))
    assert unpack_record(record.pack()) == record
    assert len(record.pack()) == RECORD_PAGE_BYTES


def test_many_members_fill_more_pages() -> None:
    record = UsageRecord(1, is_counted=True)
    for number in range(200):
        record = record.joined(ME._replace(tier_id=number), 10, 0.0)
    assert len(record.pack()) % RECORD_PAGE_BYTES == 0
    assert unpack_record(record.pack()) == record


@given(st.binary(max_size=100))
def test_bytes_that_are_no_record_are_an_uncounted_one(text: bytes) -> None:
    assert unpack_record(text) == UsageRecord()


@given(st.integers(0, 8 * 80 - 1))
def test_a_damaged_record_is_an_uncounted_one(bit: int) -> None:
    text = bytearray(counted(17).pack())
    text[bit // 8] ^= 1 << bit % 8
    assert unpack_record(bytes(text)) == UsageRecord()


@given(st.lists(st.tuples(st.sampled_from(["reserve", "finish", "abandon", "seen"]), st.integers(1, 9))))
def test_no_order_of_writing_and_walking_counts_too_little(events: list[tuple[str, int]]) -> None:
    """A walk sees each finished block at one moment of its own; all others happen around it."""
    begun = record = counted(capacity_bytes=10**6)
    on_disk = seen = in_flight = 0
    for event, size in events:
        if event == "reserve":
            record = record.changed(ME, Change(used_bytes=size, in_flight_bytes=size))
            in_flight += size
        elif event == "seen":
            seen = max(seen, on_disk - size) if on_disk else 0
        elif in_flight >= size:
            in_flight -= size
            is_written = event == "finish"
            on_disk += size if is_written else 0
            change = Change(0, -size, size) if is_written else Change(-size, -size)
            record = record.changed(ME, change)
    assert record.recounted(seen, begun.finished_bytes).used_bytes >= on_disk + in_flight


def test_only_a_member_changes_the_record() -> None:
    with pytest.raises(KeyError):
        UsageRecord().changed(ME, Change())
