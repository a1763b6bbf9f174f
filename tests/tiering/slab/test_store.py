"""A block that is damaged, foreign, gone or too much costs itself only, and is counted with its reason."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.slab.conftest import HANG_GUARD_S, StartTier, capacity_of, end, offset_of
from tests.tiering.slab.disk import change, envelopes, flip, slot_of

from kvtier.base import ReqContext
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver, content_of, key_of
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.kit import envelope
from kvtier.tiering.slab.reopening import CHECK_S
from kvtier.tiering.slab.slab_file import Buffers, SystemCalls

SLOT_BYTES = ROW_BYTES + 4096
REQUEST = ReqContext("request")


def failed_alone(driver: TierDriver, number: int) -> bool:
    """Load ``number`` between two good blocks; return whether it failed and the others succeeded."""
    result = driver.load([1, number, 3])
    rows = [bytes(driver.rows[slot]) for slot in (0, 2)]
    assert rows == [bytes(content_of(1)), bytes(content_of(3))]
    return not result.success and result.successful_keys == frozenset({key_of(1), key_of(3)})


@pytest.mark.parametrize("place", [0, 8, 40, 82, 127, 4096, SLOT_BYTES - 1])
def test_a_damaged_block_is_a_miss_counted_and_removed(start_tier: StartTier, path: Path, place: int) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    slot = slot_of(path, 2)
    flip(path, offset_of(slot) + place)
    assert failed_alone(driver, 2)
    assert driver.results[1].is_fault
    assert driver.tier.stats()["damaged"] == 1
    assert not driver.lookup(2)
    assert slot not in envelopes(path)
    assert driver.store([2]).success
    assert driver.load([2]).success


def test_swapped_slots_give_nobody_another_blocks_bytes(start_tier: StartTier, path: Path) -> None:
    driver = start_tier()
    driver.store([1, 2])
    data = path.read_bytes()
    one, two = (offset_of(slot_of(path, number)) for number in (1, 2))
    change(path, one, data[two : two + SLOT_BYTES])
    change(path, two, data[one : one + SLOT_BYTES])
    result = driver.load([1, 2])
    assert not result.success
    assert not result.successful_keys
    assert driver.tier.stats()["damaged"] == 2


@pytest.mark.parametrize("field", ["version", "namespace"])
def test_a_foreign_block_in_a_slot_of_ours_is_a_miss_and_left_alone(
    start_tier: StartTier, path: Path, field: str
) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    offset = offset_of(slot_of(path, 2))
    if field == "version":
        change(path, offset + 4, (envelope.VERSION + 1).to_bytes(2, "little"))
    else:
        row = bytes(content_of(2))
        change(path, offset, envelope.make_header(key_of(2), b"another namespace" * 2, row))
    before = path.read_bytes()
    assert failed_alone(driver, 2)
    assert not driver.results[1].is_fault
    assert driver.tier.stats()["foreign"] == 1
    assert path.read_bytes() == before


def test_a_file_that_somebody_cut_off_has_lost_its_last_blocks(start_tier: StartTier, path: Path) -> None:
    clock = ManualClock()
    driver = start_tier(clock=clock)
    driver.store([1, 2, 3])
    os.truncate(path, offset_of(1) + 5000)
    assert driver.load([1, 2, 3]).is_fault
    clock.advance(CHECK_S)
    driver.load([1])
    assert driver.tier.wait_indexed(HANG_GUARD_S)
    assert driver.load_right([1, 2, 3]) == {1}


def test_what_an_earlier_read_left_in_memory_is_not_taken_for_a_block(
    start_tier: StartTier, path: Path
) -> None:
    driver = start_tier(num_threads=1)
    driver.store([1])
    assert driver.load([1]).success
    os.truncate(path, offset_of(0))
    assert not driver.wait(driver.submit([1], [0], is_promotion=True)).success


def test_an_unreadable_block_is_a_miss_and_kept(start_tier: StartTier, path: Path) -> None:
    broken_offsets: set[int] = set()

    def sometimes_broken(fd: int, buffers: Buffers, offset: int) -> int:
        end_offset = offset + sum(map(len, buffers))
        if any(offset <= bad < end_offset for bad in broken_offsets):
            raise OSError(errno.EIO, "broken disk")
        return os.preadv(fd, buffers, offset)

    driver = start_tier(calls=SystemCalls(preadv=sometimes_broken), num_threads=1)
    driver.store([1, 2, 3])
    broken_offsets.add(offset_of(slot_of(path, 2)) + 6000)
    assert failed_alone(driver, 2)
    assert driver.results[1].is_fault
    assert driver.tier.stats()["io_error"] == 1
    broken_offsets.clear()
    assert driver.load([1, 2, 3]).success


def test_one_bad_place_on_the_disk_does_not_fail_every_store(start_tier: StartTier) -> None:
    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        if offset <= offset_of(1) < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "broken disk")
        return os.pwritev(fd, buffers, offset)

    driver = start_tier(calls=SystemCalls(pwritev=broken), capacity_bytes=capacity_of(4), num_threads=1)
    assert not driver.store([1, 2, 3, 4]).success
    assert all(driver.store([number]).success for number in range(5, 15))
    assert driver.tier.stats()["store_errors"] == 1


@pytest.mark.parametrize("is_short", [True, False])
def test_a_block_that_cannot_be_written_fails_alone_and_leaves_no_header(
    start_tier: StartTier, path: Path, is_short: bool
) -> None:
    unlucky = bytes(content_of(2))

    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        if any(bytes(buffer) == unlucky for buffer in buffers):
            os.pwritev(fd, buffers[:1], offset)
            if not is_short:
                raise OSError(errno.EIO, "broken disk")
            return 0
        return os.pwritev(fd, buffers, offset)

    driver = start_tier(calls=SystemCalls(pwritev=broken), num_threads=1)
    result = driver.store([1, 2, 3])
    assert result.successful_keys == frozenset({key_of(1), key_of(3)})
    assert result.is_fault
    assert driver.tier.stats()["store_errors"] == 1
    assert {entry.key for entry in envelopes(path).values()} == {key_of(1), key_of(3)}
    assert driver.load([1, 3]).success
    assert not driver.lookup(2)


@pytest.mark.parametrize("row_bytes", [2**18, 2**20, 2**21])
def test_a_large_block_that_cannot_be_written_spoils_none_that_is_prepared_before_or_behind_it(
    start_tier: StartTier, row_bytes: int
) -> None:
    unlucky = bytes(content_of(6, row_bytes))

    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        if any(len(buffer) == row_bytes and bytes(buffer) == unlucky for buffer in buffers):
            raise OSError(errno.EIO, "broken disk")
        return os.pwritev(fd, buffers, offset)

    # Taken for direct I/O, and checksums are computed ahead, whatever the file system of the test can do.
    calls = SystemCalls(pwritev=broken, set_flags=lambda fd, flags: None)
    driver = start_tier(row_bytes=row_bytes, capacity_bytes="64MiB", calls=calls)
    numbers = list(range(NUM_ROWS))
    others = set(numbers) - {6}
    assert driver.store(numbers).successful_keys == frozenset(map(key_of, others))
    assert driver.load_right(sorted(others, reverse=True)) == others
    assert driver.tier.stats()["store_errors"] == 1
    assert not driver.lookup(6)


def test_a_call_that_stops_early_is_continued(start_tier: StartTier) -> None:
    def few(buffers: Buffers) -> Buffers:
        return [*buffers[:1], buffers[1][:4096]] if len(buffers) > 1 else [buffers[0][: len(buffers[0]) or 1]]

    calls = SystemCalls(
        pwritev=lambda fd, buffers, offset: os.pwritev(fd, few(buffers), offset),
        preadv=lambda fd, buffers, offset: os.preadv(fd, few(buffers), offset),
    )
    driver = start_tier(calls=calls, num_threads=1)
    assert driver.store([1, 2, 3]).success
    assert driver.load([3, 2, 1]).success
    assert [bytes(row) for row in driver.rows[:3]] == [bytes(content_of(number)) for number in (3, 2, 1)]


class CallCounter:
    """System calls, counted."""

    def __init__(self) -> None:
        self.num_writes = 0
        self.num_reads = 0
        self.calls = SystemCalls(pwritev=self.pwritev, preadv=self.preadv)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write and count."""
        self.num_writes += 1
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read and count."""
        self.num_reads += 1
        return os.preadv(fd, buffers, offset)


def test_neighbouring_slots_are_moved_with_one_call(start_tier: StartTier) -> None:
    counter = CallCounter()
    driver = start_tier(calls=counter.calls, num_threads=1)
    num_writes, num_reads = counter.num_writes, counter.num_reads
    driver.store([1, 2, 3, 4], [9, 3, 12, 0])
    driver.load([4, 2, 1], [5, 6, 7])
    assert counter.num_writes - num_writes == 1
    assert counter.num_reads - num_reads == 2
    assert bytes(driver.rows[5]) == bytes(content_of(4))


def test_a_store_of_a_held_block_writes_nothing(start_tier: StartTier) -> None:
    counter = CallCounter()
    driver = start_tier(calls=counter.calls)
    driver.store([1])
    num_writes = counter.num_writes
    assert driver.store([1]).success
    assert counter.num_writes == num_writes
    assert driver.tier.stats()["stored_blocks"] == 1


def test_a_full_slab_evicts_the_oldest_and_never_grows(start_tier: StartTier, path: Path) -> None:
    driver = start_tier(capacity_bytes=capacity_of(4))
    for number in range(20):
        assert driver.store([number]).success
    assert [number for number in range(20) if driver.lookup(number)] == [16, 17, 18, 19]
    assert path.stat().st_size == capacity_of(4)
    assert driver.tier.stats()["evicted_blocks"] == 16
    assert driver.load([16, 17, 18, 19]).success


def test_the_policy_of_the_settings_decides_who_leaves(start_tier: StartTier) -> None:
    survivors: dict[str | None, list[int]] = {}
    for policy in ("lru", "arc", None):
        driver = start_tier(capacity_bytes=capacity_of(4), settings=TierSettings(policy=policy))
        driver.tier.reset(bytes(16))
        driver.store([1, 2])
        driver.tier.touch([key_of(1), key_of(2)], REQUEST)
        for number in range(10, 20):
            driver.store([number])
        survivors[policy] = [number for number in (1, 2) if driver.lookup(number)]
        end(driver)
    assert survivors == {"lru": [], "arc": [1, 2], None: []}


def test_a_policy_that_learns_keeps_what_comes_back_in_a_slab_that_lru_would_overrun(
    start_tier: StartTier,
) -> None:
    found = {}
    for policy in ("lru", "hazard"):
        clock = ManualClock()
        settings = TierSettings(policy=policy)
        driver = start_tier(capacity_bytes=capacity_of(16), clock=clock, settings=settings)
        driver.tier.reset(bytes(16))
        found[policy] = num_found_of_a_regular(driver.tier, driver, clock)
        end(driver)
    assert found["lru"] == 0
    assert found["hazard"] > 20


def num_found_of_a_regular(tier: SecondaryTierManager, driver: TierDriver, clock: ManualClock) -> int:
    """Let one prompt of four blocks come every 8 s among others that come once; return how often it was found."""
    num_found = 0
    for second in range(400):
        clock.advance(1.0)
        prompt = list(range(4)) if second % 8 == 0 else list(range(10 * second + 10, 10 * second + 14))
        request = ReqContext(str(second))
        tier.note_request([[key_of(number) for number in prompt]], request)
        num_found += prompt[0] == 0 and all(map(driver.lookup, prompt))
        driver.store(prompt)
        tier.request_finished(request)
    return num_found


def test_a_job_larger_than_the_slab_stores_what_fits_and_is_no_fault(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=capacity_of(4), num_threads=1)
    result = driver.store(list(range(NUM_ROWS)))
    assert not result.success
    assert not result.is_fault
    assert result.successful_keys == frozenset(key_of(number) for number in range(4))
    assert driver.tier.stats()["declined"] == NUM_ROWS - 4
    assert driver.load([0, 1, 2, 3]).success


class Gate:
    """A disk whose calls wait until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        self.opened.set()
        self.calls = SystemCalls(pwritev=self.pwritev, preadv=self.preadv)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write when allowed."""
        self._enter()
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read when allowed."""
        self._enter()
        return os.preadv(fd, buffers, offset)

    def shut(self) -> None:
        """Let nobody through."""
        while self.entered.acquire(blocking=False):
            pass
        self.opened.clear()

    def _enter(self) -> None:
        self.entered.release()
        assert self.opened.wait(HANG_GUARD_S)


