"""Blocks of a slab live as long as ``ttl_s`` says, whatever their use, restarts and the clock."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.base import ReqContext
from kvtier.misses import MissCause
from kvtier.testing.tier_suite import TierDriver, key_of, make_config, make_rows
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.expiry import NO_TIME, pack_time, unpack_time

HANG_GUARD_S = 60.0
TTL_S = 1000.0
NOW_S = 1.7e9


class WallClock:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


Start = Callable[..., TierDriver]


@pytest.fixture
def wall() -> WallClock:
    return WallClock()


@pytest.fixture
def start(tmp_path: Path, wall: WallClock) -> Iterator[Start]:
    """Build one tier after the other on the same file."""
    running: list[TierDriver] = []

    def make(**options: object) -> TierDriver:
        end()
        rows = make_rows()
        own = {"path": tmp_path / "slab", "capacity_bytes": "256KiB"} | options
        tier = SlabTier(make_config("m"), rows, wall_clock=wall, **own)  # type: ignore[arg-type]  # own settings
        assert tier.wait_indexed(HANG_GUARD_S)
        running.append(TierDriver(tier, rows))
        return running[-1]

    def end() -> None:
        while running:
            assert running.pop().tier.shutdown(HANG_GUARD_S)

    yield make
    end()


def cause_of(driver: TierDriver, number: int) -> MissCause | None:
    miss = driver.tier.explain(key_of(number), ReqContext("r"))
    return None if miss is None else miss.cause


def test_a_block_is_a_miss_when_its_time_is_over_however_often_it_is_used(
    start: Start, wall: WallClock
) -> None:
    driver = start(ttl_s=TTL_S)
    assert driver.store([1]).success
    for _ in range(9):
        wall.now_s += TTL_S / 10
        assert driver.load([1]).success
        assert driver.store([1]).success
    wall.now_s += TTL_S / 10
    assert not driver.lookup(1)
    assert cause_of(driver, 1) is MissCause.EXPIRED
    assert driver.tier.stats()["expired_blocks"] == 1


def test_the_age_survives_a_restart(start: Start, wall: WallClock) -> None:
    assert start(ttl_s=TTL_S).store([1]).success
    wall.now_s += TTL_S / 2
    driver = start(ttl_s=TTL_S)
    assert driver.store([2]).success
    assert driver.load([1, 2]).success
    wall.now_s += TTL_S / 2
    again = start(ttl_s=TTL_S)
    assert [again.lookup(number) for number in (1, 2)] == [False, True]
    assert again.tier.stats()["indexed_blocks"] == 1


def test_blocks_without_a_time_are_over_where_there_is_a_lifetime(start: Start) -> None:
    assert start().store([1]).success
    assert start().load([1]).success
    assert not start(ttl_s=TTL_S).lookup(1)


@pytest.mark.parametrize("shift_s", [-1e8, -2 * TTL_S, 1e8])
def test_a_clock_that_is_set_makes_misses_and_no_immortals(
    start: Start, wall: WallClock, shift_s: float
) -> None:
    driver = start(ttl_s=TTL_S)
    assert driver.store([1]).success
    wall.now_s += shift_s
    assert not driver.load([1]).success
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_slots_of_what_is_over_are_taken_before_any_block_leaves(start: Start, wall: WallClock) -> None:
    driver = start(ttl_s=TTL_S)
    capacity = driver.tier.capacity_blocks
    assert capacity is not None
    numbers = list(range(capacity))
    for number in numbers[:2]:
        assert driver.store([number]).success
    wall.now_s += TTL_S - 1
    for number in numbers[2:]:
        assert driver.store([number]).success
    wall.now_s += 1
    for number in (1000, 1001):
        assert driver.store([number]).success
    assert driver.tier.stats()["evicted_blocks"] == 0
    assert all(driver.lookup(number) for number in numbers[2:])


def test_a_damaged_time_is_none() -> None:
    page = memoryview(bytearray(64))
    assert unpack_time(page, 8) == NO_TIME
    pack_time(page, 8, NOW_S)
    assert unpack_time(page, 8) == NOW_S
    for bit in range(128):
        page[8 + bit // 8] ^= 1 << bit % 8
        assert unpack_time(page, 8) == NO_TIME
        page[8 + bit // 8] ^= 1 << bit % 8
