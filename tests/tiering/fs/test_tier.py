"""The tier finds what is in the directory without asking it on the scheduler's thread, and nothing waits for ever."""

import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import HANG_GUARD_S, bytes_of_packs, start_driver, tick

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.namespace import RANDOM_SEED
from kvtier.testing.tier_driver import ROW_BYTES, TierDriver, content_of, key_of, make_config, make_rows
from kvtier.tiering.base import TierSettings
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls

REQUEST = ReqContext("request")


def test_lookups_are_answered_at_once_from_memory(start_tier: StartTier) -> None:
    driver = start_tier()
    driver.store([1])
    assert driver.tier.shutdown(HANG_GUARD_S)
    driver = start_tier()
    assert driver.tier.lookup(key_of(1), REQUEST) is True
    assert driver.tier.lookup(key_of(2), REQUEST) is False
    driver.store([2])
    assert driver.tier.lookup(key_of(2), REQUEST) is True
    assert driver.tier.stats()["lookup_sent"] == 0


def test_a_key_that_no_envelope_takes_is_not_held(start_tier: StartTier) -> None:
    assert start_tier().tier.lookup(OffloadKey(bytes(41)), REQUEST) is False


@pytest.fixture
def unread(start_tier: StartTier, root: Path) -> Iterator[TierDriver]:
    """A tier with block 1 in its directory, whose keeper has not looked yet."""
    driver = start_tier()
    driver.store([1])
    assert driver.tier.shutdown(HANG_GUARD_S)
    rows = make_rows()
    tier = FSTier(
        make_config(),
        rows,
        root_dir=root,
        capacity_bytes=bytes_of_packs(16),
        pack_bytes=bytes_of_packs(1),
        has_thread=False,
    )
    driver = TierDriver(tier, rows)
    yield driver
    assert driver.tier.shutdown(HANG_GUARD_S)


def test_until_the_directory_was_read_an_unknown_key_is_asked_for_and_then_known(unread: TierDriver) -> None:
    assert unread.tier.lookup(key_of(1), REQUEST) is None
    unread.tier.end_step()
    tick([unread])
    assert unread.lookup(1) is True
    assert unread.load_right([1]) == {1}


def test_a_reset_before_the_directory_was_read_hides_what_is_found(unread: TierDriver) -> None:
    unread.tier.reset(bytes(range(16)))
    tick([unread])
    assert unread.tier.lookup(key_of(1), REQUEST) is False
    assert unread.store([1]).success
    assert unread.load_right([1]) == {1}


@pytest.mark.slow
def test_a_store_before_the_directory_was_read_is_kept_beside_what_is_found(unread: TierDriver) -> None:
    assert unread.store([2]).success
    tick([unread])
    unread.poll_until(lambda: unread.lookup(1))
    assert unread.load_right([1, 2]) == {1, 2}


def test_what_was_stored_before_a_reset_is_found_again_after_a_restart(start_tier: StartTier) -> None:
    driver = start_tier()
    driver.store([1])
    driver.tier.reset(bytes(range(16)))
    assert not driver.lookup(1)
    driver.store([2])
    assert driver.tier.shutdown(HANG_GUARD_S)
    driver = start_tier()
    assert driver.lookup(1)
    assert not driver.lookup(2)
    assert driver.load_right([1]) == {1}


def test_after_a_reset_old_packs_go_before_new_blocks(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=bytes_of_packs(2))
    for number in range(8):
        driver.store([number])
    driver.tier.reset(bytes(range(16)))
    tick([driver])
    for number in range(10, 18):
        assert driver.store([number]).success
    assert all(driver.lookup(number) for number in range(10, 18))
    assert driver.tier.stats()["evicted_blocks"] == 0


def test_jobs_under_way_at_a_reset_end_in_the_namespace_they_began_in(start_tier: StartTier) -> None:
    entered, opened = threading.Event(), threading.Event()

    def write(fd: int, data: bytes) -> int:
        entered.set()
        assert opened.wait(HANG_GUARD_S)
        return REAL_CALLS.write(fd, data)

    driver = start_tier(calls=replace(REAL_CALLS, write=write))
    driver.place([1], [0])
    job = driver.submit([1], [0], is_promotion=False)
    assert entered.wait(HANG_GUARD_S)
    driver.tier.reset(bytes(range(16)))
    opened.set()
    driver.wait(job)
    assert not driver.lookup(1)
    assert driver.store([1]).success
    assert driver.load_right([1]) == {1}
    assert driver.tier.shutdown(HANG_GUARD_S)


