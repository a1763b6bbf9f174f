"""A block that is damaged, foreign, gone or too much costs itself only, and is counted with its reason."""

import errno
import os
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import HANG_GUARD_S, NUM_PACK_SLOTS, bytes_of_packs
from tests.tiering.fs.slots import StoredBlock, stored_blocks

from kvtier.base import ReqContext
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import NUM_ROWS, ROW_BYTES, TierDriver, content_of, key_of
from kvtier.tiering.base import TierSettings
from kvtier.tiering.fs.pack_header import SLOTS_OFFSET
from kvtier.tiering.fs.system_calls import REAL_CALLS, Buffers, SystemCalls
from kvtier.tiering.kit import envelope

SLOT_BYTES = ROW_BYTES + 4096
REQUEST = ReqContext("request")
ONE_PACK = {"capacity_bytes": bytes_of_packs(1), "pack_bytes": bytes_of_packs(1)}


def block_of(root: Path, number: int) -> StoredBlock:
    """Return where a block lies."""
    (found,) = [block for block in stored_blocks(root) if block.name == key_of(number)]
    return found


def failed_alone(driver: TierDriver, number: int) -> bool:
    """Load ``number`` between two good blocks; return whether it failed and the others succeeded."""
    result = driver.load([1, number, 3])
    rows = [bytes(driver.rows[slot]) for slot in (0, 2)]
    assert rows == [bytes(content_of(1)), bytes(content_of(3))]
    return not result.success and result.successful_keys == frozenset({key_of(1), key_of(3)})


def having(buffers: Buffers, number: int, row_bytes: int = ROW_BYTES) -> bool:
    """Return whether a block is among what is written."""
    return any(
        len(one) == row_bytes and bytes(one) == bytes(content_of(number, row_bytes)) for one in buffers
    )


@pytest.mark.parametrize("place", [0, 8, 40, 82, 127, 4096, SLOT_BYTES - 1])
def test_a_damaged_block_is_a_miss_counted_and_dropped(start_tier: StartTier, root: Path, place: int) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    block_of(root, 2).flip(place)
    assert failed_alone(driver, 2)
    assert driver.results[1].is_fault
    assert driver.tier.stats()["damaged"] == 1
    assert not driver.lookup(2)
    assert key_of(2) not in {block.name for block in stored_blocks(root)}
    assert driver.store([2]).success
    assert driver.load_right([1, 2, 3]) == {1, 2, 3}


def test_damage_in_the_unused_part_of_a_header_harms_no_block(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1])
    block_of(root, 1).flip(2000)
    assert driver.load_right([1]) == {1}


