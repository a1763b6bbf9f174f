"""The tier finds what is on the disk without asking it on the scheduler's thread."""

import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.namespace import RANDOM_SEED
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver, content_of, key_of, make_rows
from kvtier.tiering.base import JobMetadata, TierSettings
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.system import REAL_CALLS, Buffers, SystemCalls

REQUEST = ReqContext("request")
HARMLESS_POSIX_CALLS = {"fspath", "getpid", "urandom"}


def test_a_restart_finds_everything_without_asking_the_disk(start_tier: StartTier) -> None:
    start_tier().store([1, 2, 3])
    driver = start_tier()
    assert [driver.tier.lookup(key_of(number), REQUEST) for number in (1, 2, 3)] == [True, True, True]
    assert driver.load([1, 2, 3]).success
    assert driver.tier.stats()["lookup_sent"] == 0


def test_what_is_not_known_is_asked_of_the_disk_and_answered_none_meanwhile(start_tier: StartTier) -> None:
    early, late = start_tier(), start_tier()
    late.store([1])
    assert early.tier.lookup(key_of(1), REQUEST) is None
    assert early.lookup(1) is True
    assert early.tier.lookup(key_of(1), REQUEST) is True
    assert early.load([1]).success


def test_alone_in_the_directory_nothing_is_asked(start_tier: StartTier) -> None:
    early, late = start_tier(shared=False), start_tier()
    late.store([1])
    assert early.tier.lookup(key_of(1), REQUEST) is False
    early.store([2])
    assert early.tier.lookup(key_of(2), REQUEST) is True
    assert early.tier.stats()["lookup_sent"] == 0


def test_a_miss_is_remembered_for_its_time_only(start_tier: StartTier) -> None:
    clock = ManualClock()
    early, late = start_tier(clock=clock, negative_ttl_s=5.0), start_tier()
    assert early.lookup(1) is False
    late.store([1])
    clock.advance(4.9)
    assert early.tier.lookup(key_of(1), REQUEST) is False
    clock.advance(0.2)
    assert early.lookup(1) is True


def test_the_questions_of_a_step_are_one_batch(start_tier: StartTier) -> None:
    driver = start_tier()
    for number in range(5):
        assert driver.tier.lookup(key_of(number), REQUEST) is None
    assert driver.tier.stats()["lookup_sent"] == 0
    driver.tier.end_step()
    assert driver.tier.stats()["lookup_sent"] == 5


def test_a_key_that_has_an_answer_is_named_once(start_tier: StartTier) -> None:
    driver = start_tier()
    assert driver.tier.drain_answered() == set()
    driver.lookup(1)
    assert driver.tier.drain_answered() == {key_of(1)}
    assert driver.tier.drain_answered() == set()


