"""The tier finds what is in the file without asking it on the scheduler's thread, and nothing waits for ever."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiering.slab.conftest import HANG_GUARD_S, StartTier, capacity_of, end

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError, TierError, UnknownNameError
from kvtier.namespace import RANDOM_SEED
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, content_of, key_of, make_config, make_rows
from kvtier.tiering.base import TierSettings
from kvtier.tiering.slab import SlabTier, reopening
from kvtier.tiering.slab.slab_file import Buffers, SystemCalls

REQUEST = ReqContext("request")


def test_lookups_are_answered_at_once_from_the_index(start_tier: StartTier) -> None:
    driver = start_tier()
    driver.store([1])
    end(driver)
    driver = start_tier()
    assert driver.tier.lookup(key_of(1), REQUEST) is True
    assert driver.tier.lookup(key_of(2), REQUEST) is False
    driver.store([2])
    assert driver.tier.lookup(key_of(2), REQUEST) is True
    assert driver.tier.stats()["lookup_sent"] == 0


def test_a_key_that_no_envelope_takes_is_not_held(start_tier: StartTier) -> None:
    assert start_tier().tier.lookup(OffloadKey(bytes(41)), REQUEST) is False


class SlowHeaders:
    """A disk that gives no header but that of the first page until it is told to."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.opened = threading.Event()
        self.calls = SystemCalls(preadv=self.preadv)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read, headers when allowed."""
        if offset > 0 and len(buffers) == 1:
            self.asked.set()
            assert self.opened.wait(HANG_GUARD_S)
        return os.preadv(fd, buffers, offset)


@pytest.fixture
def rebuilding(start_tier: StartTier) -> Iterator[tuple[SlowHeaders, TierDriver]]:
    """A tier with block 1 in its file, whose index waits for the disk."""
    driver = start_tier()
    driver.store([1])
    end(driver)
    disk = SlowHeaders()
    driver = start_tier(calls=disk.calls, is_indexed=False)
    yield disk, driver
    disk.opened.set()


def test_while_the_index_is_rebuilt_an_unknown_key_is_asked_and_then_known(
    rebuilding: tuple[SlowHeaders, TierDriver],
) -> None:
    disk, driver = rebuilding
    assert driver.tier.lookup(key_of(1), REQUEST) is None
    driver.tier.end_step()
    disk.opened.set()
    assert driver.lookup(1) is True
    assert driver.tier.wait_indexed(HANG_GUARD_S)
    driver.poll_until(lambda: key_of(1) in (driver.tier.drain_answered() or ()))
    assert driver.load([1]).success


@pytest.mark.slow
def test_while_the_index_is_rebuilt_nothing_is_stored_and_nobody_waits_for_ever(
    rebuilding: tuple[SlowHeaders, TierDriver],
) -> None:
    _, driver = rebuilding
    assert driver.lookup(1) is False
    result = driver.store([2])
    assert not result.success
    assert not result.is_fault
    assert not driver.load([1]).success


def test_a_reset_while_the_index_is_rebuilt_hides_what_is_found(
    rebuilding: tuple[SlowHeaders, TierDriver],
) -> None:
    disk, driver = rebuilding
    driver.tier.reset(bytes(range(16)))
    disk.opened.set()
    assert driver.tier.wait_indexed(HANG_GUARD_S)
    assert driver.tier.lookup(key_of(1), REQUEST) is False
    assert driver.tier.stats()["foreign_slots"] == 1
    assert driver.store([1]).success


def test_a_shutdown_while_the_index_is_rebuilt_ends_questions_and_keeps_the_lock_as_long_as_the_disk_hangs(
    rebuilding: tuple[SlowHeaders, TierDriver], start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reopening, "CLOSE_TIMEOUT_S", 0.01)
    disk, driver = rebuilding
    assert driver.tier.lookup(key_of(1), REQUEST) is None
    driver.tier.end_step()
    assert disk.asked.wait(HANG_GUARD_S)
    assert driver.tier.shutdown(HANG_GUARD_S)
    with pytest.raises(TierError, match="that is running"):
        start_tier()
    disk.opened.set()


def test_what_was_stored_before_a_reset_is_found_again_after_a_restart(start_tier: StartTier) -> None:
    driver = start_tier()
    driver.store([1])
    driver.tier.reset(bytes(range(16)))
    assert not driver.lookup(1)
    driver.store([2])
    end(driver)
    driver = start_tier()
    assert driver.lookup(1)
    assert not driver.lookup(2)
    assert driver.load([1]).success


def test_after_a_reset_old_slots_go_before_new_blocks(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=capacity_of(4))
    driver.store([1, 2, 3])
    driver.tier.reset(bytes(range(16)))
    for number in (4, 5, 6, 7):
        driver.store([number])
    assert all(driver.lookup(number) for number in (4, 5, 6, 7))
    assert driver.tier.stats()["evicted_blocks"] == 0
    assert driver.load([4, 5, 6, 7]).success


def test_engines_take_turns_with_one_file(start_tier: StartTier) -> None:
    for model, number in (("model-a", 1), ("model-b", 2), ("model-a", 3)):
        driver = start_tier(model)
        assert driver.store([number]).success
        end(driver)
    driver = start_tier("model-a")
    assert [driver.lookup(number) for number in (1, 2, 3)] == [True, False, True]


def test_a_policy_that_nobody_registered_is_refused_before_a_file_is_made(
    start_tier: StartTier, path: Path
) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'lru'"):
        start_tier(settings=TierSettings(policy="lruu"))
    assert not path.exists()


def test_a_random_hash_seed_is_refused_before_a_file_is_made(path: Path) -> None:
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=ROW_BYTES)
    config = OffloadingConfig("engine", ModelIdentity("model"), (group,), 16, hash_seed=RANDOM_SEED)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        SlabTier(config, make_rows(), path=path, capacity_bytes="1MiB")
    assert not path.exists()


def test_the_schedulers_thread_never_touches_the_disk(start_tier: StartTier) -> None:
    scheduler = threading.current_thread()
    is_armed = False

    def watch() -> None:
        assert not (is_armed and threading.current_thread() is scheduler), "the scheduler touched the disk"

    def pwritev(fd: int, buffers: Buffers, offset: int) -> int:
        watch()
        return os.pwritev(fd, buffers, offset)

    def preadv(fd: int, buffers: Buffers, offset: int) -> int:
        watch()
        return os.preadv(fd, buffers, offset)

    driver = start_tier(calls=SystemCalls(pwritev=pwritev, preadv=preadv))
    is_armed = True
    driver.store([1, 2])
    assert driver.lookup(1)
    assert not driver.lookup(3)
    assert driver.load([1, 2]).success
    driver.tier.touch([key_of(1)], REQUEST)
    driver.tier.reset(bytes(16))
    driver.store([1])
    driver.tier.stats()
    assert driver.load([1]).success


def test_shutdown_ends_every_thread(path: Path) -> None:
    rows = make_rows()
    tier = SlabTier(make_config(), rows, path=path, capacity_bytes="1MiB")
    TierDriver(tier, rows).store([1])
    assert tier.shutdown(HANG_GUARD_S)
    for thread in threading.enumerate():
        if "kvtier-slab" in thread.name:
            thread.join(HANG_GUARD_S)  # a thread may need a moment from saying that it ends to its end
    assert not [thread for thread in threading.enumerate() if "kvtier-slab" in thread.name]


def test_no_slot_leaks_under_many_jobs_at_once(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=capacity_of(12))
    for slot in range(16):
        driver.rows[slot] = content_of(slot)
    jobs = []
    for round_number in range(30):
        slots = [(round_number * 5 + step) % 8 for step in range(6)]
        slots = list(dict.fromkeys(slots))
        jobs.append(driver.submit(slots, slots, is_promotion=False))
        wanted = [(round_number + step) % 8 for step in range(4)]
        jobs.append(driver.submit(wanted, [slot + 8 for slot in wanted], is_promotion=True))
    driver.poll_until(lambda: len(driver.results) == len(jobs))
    for slot in range(8):
        assert bytes(driver.rows[slot + 8]) in (bytes(content_of(slot)), bytes(content_of(slot + 8)))
    stats = driver.tier.stats()
    assert stats["free_slots"] + stats["foreign_slots"] + stats["indexed_blocks"] == 12