def test_swapped_slots_give_nobody_another_blocks_bytes(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    driver.store([1, 2])
    one, two = block_of(root, 1), block_of(root, 2)
    first, second = one.read(), two.read()
    one.write(second)
    two.write(first)
    result = driver.load([1, 2])
    assert not result.success
    assert not result.successful_keys
    assert driver.tier.stats()["damaged"] == 2


@pytest.mark.parametrize("field", ["version", "namespace"])
def test_a_foreign_block_in_a_slot_of_ours_is_a_miss(start_tier: StartTier, root: Path, field: str) -> None:
    driver = start_tier()
    driver.store([1, 2, 3])
    block = block_of(root, 2)
    content = bytearray(block.read())
    if field == "version":
        content[4:6] = (envelope.VERSION + 1).to_bytes(2, "little")
    else:
        header = envelope.make_header(key_of(2), b"another namespace"[:16], bytes(content_of(2)))
        content[: len(header)] = header
    block.write(bytes(content))
    assert failed_alone(driver, 2)
    assert driver.tier.stats()["foreign"] == 1


def test_what_an_earlier_read_left_in_memory_is_not_taken_for_a_block(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier()
    driver.store([1])
    assert driver.load([1]).success
    os.truncate(block_of(root, 1).pack, SLOTS_OFFSET)
    assert not driver.wait(driver.submit([1], [0], is_promotion=True)).success


def test_an_unreadable_block_is_a_miss_and_kept(start_tier: StartTier, root: Path) -> None:
    bad: set[int] = set()

    def sometimes_broken(fd: int, buffers: Buffers, offset: int) -> int:
        if any(offset <= one < offset + sum(map(len, buffers)) for one in bad):
            raise OSError(errno.EIO, "broken disk")
        return REAL_CALLS.preadv(fd, buffers, offset)

    driver = start_tier(calls=replace(REAL_CALLS, preadv=sometimes_broken))
    driver.store([1, 2, 3])
    block = block_of(root, 2)
    bad.add(block.geometry.offset_of(block.slot) + 6000)
    assert failed_alone(driver, 2)
    assert driver.results[1].is_fault
    assert driver.tier.stats()["io_error"] == 1
    bad.clear()
    assert driver.load_right([1, 2, 3]) == {1, 2, 3}


def test_one_bad_slot_does_not_fail_every_store(start_tier: StartTier) -> None:
    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        bad = SLOTS_OFFSET + SLOT_BYTES
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "broken disk")
        return REAL_CALLS.pwritev(fd, buffers, offset)

    driver = start_tier(calls=replace(REAL_CALLS, pwritev=broken), **ONE_PACK)
    assert not driver.store([1, 2, 3, 4]).success
    assert all(driver.store([number]).success for number in range(5, 15))
    assert driver.tier.stats()["store_errors"] == 1
    assert driver.tier.stats()["failed_slots"] == 1


@pytest.mark.parametrize("is_short", [True, False])
def test_a_block_that_cannot_be_written_fails_alone_and_is_in_no_journal(
    start_tier: StartTier, root: Path, is_short: bool
) -> None:
    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        if having(buffers, 2):
            REAL_CALLS.pwritev(fd, buffers[:1], offset)
            if not is_short:
                raise OSError(errno.EIO, "broken disk")
            return 0
        return REAL_CALLS.pwritev(fd, buffers, offset)

    driver = start_tier(calls=replace(REAL_CALLS, pwritev=broken))
    result = driver.store([1, 2, 3])
    assert result.successful_keys == frozenset({key_of(1), key_of(3)})
    assert result.is_fault
    assert driver.tier.stats()["store_errors"] == 1
    assert {block.name for block in stored_blocks(root)} == {key_of(1), key_of(3)}
    assert driver.load_right([1, 3]) == {1, 3}
    assert not driver.lookup(2)


@pytest.mark.parametrize("row_bytes", [2**18, 2**20, 2**21])
def test_a_large_block_that_cannot_be_written_spoils_none_that_is_prepared_before_or_behind_it(
    start_tier: StartTier, row_bytes: int
) -> None:
    def broken(fd: int, buffers: Buffers, offset: int) -> int:
        if having(buffers, 6, row_bytes):
            raise OSError(errno.EIO, "broken disk")
        return REAL_CALLS.pwritev(fd, buffers, offset)

    one_pack = bytes_of_packs(1, NUM_ROWS, row_bytes)
    driver = start_tier(
        row_bytes=row_bytes,
        capacity_bytes=one_pack,
        pack_bytes=one_pack,
        calls=replace(REAL_CALLS, pwritev=broken),
    )
    numbers = list(range(NUM_ROWS))
    others = set(numbers) - {6}
    assert driver.store(numbers).successful_keys == frozenset(map(key_of, others))
    assert driver.load_right(sorted(others, reverse=True)) == others
    assert driver.tier.stats()["store_errors"] == 1
    assert not driver.lookup(6)


def test_a_call_that_stops_early_is_continued(start_tier: StartTier) -> None:
    def few(buffers: Buffers) -> Buffers:
        return [*buffers[:1], buffers[1][:4096]] if len(buffers) > 1 else [buffers[0][: len(buffers[0]) or 1]]

    calls = replace(
        REAL_CALLS,
        pwritev=lambda fd, buffers, offset: REAL_CALLS.pwritev(fd, few(buffers), offset),
        preadv=lambda fd, buffers, offset: REAL_CALLS.preadv(fd, few(buffers), offset),
    )
    driver = start_tier(calls=calls)
    assert driver.store([1, 2, 3]).success
    assert driver.load_right([3, 2, 1]) == {1, 2, 3}


class CallCounter:
    """System calls, counted."""

    def __init__(self) -> None:
        self.num_writes = self.num_reads = self.num_appends = 0
        self.calls = replace(REAL_CALLS, pwritev=self._pwritev, preadv=self._preadv, write=self._write)

    def clear(self) -> None:
        """Count from zero again."""
        self.num_writes = self.num_reads = self.num_appends = 0

    def _pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        self.num_writes += 1
        return REAL_CALLS.pwritev(fd, buffers, offset)

    def _preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        self.num_reads += offset >= SLOTS_OFFSET
        return REAL_CALLS.preadv(fd, buffers, offset)

    def _write(self, fd: int, data: bytes) -> int:
        self.num_appends += 1
        return REAL_CALLS.write(fd, data)


def test_neighbouring_slots_are_moved_with_one_call_and_recorded_with_one(start_tier: StartTier) -> None:
    counter = CallCounter()
    driver = start_tier(calls=counter.calls)
    driver.store([0])
    counter.clear()
    driver.store([1, 2, 3], [9, 3, 12])
    driver.load([3, 1], [5, 6])
    assert (counter.num_writes, counter.num_appends) == (1, 1)
    assert counter.num_reads == 2
    assert bytes(driver.rows[5]) == bytes(content_of(3))


def test_a_store_of_a_held_block_writes_nothing(start_tier: StartTier) -> None:
    counter = CallCounter()
    driver = start_tier(calls=counter.calls)
    driver.store([1])
    counter.clear()
    assert driver.store([1]).success
    assert (counter.num_writes, counter.num_appends) == (0, 0)
    assert driver.tier.stats()["stored_blocks"] == 1


def test_a_full_directory_evicts_the_oldest_and_never_grows(start_tier: StartTier, root: Path) -> None:
    driver = start_tier(**ONE_PACK)
    for number in range(20):
        assert driver.store([number]).success
    assert [number for number in range(20) if driver.lookup(number)] == [16, 17, 18, 19]
    files = [path for path in root.rglob("*") if path.suffix in {".pack", ".index"}]
    assert sum(path.stat().st_blocks * 512 for path in files) <= bytes_of_packs(1)
    assert driver.tier.stats()["evicted_blocks"] == 16
    assert driver.load_right([16, 17, 18, 19]) == {16, 17, 18, 19}


def test_a_use_keeps_a_block(start_tier: StartTier) -> None:
    driver = start_tier(**ONE_PACK)
    for number in range(4):
        driver.store([number])
    driver.tier.touch([key_of(0), key_of(1)], REQUEST)
    driver.store([10])
    driver.store([11])
    assert [number for number in range(4) if driver.lookup(number)] == [0, 1]


def test_the_policy_of_the_settings_decides_who_leaves(start_tier: StartTier) -> None:
    survivors: dict[str | None, list[int]] = {}
    for number, policy in enumerate(("lru", "arc", None)):
        driver = start_tier(f"model-{number}", settings=TierSettings(policy=policy), **ONE_PACK)
        driver.store([1, 2])
        driver.tier.touch([key_of(1), key_of(2)], REQUEST)
        for other in range(10, 20):
            driver.store([other])
        survivors[policy] = [number for number in (1, 2) if driver.lookup(number)]
        assert driver.tier.shutdown(HANG_GUARD_S)
    assert survivors == {"lru": [], "arc": [1, 2], None: []}


def test_a_policy_that_learns_keeps_what_comes_back_where_lru_would_lose_it(start_tier: StartTier) -> None:
    found = {}
    sizes = {"capacity_bytes": bytes_of_packs(1, 16), "pack_bytes": bytes_of_packs(1, 16)}
    for policy in ("lru", "hazard"):
        clock = ManualClock()
        driver = start_tier(policy, clock=clock, settings=TierSettings(policy=policy), **sizes)
        found[policy] = num_found_of_a_regular(driver, clock)
        assert driver.tier.shutdown(HANG_GUARD_S)
    assert found["lru"] == 0
    assert found["hazard"] > 20


def num_found_of_a_regular(driver: TierDriver, clock: ManualClock) -> int:
    """Let one prompt of four blocks come every 8 s among others that come once; return how often it was found."""
    num_found = 0
    for second in range(400):
        clock.advance(1.0)
        prompt = list(range(4)) if second % 8 == 0 else list(range(10 * second + 10, 10 * second + 14))
        request = ReqContext(str(second))
        driver.tier.note_request([[key_of(number) for number in prompt]], request)
        num_found += prompt[0] == 0 and all(map(driver.lookup, prompt))
        driver.store(prompt)
        driver.tier.request_finished(request)
    return num_found


def test_a_job_larger_than_the_capacity_stores_what_fits_and_is_no_fault(start_tier: StartTier) -> None:
    driver = start_tier(**ONE_PACK)
    result = driver.store(list(range(NUM_ROWS)))
    assert not result.success
    assert not result.is_fault
    assert result.successful_keys == frozenset(key_of(number) for number in range(NUM_PACK_SLOTS))
    assert driver.tier.stats()["declined"] == NUM_ROWS - NUM_PACK_SLOTS
    assert driver.load_right([0, 1, 2, 3]) == {0, 1, 2, 3}


def test_jobs_at_once_evict_nothing_while_there_is_room(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=bytes_of_packs(128), num_threads=8)
    for first in range(0, 256, NUM_ROWS):
        assert driver.store(list(range(first, first + NUM_ROWS))).success
    assert driver.tier.stats()["evicted_blocks"] == 0
    assert held(driver, range(256)) == set(range(256))


@pytest.mark.parametrize("call", ["fallocate", "open"])
def test_a_full_disk_is_said_once_and_evicts_and_grows_again_when_it_has_room(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    full = threading.Event()
    clock = ManualClock()

    def refuse(*arguments: object) -> object:
        is_growth = call == "fallocate" or bool(int(str(arguments[1])) & os.O_CREAT)
        if full.is_set() and is_growth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(REAL_CALLS, call)(*arguments)

    calls = replace(REAL_CALLS, **{call: refuse})  # type: ignore[arg-type]  # a call of the same name
    driver = start_tier(calls=calls, clock=clock)
    assert driver.store([0, 1, 2, 3]).success
    full.set()
    for number in range(10, 20):
        clock.advance(10.0)
        assert driver.store([number]).success
    assert driver.tier.stats()["own_packs"] == 1
    assert driver.tier.stats()["evicted_blocks"] == 10
    assert len([one for one in caplog.records if "no pack can be made" in one.getMessage()]) == 1
    full.clear()
    clock.advance(10.0)
    assert driver.store([30, 31, 32]).success
    assert driver.tier.stats()["own_packs"] == 2


def test_stores_that_the_system_refuses_are_said_once(
    start_tier: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()

    def refuse(fd: int, buffers: Buffers, offset: int) -> int:
        if broken.is_set() and offset >= SLOTS_OFFSET:
            raise OSError(errno.EIO, "broken disk")
        return REAL_CALLS.pwritev(fd, buffers, offset)

    driver = start_tier(calls=replace(REAL_CALLS, pwritev=refuse))
    driver.store([1])
    broken.set()
    for number in range(10, 15):
        result = driver.store([number])
        assert (result.success, result.is_fault) == (False, True)
    assert len([one for one in caplog.records if "a block was not written" in one.getMessage()]) == 1
    broken.clear()
    assert driver.store([2]).success
    assert driver.load_right([1, 2]) == {1, 2}


class Gate:
    """A disk whose calls on slots wait until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        self.opened.set()
        self.calls: SystemCalls = replace(REAL_CALLS, pwritev=self._pwritev, preadv=self._preadv)

    def shut(self) -> None:
        """Let nobody through."""
        while self.entered.acquire(blocking=False):
            pass
        self.opened.clear()

    def _pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        self._enter(offset)
        return REAL_CALLS.pwritev(fd, buffers, offset)

    def _preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        self._enter(offset)
        return REAL_CALLS.preadv(fd, buffers, offset)

    def _enter(self, offset: int) -> None:
        if offset >= SLOTS_OFFSET:
            self.entered.release()
            assert self.opened.wait(HANG_GUARD_S)


def test_full_of_blocks_that_are_read_a_store_is_declined_and_that_is_no_fault(start_tier: StartTier) -> None:
    gate = Gate()
    two_slots = bytes_of_packs(1, 2)
    driver = start_tier(num_threads=4, calls=gate.calls, capacity_bytes=two_slots, pack_bytes=two_slots)
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


def test_a_tail_record_that_is_lost_costs_its_block_alone(start_tier: StartTier, root: Path) -> None:
    driver = start_tier()
    for number in (1, 2, 3):
        driver.store([number])
    assert driver.tier.shutdown(HANG_GUARD_S)
    (journal,) = root.rglob("*.index")
    content = journal.read_bytes()
    journal.write_bytes(content[: len(content) - 10])
    again = start_tier()
    assert held(again, range(1, 4)) == {1, 2}
    assert again.load_right([1, 2]) == {1, 2}
    assert again.store([3]).success


def held(driver: TierDriver, numbers: Collection[int]) -> set[int]:
    """Return which blocks are found."""
    return {number for number in numbers if driver.lookup(number)}
