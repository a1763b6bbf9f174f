"""Records come out of a journal as they went in, and what is not whole is passed over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiering.fs.packed import changes_of, stored

from kvtier.tiering.fs.records import (
    MAX_SECONDS,
    RECORD,
    RECORD_BYTES,
    Change,
    Kind,
    pack_changes,
    whole_records,
)

PACK_ID, OTHER_ID = bytes(range(16)), bytes(range(1, 17))
NUM_SLOTS = 100
SECONDS = st.integers(0, MAX_SECONDS)
NAMES = st.binary(min_size=1, max_size=40)
CHANGES = st.lists(
    st.builds(Change, st.just(Kind.STORED), st.integers(0, NUM_SLOTS - 1), NAMES, SECONDS, SECONDS)
    | st.builds(Change, st.just(Kind.DROPPED), st.integers(0, NUM_SLOTS - 1), st.just(b""), SECONDS, SECONDS)
)
DATA = pack_changes([stored(slot) for slot in range(8)], PACK_ID)


def test_a_record_has_64_bytes() -> None:
    assert RECORD.itemsize == RECORD_BYTES == 64
    assert len(DATA) == 8 * RECORD_BYTES


@given(changes=CHANGES)
def test_what_is_read_is_what_was_written(changes: list[Change]) -> None:
    records, num_read = whole_records(pack_changes(changes, PACK_ID), PACK_ID, NUM_SLOTS)
    assert changes_of(records) == changes
    assert num_read == len(changes)


@pytest.mark.parametrize("seconds", [-1, -(2**70), MAX_SECONDS + 1, 2**70])
def test_a_clock_that_is_set_wrong_is_cut(seconds: int) -> None:
    data = pack_changes([Change(Kind.STORED, 1, b"a", seconds, seconds)], PACK_ID)
    (change,) = changes_of(whole_records(data, PACK_ID, NUM_SLOTS)[0])
    assert change.stored_s == change.used_s == min(max(0, seconds), MAX_SECONDS)


def test_of_records_that_are_cut_the_whole_ones_are_read() -> None:
    for end in range(len(DATA)):
        records, num_read = whole_records(DATA[:end], PACK_ID, NUM_SLOTS)
        assert changes_of(records) == [stored(slot) for slot in range(end // RECORD_BYTES)]
        assert num_read == end // RECORD_BYTES


def test_a_wrong_byte_costs_its_record_alone() -> None:
    for at, right in enumerate(DATA):
        bad = at // RECORD_BYTES
        for wrong in (right ^ 1, right ^ 0x80, right ^ 0xFF):
            data = DATA[:at] + bytes([wrong]) + DATA[at + 1 :]
            records, num_read = whole_records(data, PACK_ID, NUM_SLOTS)
            assert changes_of(records) == [stored(slot) for slot in range(8) if slot != bad]
            assert num_read == (7 if bad == 7 else 8)


@given(
    first=st.integers(0, 55),
    second=st.integers(0, 55),
    flips=st.tuples(st.integers(1, 255), st.integers(1, 255)),
)
def test_two_wrong_bytes_are_noticed(first: int, second: int, flips: tuple[int, int]) -> None:
    data = bytearray(DATA[:RECORD_BYTES])
    data[first] ^= flips[0]
    data[second] ^= flips[1]
    records, _ = whole_records(bytes(data), PACK_ID, NUM_SLOTS)
    assert len(records) == (data == DATA[:RECORD_BYTES])


def test_the_top_bits_of_two_words_are_noticed() -> None:
    for first in range(7, 56, 8):
        for second in range(first + 8, 56, 8):
            data = bytearray(DATA[:RECORD_BYTES])
            data[first] ^= 0x80
            data[second] ^= 0x80
            assert whole_records(bytes(data), PACK_ID, NUM_SLOTS)[1] == 0


@given(data=st.binary(max_size=2000))
def test_other_bytes_are_no_records(data: bytes) -> None:
    assert whole_records(data, PACK_ID, NUM_SLOTS)[1] == 0


@pytest.mark.parametrize("data", [bytes(512), b"\xff" * 512])
def test_zeros_and_ones_are_no_records(data: bytes) -> None:
    assert whole_records(data, PACK_ID, NUM_SLOTS)[1] == 0
    assert whole_records(data, bytes(16), NUM_SLOTS)[1] == 0


def test_records_of_another_pack_are_not_taken() -> None:
    assert whole_records(DATA, OTHER_ID, NUM_SLOTS)[1] == 0


@pytest.mark.parametrize(
    ("change", "num_slots"),
    [
        (Change(Kind.STORED, NUM_SLOTS, b"a"), NUM_SLOTS),
        (Change(Kind.STORED, 2**32 - 1, b"a"), NUM_SLOTS),
        (Change(Kind.STORED, 1, b""), NUM_SLOTS),
        (Change(Kind(1), 0, b"a"), 0),
    ],
)
def test_a_record_that_says_what_cannot_be_is_passed_over(change: Change, num_slots: int) -> None:
    assert whole_records(pack_changes([change], PACK_ID), PACK_ID, num_slots)[1] == 0


def test_records_in_another_order_are_read_in_it() -> None:
    reversed_data = b"".join(DATA[start : start + RECORD_BYTES] for start in range(448, -1, -RECORD_BYTES))
    assert changes_of(whole_records(reversed_data, PACK_ID, NUM_SLOTS)[0]) == [
        stored(slot) for slot in range(7, -1, -1)
    ]
