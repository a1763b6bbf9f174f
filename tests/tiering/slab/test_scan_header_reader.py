"""All headers are read, by however many threads; what stops one of them stops the reading."""

import os
import threading
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import HANG_GUARD_S, StartTier, capacity_of, end, offset_of
from tests.tiering.slab.disk import flip, slot_of

from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, content_of, key_of
from kvtier.tiering.slab import reopening
from kvtier.tiering.slab.scan import NUM_READERS, STRETCH_SLOTS, FoundBlock, HeaderReader, Headers
from kvtier.tiering.slab.slab_file import Buffers, SlabFile, SystemCalls
from kvtier.tiering.slab.superblock import SlabGeometry

ODD_NUM_SLOTS = 2 * NUM_READERS * STRETCH_SLOTS + 3


def header(generation: int, oldest: int) -> Headers:
    """Return what one header says."""
    return Headers(
        [FoundBlock(generation, generation, bytes(16), key_of(1))],
        newest=generation,
        oldest_unfinished=oldest,
    )


@pytest.mark.parametrize("order", [(3, 9, 5), (9, 5, 3), (3, 5, 9)])
def test_the_newest_header_says_what_was_unfinished_wherever_it_was_read(order: tuple[int, ...]) -> None:
    headers = Headers()
    for generation in order:
        headers.add(header(generation, generation - 2))
    assert (headers.newest, headers.oldest_unfinished) == (9, 7)
    assert sorted(block.generation for block in headers.blocks) == [3, 5, 9]


def test_a_restart_of_a_slab_of_any_length_finds_every_block(start_tier: StartTier) -> None:
    capacity_bytes = capacity_of(ODD_NUM_SLOTS)
    driver = start_tier(capacity_bytes=capacity_bytes)
    for first in range(0, ODD_NUM_SLOTS, NUM_ROWS):
        numbers = list(range(first, min(first + NUM_ROWS, ODD_NUM_SLOTS)))
        assert driver.store(numbers).success
    end(driver)
    driver = start_tier(capacity_bytes=capacity_bytes)
    assert driver.tier.stats()["indexed_blocks"] == ODD_NUM_SLOTS
    wanted = [0, STRETCH_SLOTS - 1, STRETCH_SLOTS, ODD_NUM_SLOTS - 1]
    assert driver.load(wanted).success
    for slot, number in enumerate(wanted):
        assert bytes(driver.rows[slot]) == bytes(content_of(number))


def test_only_what_the_newest_header_says_is_suspected(start_tier: StartTier, path: Path) -> None:
    num_slots = 3 * STRETCH_SLOTS
    driver = start_tier(capacity_bytes=capacity_of(num_slots))
    for number in range(num_slots + 1):
        driver.store([number])
    end(driver)
    # The newest block took the first slot; the one in the last slot was whole before it was written.
    for number in (num_slots - 1, num_slots):
        flip(path, offset_of(slot_of(path, number)) + 5000)
    driver = start_tier(capacity_bytes=capacity_of(num_slots))
    assert driver.lookup(num_slots - 1)
    assert not driver.lookup(num_slots)


def open_file(path: Path, num_slots: int, calls: SystemCalls) -> SlabFile:
    """Return an open file of slots that hold nothing."""
    geometry = SlabGeometry(ROW_BYTES, num_slots)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, geometry.file_bytes)
    return SlabFile(path, fd, geometry, is_new=False, has_direct_io=False, calls=calls)


def test_a_reading_that_is_stopped_leaves_no_thread_and_goes_on_with_no_slot(path: Path) -> None:
    stopped = threading.Event()
    slots_read: list[int] = []

    def preadv(fd: int, buffers: Buffers, offset: int) -> int:
        slots_read.append(offset)
        if len(slots_read) == 20:
            stopped.set()
        return os.preadv(fd, buffers, offset)

    file = open_file(path, ODD_NUM_SLOTS, SystemCalls(preadv=preadv))
    before = threading.active_count()
    headers = HeaderReader(file, stopped.is_set).read()
    assert threading.active_count() == before
    assert 20 <= len(headers.free) <= 20 + NUM_READERS
    file.close()


def test_no_slot_is_read_twice_and_none_is_left_out(path: Path) -> None:
    file = open_file(path, ODD_NUM_SLOTS, SystemCalls())
    headers = HeaderReader(file, lambda: False).read()
    assert sorted(headers.free) == list(range(ODD_NUM_SLOTS))
    file.close()


class UnforeseenError(Exception):
    """What no code expects."""


@pytest.mark.parametrize("bad_slot", [0, ODD_NUM_SLOTS - 1])
def test_what_stops_one_thread_leaves_the_slab_unused_instead_of_half_known(
    start_tier: StartTier, bad_slot: int, caplog: pytest.LogCaptureFixture
) -> None:
    def preadv(fd: int, buffers: Buffers, offset: int) -> int:
        if offset == offset_of(bad_slot):
            raise UnforeseenError
        return os.preadv(fd, buffers, offset)

    driver = start_tier(capacity_bytes=capacity_of(ODD_NUM_SLOTS))
    driver.store([1, 2])
    end(driver)
    driver = start_tier(capacity_bytes=capacity_of(ODD_NUM_SLOTS), calls=SystemCalls(preadv=preadv))
    assert not driver.lookup(1)
    assert not driver.store([3]).success
    stats = driver.tier.stats()
    assert stats["indexed_blocks"] == stats["free_slots"] == 0
    assert "is not used" in caplog.text


def test_slots_that_cannot_be_read_are_named_once(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start_tier()
    driver.store([1])
    end(driver)

    def preadv(fd: int, buffers: Buffers, offset: int) -> int:
        if offset >= offset_of(7) and len(buffers) == 1:
            raise OSError(5, "broken disk")
        return os.preadv(fd, buffers, offset)

    driver = start_tier(calls=SystemCalls(preadv=preadv))
    assert driver.lookup(1)
    assert driver.tier.stats()["free_slots"] == 6
    (line,) = [line for line in caplog.messages if "cannot be read" in line]
    assert "57 slots" in line
    assert "first 7" in line


def test_a_disk_that_hangs_on_every_header_keeps_no_file_and_no_shutdown_waiting(
    start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reopening, "CLOSE_TIMEOUT_S", 0.01)
    opened, entered = threading.Event(), threading.Semaphore(0)

    def preadv(fd: int, buffers: Buffers, offset: int) -> int:
        if offset > 0 and len(buffers) == 1:
            entered.release()
            assert opened.wait(HANG_GUARD_S)
        return os.preadv(fd, buffers, offset)

    end(start_tier(capacity_bytes=capacity_of(ODD_NUM_SLOTS)))
    driver = start_tier(
        capacity_bytes=capacity_of(ODD_NUM_SLOTS), calls=SystemCalls(preadv=preadv), is_indexed=False
    )
    for _ in range(NUM_READERS):
        assert entered.acquire(timeout=HANG_GUARD_S)
    assert driver.tier.shutdown(HANG_GUARD_S)
    readers = [thread for thread in threading.enumerate() if "kvtier-slab-index" in thread.name]
    assert len(readers) == NUM_READERS
    # The end of the process does not wait for a daemon either.
    assert all(thread.daemon for thread in readers)
    opened.set()
    for thread in readers:
        thread.join(HANG_GUARD_S)
    assert not any(thread.is_alive() for thread in readers)
