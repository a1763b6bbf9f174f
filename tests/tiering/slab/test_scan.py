"""What a slab holds is found again from the headers of its slots, and only what is whole."""

import errno
import os
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import StartTier, capacity_of, end, offset_of
from tests.tiering.slab.disk import change, envelopes, flip, slot_of

from kvtier.namespace import Namespace
from kvtier.testing.tier_suite import ROW_BYTES, content_of, key_of
from kvtier.tiering.kit import envelope
from kvtier.tiering.slab.scan import FoundBlock, oldest_unfinished, sort_out
from kvtier.tiering.slab.slab_file import Buffers, SystemCalls
from kvtier.tiering.slab.slot_table import SlabNamespace

OURS, THEIRS = bytes(32), b"\1" * 32
OUR_NAMESPACE = SlabNamespace(Namespace("", OURS))


def found(generation: int, slot: int, number: int, namespace: bytes = OURS) -> FoundBlock:
    """Return a whole block as a scan saw it."""
    return FoundBlock(generation, slot, namespace[:16], key_of(number))


def test_the_newest_generation_of_a_key_counts_and_the_others_are_free() -> None:
    blocks = [found(7, 0, 1), found(9, 1, 1), found(8, 2, 1), found(5, 3, 2)]
    contents = sort_out(blocks, [4], [], OUR_NAMESPACE)
    assert list(contents.slot_of.items()) == [(key_of(2), 3), (key_of(1), 1)]
    assert list(contents.free) == [0, 2, 4]
    assert contents.next_generation == 10


def test_slots_of_others_are_kept_oldest_first_behind_what_nobody_understands() -> None:
    blocks = [found(7, 0, 1, THEIRS), found(3, 1, 1, THEIRS), found(5, 2, 1)]
    contents = sort_out(blocks, [], [8, 6], OUR_NAMESPACE)
    assert list(contents.foreign) == [6, 8, 1, 0]
    assert contents.slot_of == {key_of(1): 2}
    assert contents.next_generation == 8


def test_an_empty_slab_begins_with_generation_one() -> None:
    assert sort_out([], [0, 1], [], OUR_NAMESPACE).next_generation == 1


def test_a_restart_finds_everything(start_tier: StartTier) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    end(driver)
    driver = start_tier()
    assert driver.tier.stats()["indexed_blocks"] == 3
    assert driver.load([3, 1, 2]).success
    assert bytes(driver.rows[0]) == bytes(content_of(3))


def test_after_a_restart_the_blocks_written_first_leave_first(start_tier: StartTier) -> None:
    capacity_bytes = capacity_of(4)
    driver = start_tier(capacity_bytes=capacity_bytes)
    driver.store([1, 2, 3, 4])
    driver.store([5])
    end(driver)
    driver = start_tier(capacity_bytes=capacity_bytes)
    driver.store([6])
    assert [driver.lookup(number) for number in (2, 3, 4, 5, 6)] == [False, True, True, True, True]


@pytest.mark.parametrize("place", [0, 8, 40, 82, 127])
def test_a_damaged_header_is_an_empty_slot(start_tier: StartTier, path: Path, place: int) -> None:
    driver = start_tier()
    driver.store([1, 2])
    end(driver)
    flip(path, offset_of(slot_of(path, 1)) + place)
    driver = start_tier()
    assert not driver.lookup(1)
    assert driver.load([2]).success
    assert driver.tier.stats()["free_slots"] == 63


def test_a_torn_last_write_is_an_empty_slot_and_stays_one(start_tier: StartTier, path: Path) -> None:
    driver = start_tier()
    driver.store([1])
    driver.store([2])
    end(driver)
    flip(path, offset_of(slot_of(path, 2)) + 4096 + ROW_BYTES - 1)
    for _ in range(2):
        driver = start_tier()
        assert driver.tier.stats()["indexed_blocks"] == 1
        assert not driver.lookup(2)
        end(driver)
    assert [entry.key for entry in envelopes(path).values()] == [key_of(1)]


def test_every_write_that_had_not_ended_is_checked(start_tier: StartTier, path: Path) -> None:
    driver = start_tier()
    driver.store([1])
    driver.store([2, 3, 4])
    driver.store([5])
    end(driver)
    newest = slot_of(path, 5)
    page = path.read_bytes()[offset_of(newest) :][:4096]
    assert oldest_unfinished(page) == 5
    for number in (1, 2, 3):
        flip(path, offset_of(slot_of(path, number)) + 5000)
    oldest = envelopes(path)[slot_of(path, 2)].generation
    change(path, offset_of(newest) + envelope.ENVELOPE_BYTES, oldest.to_bytes(8, "little"))
    driver = start_tier()
    # Block 1 was whole before that crash; what happened to it since is found out when it is loaded.
    assert [driver.lookup(number) for number in (1, 2, 3, 4, 5)] == [True, False, False, True, True]
    assert not driver.load([1]).success


def test_blocks_of_another_model_are_kept_until_their_slots_are_needed(start_tier: StartTier) -> None:
    capacity_bytes = capacity_of(4)
    driver = start_tier(capacity_bytes=capacity_bytes)
    driver.store([1, 2])
    end(driver)
    driver = start_tier("model-b", capacity_bytes=capacity_bytes)
    assert driver.tier.stats()["foreign_slots"] == 2
    assert not driver.lookup(1)
    assert not driver.load([1]).success
    driver.store([1, 3, 4])
    end(driver)
    driver = start_tier(capacity_bytes=capacity_bytes)
    assert [driver.lookup(number) for number in (1, 2, 3)] == [False, True, False]
    assert driver.load([2]).success
    end(driver)
    driver = start_tier("model-b", capacity_bytes=capacity_bytes)
    assert driver.load([1, 3, 4]).success


def test_a_header_of_another_version_is_left_until_its_slot_is_needed(
    start_tier: StartTier, path: Path
) -> None:
    driver = start_tier()
    driver.store([1, 2])
    end(driver)
    place = offset_of(slot_of(path, 1)) + 4
    change(path, place, (envelope.VERSION + 1).to_bytes(2, "little"))
    driver = start_tier()
    assert driver.tier.stats()["foreign_slots"] == 1
    assert not driver.lookup(1)
    end(driver)
    assert int.from_bytes(path.read_bytes()[place : place + 2], "little") == envelope.VERSION + 1


def test_a_slot_that_cannot_be_read_is_not_used(start_tier: StartTier, path: Path) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    end(driver)
    bad_offset = offset_of(slot_of(path, 2))

    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        if offset == bad_offset:
            raise OSError(errno.EIO, "broken disk")
        return os.preadv(fd, buffers, offset)

    driver = start_tier(calls=SystemCalls(preadv=broken))
    assert [driver.lookup(number) for number in (1, 2, 3)] == [True, False, True]
    stats = driver.tier.stats()
    assert stats["free_slots"] + stats["indexed_blocks"] == 63