def test_engines_of_two_models_take_turns_in_one_directory(start_tier: StartTier) -> None:
    for model, number in (("model-a", 1), ("model-b", 2), ("model-a", 3)):
        driver = start_tier(model)
        assert driver.store([number]).success
        assert driver.tier.shutdown(HANG_GUARD_S)
    driver = start_tier("model-a")
    assert [driver.lookup(number) for number in (1, 2, 3)] == [True, False, True]


def test_a_policy_that_nobody_registered_is_refused(start_tier: StartTier, root: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'lru'"):
        start_tier(settings=TierSettings(policy="lruu"))
    assert not list(root.rglob("*.pack"))


def test_a_random_hash_seed_is_refused_before_a_file_is_made(root: Path) -> None:
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=ROW_BYTES)
    config = OffloadingConfig("engine", ModelIdentity("model"), (group,), 16, hash_seed=RANDOM_SEED)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        start_driver(config, root_dir=root)
    assert not root.exists()


def test_the_schedulers_thread_never_touches_the_disk(root: Path) -> None:
    scheduler = threading.current_thread()
    touched: list[str] = []
    is_armed = False

    def watched(name: str) -> object:
        real = getattr(REAL_CALLS, name)

        def call(*arguments: object) -> object:
            if is_armed and threading.current_thread() is scheduler:
                touched.append(name)
            return real(*arguments)

        return call

    calls = SystemCalls(**{one.name: watched(one.name) for one in fields(SystemCalls)})  # type: ignore[arg-type]
    rows = make_rows()
    tier = FSTier(make_config(), rows, root_dir=root, capacity_bytes="1MiB", calls=calls)
    assert tier.wait_indexed(HANG_GUARD_S)
    driver = TierDriver(tier, rows)
    is_armed = True
    driver.store([1, 2])
    assert driver.lookup(1)
    assert not driver.lookup(3)
    assert driver.load([1, 2]).success
    tier.touch([key_of(1)], REQUEST)
    tier.drop([key_of(2)])
    tier.reset(bytes(16))
    driver.store([1])
    tier.stats()
    tier.drain_evicted()
    tier.explain(key_of(9), REQUEST)
    assert driver.load([1]).success
    is_armed = False
    assert touched == []
    assert tier.shutdown(HANG_GUARD_S)


def test_shutdown_ends_every_thread_and_closes_every_file(root: Path) -> None:
    rows = make_rows()
    tier = FSTier(make_config(), rows, root_dir=root, capacity_bytes="1MiB")
    TierDriver(tier, rows).store([1])
    assert tier.shutdown(HANG_GUARD_S)
    for thread in threading.enumerate():
        if "kvtier-fs" in thread.name:
            thread.join(HANG_GUARD_S)  # a thread may need a moment from saying that it ends to its end
    assert not [thread for thread in threading.enumerate() if "kvtier-fs" in thread.name]
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if str(link.readlink()).startswith(str(root))]
    assert not list(root.glob("*.notes"))


def test_no_slot_leaks_under_many_jobs_at_once(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=bytes_of_packs(3), num_threads=4)
    for slot in range(16):
        driver.rows[slot] = content_of(slot)
    jobs = []
    for round_number in range(30):
        slots = list(dict.fromkeys((round_number * 5 + step) % 8 for step in range(6)))
        jobs.append(driver.submit(slots, slots, is_promotion=False))
        wanted = [(round_number + step) % 8 for step in range(4)]
        jobs.append(driver.submit(wanted, [slot + 8 for slot in wanted], is_promotion=True))
    driver.poll_until(lambda: len(driver.results) == len(jobs))
    for slot in range(8):
        assert bytes(driver.rows[slot + 8]) in (bytes(content_of(slot)), bytes(content_of(slot + 8)))
    stats = driver.tier.stats()
    assert stats["free_slots"] + stats["own_blocks"] + stats["failed_slots"] == 4 * stats["own_packs"]