def test_missing_room_and_missing_blocks_do_not_speak_against_the_tier(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier()
    assert not driver.load([1]).is_fault
    driver.store([2])
    (path,) = root.glob("*/*/*/*.kv")
    os.truncate(path, 5)
    assert driver.load([2]).is_fault


class SchedulerWatch:
    """System calls that fail a test when they are made on its own thread."""

    def __init__(self) -> None:
        self.is_armed = False
        self.calls = SystemCalls(self.open, self.pwritev, self.preadv, self.link)
        self._scheduler = threading.current_thread()

    def open(self, path: str, flags: int, mode: int) -> int:
        """Open, elsewhere."""
        self._refuse()
        return REAL_CALLS.open(path, flags, mode)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Write, elsewhere."""
        self._refuse()
        return REAL_CALLS.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read, elsewhere."""
        self._refuse()
        return REAL_CALLS.preadv(fd, buffers, offset)

    def link(self, fd: int, path: str) -> None:
        """Link, elsewhere."""
        self._refuse()
        REAL_CALLS.link(fd, path)

    def _refuse(self) -> None:
        is_scheduler = threading.current_thread() is self._scheduler
        assert not (self.is_armed and is_scheduler), "the scheduler's thread touched the disk"


def test_the_schedulers_thread_never_touches_the_disk(start_tier: StartTier) -> None:
    watch = SchedulerWatch()
    driver = start_tier(calls=watch.calls)
    called: list[str] = []

    # An audit hook would see more, but stays for ever and lets another thread run where CPython 3.11 installs a trace
    # function, so that under coverage later threads die at their start.
    def profile(frame: FrameType, event: str, function: object) -> None:
        is_of_disk = function is open or getattr(function, "__module__", None) == "posix"
        is_import = "importlib" in frame.f_code.co_filename  # what the driver makes blocks' contents with
        name = getattr(function, "__name__", "")
        if event == "c_call" and is_of_disk and not is_import and name not in HARMLESS_POSIX_CALLS:
            called.append(name)

    watch.is_armed = True
    sys.setprofile(profile)  # of this thread alone, which is the scheduler's
    try:
        driver.store([1, 2])
        assert driver.lookup(1)
        assert not driver.lookup(3)
        assert driver.load([1, 2]).success
        assert not driver.load([3]).success
        driver.tier.touch([key_of(1)], REQUEST)
        driver.tier.request_finished(REQUEST)
        driver.tier.reset(bytes(16))
        driver.store([1])
        driver.tier.stats()
        driver.tier.waiting_s()
    finally:
        sys.setprofile(None)
        watch.is_armed = False
    assert called == []


class Gate:
    """A disk whose reads wait until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        self.calls = SystemCalls(preadv=self.preadv)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Read when allowed."""
        self.entered.release()
        assert self.opened.wait(HANG_GUARD_S)
        return os.preadv(fd, buffers, offset)


@pytest.fixture
def gated(start_tier: StartTier, root: Path) -> Iterator[tuple[Gate, ManualClock, TierDriver]]:
    """A tier of one thread with one block, whose reads hang until allowed."""
    start_tier().store([1])
    gate, clock, rows = Gate(), ManualClock(), make_rows()
    gate.opened.set()  # the question what the file system can do reads too
    options = {
        "root_dir": root,
        "capacity_bytes": 2**22,
        "num_threads": 1,
        "clock": clock,
        "calls": gate.calls,
    }
    tier = FSTier(make_engine(), rows, **options)  # type: ignore[arg-type]  # a test's own options
    assert tier.wait_indexed(HANG_GUARD_S)
    gate.opened.clear()
    while gate.entered.acquire(blocking=False):
        pass
    yield gate, clock, TierDriver(tier, rows)
    gate.opened.set()
    assert tier.shutdown(HANG_GUARD_S)


def make_engine(**changes: object) -> OffloadingConfig:
    """Return the configuration that the drivers use, changed where told."""
    group = KVGroup(block_size_tokens=16, layer_names=("layer.0",), page_size_bytes=ROW_BYTES)
    values = {
        "engine_id": "engine",
        "model": ModelIdentity("model-a"),
        "groups": (group,),
        "hash_block_size": 16,
    }
    return OffloadingConfig(**(values | changes))  # type: ignore[arg-type]  # a test's own changes


def test_a_hanging_read_blocks_no_call_of_the_scheduler_and_keeps_its_slot(
    gated: tuple[Gate, ManualClock, TierDriver],
) -> None:
    gate, clock, driver = gated
    driver.tier.settings = TierSettings(job_timeout_s=10.0)
    hanging = driver.submit([1], [3], is_promotion=True)
    assert gate.entered.acquire(timeout=HANG_GUARD_S)
    waiting = driver.submit([1], [4], is_promotion=True)
    assert driver.tier.lookup(key_of(1), REQUEST) is True
    clock.advance(9.0)
    assert driver.tier.waiting_s() == 9.0
    clock.advance(2.0)
    driver.poll()
    assert driver.results.keys() == {waiting}
    assert not driver.results[waiting].success
    assert driver.tier.stats()["timeout"] == 1
    assert not driver.tier.shutdown(0.01)
    gate.opened.set()
    assert driver.wait(hanging).success
    assert np.array_equal(driver.rows[3], content_of(1))


def test_jobs_in_flight_at_a_reset_end_in_the_namespace_they_began_in(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier()
    driver.rows[0] = content_of(1)
    job_id = driver.submit([1], [0], is_promotion=False)
    driver.tier.reset(bytes(range(16)))
    assert driver.wait(job_id).success
    assert not driver.lookup(1)
    assert start_tier().lookup(1)
    driver.store([2])
    assert len(list(root.glob("*/namespace.json"))) == 2


def test_two_resets_open_two_namespaces(start_tier: StartTier) -> None:
    driver = start_tier()
    for epoch in (bytes(16), bytes(range(16))):
        driver.tier.reset(epoch)
        assert not driver.lookup(1)
        assert driver.store([1]).success


def test_files_and_folders_are_private(start_tier: StartTier, root: Path) -> None:
    start_tier().store([1])
    paths = [root, *root.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}


def test_file_mode_shares_the_directory_whatever_the_umask(start_tier: StartTier, root: Path) -> None:
    start_tier(file_mode="0660").store([1])
    paths = [root, *root.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o770}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o660}


@pytest.mark.parametrize(
    ("keys", "slots", "reason"),
    [
        ([key_of(1)], [0, 1], "1 keys and 2 slots"),
        ([key_of(1)], [NUM_ROWS], f"the primary has {NUM_ROWS}"),
        ([key_of(1)], [-1], "slots -1"),
        ([OffloadKey(bytes(41))], [0], "key of 41 bytes"),
        ([OffloadKey(b"")], [0], "key of 0 bytes"),
    ],
)
def test_a_malformed_job_is_refused_and_starts_nothing(
    start_tier: StartTier, keys: list[OffloadKey], slots: list[int], reason: str
) -> None:
    tier = start_tier().tier
    job = JobMetadata(JobId(1), tuple(keys), np.array(slots, dtype=np.int64), False, REQUEST)
    for submit in (tier.submit_store, tier.submit_load):
        with pytest.raises(TierError, match=reason):
            submit(job)
    assert tier.drain(0.0)
    assert list(tier.get_finished()) == []


def test_a_key_that_no_envelope_takes_is_not_held(start_tier: StartTier) -> None:
    assert start_tier().tier.lookup(OffloadKey(bytes(41)), REQUEST) is False


def test_a_random_hash_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        FSTier(make_engine(hash_seed=RANDOM_SEED), make_rows(), root_dir=tmp_path, capacity_bytes="1MiB")


def test_a_configuration_entry_builds_the_tier(tmp_path: Path) -> None:
    entry = {
        "type": "fs", "root_dir": str(tmp_path / "x"), "capacity_bytes": "1MiB", "shared": True,
        "negative_ttl_s": 1, "file_mode": "0640", "direct_io": False, "num_threads": 2, "job_timeout_s": 5,
    }  # fmt: skip
    tier = create_secondary_tier(entry, make_rows(), make_engine())
    assert tier.get_tier_type() == "fs"
    assert tier.settings.job_timeout_s == 5.0
    assert tier.shutdown(HANG_GUARD_S)


def test_shutdown_ends_every_thread(tmp_path: Path) -> None:
    rows = make_rows()
    tier = FSTier(make_engine(), rows, root_dir=tmp_path, capacity_bytes="1MiB")
    driver = TierDriver(tier, rows)
    driver.store([1])
    driver.lookup(2)
    assert tier.shutdown(HANG_GUARD_S)
    names = [thread.name for thread in threading.enumerate() if "kvtier-fs" in thread.name]
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(HANG_GUARD_S)  # a thread may need a moment from saying that it ends to its end
    assert not [thread for thread in threading.enumerate() if "kvtier-fs" in thread.name]
