"""Blocks of the fs tier live as long as ``ttl_s`` says, whatever their use, restarts and the clock."""

import os
import time
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier

from kvtier.base import ReqContext
from kvtier.errors import ConfigError
from kvtier.misses import MissCause
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import TierDriver, key_of, make_config, make_rows
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.block_file import TOUCH_INTERVAL_S
from kvtier.tiering.fs.shared_usage import unpack_record

TTL_S = 1000.0


class WallClock:
    """A wall clock that begins with the real time, which the files have too, and is set by hand."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


def set_ages(root: Path, wall: WallClock, age_s: float) -> None:
    """Let every block have been stored so long before the reading of the wall clock."""
    for path in root.glob("*/*/*/*.kv"):
        os.utime(path, (wall.now_s - age_s, wall.now_s - age_s))


def cause_of(driver: TierDriver, number: int) -> MissCause | None:
    miss = driver.tier.explain(key_of(number), ReqContext("r"))
    return None if miss is None else miss.cause


def test_a_block_is_a_miss_when_its_time_is_over(start_tier: StartTier, root: Path) -> None:
    wall = WallClock()
    driver = start_tier(ttl_s=TTL_S, wall_clock=wall, clock=ManualClock(0.0))
    assert driver.store([1, 2]).success
    set_ages(root, wall, TTL_S - 1)
    assert driver.load([1]).success
    set_ages(root, wall, TTL_S)
    assert not driver.load([1]).success
    assert cause_of(driver, 1) is MissCause.EXPIRED
    assert not list(root.glob(f"*/*/*/{key_of(1).hex()}.kv"))
    assert driver.tier.stats()["damaged"] == 0


def test_a_use_renews_nothing_and_counts_for_eviction(start_tier: StartTier, root: Path) -> None:
    wall = WallClock()
    driver = start_tier(ttl_s=TTL_S, wall_clock=wall, clock=ManualClock(0.0))
    assert driver.store([1]).success
    set_ages(root, wall, 5 * TOUCH_INTERVAL_S)
    [path] = root.glob("*/*/*/*.kv")
    before = path.stat().st_mtime_ns
    assert driver.load([1]).success
    assert driver.store([1]).success
    assert path.stat().st_mtime_ns == before
    assert path.stat().st_atime == pytest.approx(wall.now_s, abs=1)


def test_without_a_time_to_live_a_use_renews_as_ever(start_tier: StartTier, root: Path) -> None:
    wall = WallClock()
    driver = start_tier()
    assert driver.store([1]).success
    set_ages(root, wall, 10 * TTL_S)
    [path] = root.glob("*/*/*/*.kv")
    before = path.stat().st_mtime_ns
    assert driver.load([1]).success
    assert path.stat().st_mtime_ns > before


@pytest.mark.parametrize("shift_s", [-1e8, -2 * TTL_S, 1e8])
def test_a_clock_that_is_set_makes_misses_and_no_immortals(
    start_tier: StartTier, root: Path, shift_s: float
) -> None:
    wall = WallClock()
    driver = start_tier(ttl_s=TTL_S, wall_clock=wall, clock=ManualClock(0.0))
    assert driver.store([1]).success
    set_ages(root, wall, 0.0)
    wall.now_s += shift_s
    assert not driver.load([1]).success


def test_a_block_that_is_over_is_stored_again(start_tier: StartTier, root: Path) -> None:
    wall = WallClock()
    driver = start_tier(ttl_s=TTL_S)
    assert driver.store([1]).success
    set_ages(root, wall, TTL_S)
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_another_tier_does_not_find_what_is_over(start_tier: StartTier, root: Path) -> None:
    writer = start_tier()
    assert writer.store([1, 2]).success
    set_ages(root, WallClock(), TTL_S)
    reader = start_tier(ttl_s=TTL_S)
    assert not reader.load([1]).success


@pytest.mark.usefixtures("look_often")
def test_room_of_what_is_over_is_given_back_without_any_request(start_tier: StartTier, root: Path) -> None:
    wall = WallClock()
    writer = start_tier("model-b")
    assert writer.store([1, 2]).success
    set_ages(root, wall, TTL_S)
    machine = ManualClock(0.0)
    driver = start_tier(ttl_s=TTL_S, wall_clock=wall, clock=machine)
    driver.poll_until(lambda: not list(root.glob("*/*/*/*.kv")))
    driver.poll_until(lambda: driver.tier.stats().get("expired_blocks") == 2)
    assert unpack_record((root / ".usage").read_bytes()).used_bytes == 0
    assert driver.store([3]).success
    set_ages(root, wall, TTL_S)
    machine.advance(TTL_S)
    driver.poll_until(lambda: driver.tier.stats().get("expired_blocks") == 3)


def test_a_time_to_live_that_cannot_work_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="ttl_s"):
        FSTier(make_config("m"), make_rows(), root_dir=root, capacity_bytes="4MiB", ttl_s=0)