def test_full_of_blocks_that_are_read_a_store_is_declined_and_that_is_no_fault(start_tier: StartTier) -> None:
    gate = Gate()
    driver = start_tier(num_threads=4, calls=gate.calls, capacity_bytes=capacity_of(2))
    driver.store([1, 2])
    gate.shut()
    reading = driver.submit([1, 2], [4, 5], is_promotion=True)
    for _ in range(2):
        assert gate.entered.acquire(timeout=HANG_GUARD_S)
    result = driver.store([3], [6])
    assert not result.success
    assert not result.is_fault
    assert driver.tier.stats()["declined"] == 1
    gate.opened.set()
    assert driver.wait(reading).success
    assert np.array_equal(driver.rows[5], content_of(2))
    assert driver.store([3], [6]).success


def test_a_read_and_a_write_that_hang_block_no_call_of_the_scheduler(start_tier: StartTier) -> None:
    gate = Gate()
    driver = start_tier(num_threads=4, calls=gate.calls)
    driver.store([1])
    gate.shut()
    jobs = [driver.submit([1], [4], is_promotion=True), driver.submit([2], [5], is_promotion=False)]
    for _ in range(2):
        assert gate.entered.acquire(timeout=HANG_GUARD_S)
    assert driver.tier.lookup(key_of(1), REQUEST) is True
    assert driver.tier.lookup(key_of(2), REQUEST) is False
    driver.tier.touch([key_of(1)], REQUEST)
    driver.tier.reset(bytes(range(16)))
    assert driver.tier.lookup(key_of(1), REQUEST) is False
    assert not driver.tier.shutdown(0.01)
    gate.opened.set()
    assert driver.tier.shutdown(HANG_GUARD_S)
    driver.poll()
    assert sorted(driver.results)[1:] == jobs
