"""LMCache's back end does the work that is timed, gives back what it took, and says so when it is not there."""

import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.benchmarks.fake_lmcache import FakeLMCache

from benchmarks.harness import lmcache_local
from benchmarks.harness.lmcache_local import LMCacheDisk
from benchmarks.harness.tier_jobs import make_keys, make_rows

NUM_BLOCKS, BLOCK_BYTES = 8, 8192


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLMCache:
    """Stand in for LMCache."""
    fake = FakeLMCache()
    fake.install(monkeypatch)
    return fake


@pytest.fixture(params=["fake", "real"])
def lmcache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an LMCache, and the real one where it is installed."""
    if request.param == "fake":
        FakeLMCache().install(monkeypatch)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what LMCache imports warns of its own future
        obstacle = lmcache_local.find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)


def open_disk(folder: Path, *, is_direct: bool = False) -> LMCacheDisk:
    """Return a disk back end for random blocks."""
    return LMCacheDisk(make_rows(NUM_BLOCKS, BLOCK_BYTES), folder, is_direct=is_direct)


def test_a_line_names_the_module_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "lmcache.v1.storage_backend.local_disk_backend"
    monkeypatch.setitem(sys.modules, module, None)

    obstacle = lmcache_local.find_obstacle()

    assert obstacle is not None
    assert obstacle.startswith("LMCache was not measured (")
    assert module in obstacle
    assert obstacle.endswith(": make bench-peers")


def test_there_is_no_line_where_it_can_be_imported(fake: FakeLMCache) -> None:
    assert lmcache_local.find_obstacle() is None


@pytest.mark.usefixtures("lmcache")
@pytest.mark.parametrize("num_jobs", [1, 4])
@pytest.mark.parametrize("is_direct", [True, False])
def test_round_after_round_the_disk_has_both_rates_and_keeps_no_byte(
    tmp_path: Path, num_jobs: int, is_direct: bool
) -> None:
    disk = open_disk(tmp_path / "files", is_direct=is_direct)
    try:
        for generation in range(3):
            rates = disk.run(make_keys(NUM_BLOCKS, generation), num_jobs)

            assert set(rates) == {"put", "get"}
            assert min(rates.values()) > 0
            sizes_bytes = [path.stat().st_size for path in (tmp_path / "files").iterdir()]
            assert sizes_bytes == [0] * (NUM_BLOCKS * (1 + generation)), "removing would slow others down"
    finally:
        disk.close()


@pytest.mark.parametrize("is_direct", [True, False])
def test_direct_io_is_what_was_asked_for(fake: FakeLMCache, tmp_path: Path, is_direct: bool) -> None:
    open_disk(tmp_path / "files", is_direct=is_direct).close()

    (settings,) = fake.settings
    assert settings["extra_config"] == {"use_odirect": is_direct}


def test_a_closed_disk_leaves_no_memory_no_back_end_and_no_thread(fake: FakeLMCache, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    disk = open_disk(tmp_path / "files")
    disk.run(make_keys(NUM_BLOCKS, 0), 1)

    disk.close()

    assert (fake.num_live, fake.num_open) == (0, 0)
    assert set(threading.enumerate()) <= before


def lose(fake: FakeLMCache) -> None:
    """Let a block be lost."""
    fake.is_losing = True


def garble(fake: FakeLMCache) -> None:
    """Let reads do nothing."""
    fake.is_garbling = True


@pytest.mark.parametrize("harm", [lose, garble])
def test_a_rate_is_not_told_of_blocks_that_did_not_come_back(
    fake: FakeLMCache, tmp_path: Path, harm: Callable[[FakeLMCache], None]
) -> None:
    disk = open_disk(tmp_path / "files")
    harm(fake)
    try:
        with pytest.raises(AssertionError):
            disk.run(make_keys(NUM_BLOCKS, 0), 1)
    finally:
        disk.close()


def test_importing_it_keeps_its_chatter_out_of_the_table(
    fake: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_LOG_LEVEL", "so that it is forgotten afterwards")
    monkeypatch.delenv("LMCACHE_LOG_LEVEL")

    lmcache_local.find_obstacle()

    assert os.environ["LMCACHE_LOG_LEVEL"] == "ERROR"
