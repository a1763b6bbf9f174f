"""Blocks in packs live as long as ``ttl_s`` says, whatever their use, restarts and the clock."""

from collections.abc import Callable

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import HANG_GUARD_S, bytes_of_packs, tick

from kvtier.base import ReqContext
from kvtier.errors import ConfigError
from kvtier.misses import MissCause
from kvtier.testing.tier_driver import TierDriver, key_of

TTL_S = 1000.0
NOW_S = 1.7e9
ONE_PACK = {"capacity_bytes": bytes_of_packs(1), "pack_bytes": bytes_of_packs(1)}


class WallClock:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


Start = Callable[..., TierDriver]


@pytest.fixture
def wall() -> WallClock:
    """The clock of all tiers of a test."""
    return WallClock()


@pytest.fixture
def start(start_tier: StartTier, wall: WallClock) -> Start:
    """Build one tier after the other in the same directory."""
    running: list[TierDriver] = []

    def make(**options: object) -> TierDriver:
        while running:
            assert running.pop().tier.shutdown(HANG_GUARD_S)
        running.append(start_tier(wall_clock=wall, **options))
        return running[-1]

    return make


def cause_of(driver: TierDriver, number: int) -> MissCause | None:
    """Return why a block is missing."""
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
    assert again.tier.stats()["own_blocks"] == 1


def test_a_lifetime_counts_for_blocks_that_were_stored_without_one(start: Start, wall: WallClock) -> None:
    assert start().store([1]).success
    wall.now_s += TTL_S / 2
    assert start(ttl_s=TTL_S).load([1]).success
    wall.now_s += TTL_S / 2
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


@pytest.mark.parametrize("shift_s", [-1e9, 1e9, 2.6e9, 3e9])
def test_a_clock_that_is_set_far_off_loses_no_block_where_none_is_ever_over(
    start: Start, wall: WallClock, shift_s: float
) -> None:
    driver = start()
    assert driver.store([1]).success
    wall.now_s += shift_s
    assert driver.store([2]).success
    tick([driver])
    assert driver.load_right([1, 2]) == {1, 2}
    again = start()
    assert again.load_right([1, 2]) == {1, 2}


def test_slots_of_what_is_over_are_taken_before_any_block_leaves(start: Start, wall: WallClock) -> None:
    driver = start(ttl_s=TTL_S, **ONE_PACK)
    for number in (0, 1):
        assert driver.store([number]).success
    wall.now_s += TTL_S - 1
    for number in (2, 3):
        assert driver.store([number]).success
    wall.now_s += 1
    for number in (1000, 1001):
        assert driver.store([number]).success
    assert driver.tier.stats()["evicted_blocks"] == 0
    assert all(driver.lookup(number) for number in (2, 3, 1000, 1001))


def test_what_is_over_leaves_the_journals_without_any_request(start: Start, wall: WallClock) -> None:
    driver = start(ttl_s=TTL_S)
    assert driver.store([1, 2, 3]).success
    wall.now_s += TTL_S
    driver.tier.keeper.tick(is_due=True)  # type: ignore[attr-defined]  # a disk tier
    assert driver.tier.stats()["own_blocks"] == 0
    without = start()
    assert not any(map(without.lookup, (1, 2, 3)))


def test_a_neighbours_block_that_is_over_is_a_miss(start_tier: StartTier, wall: WallClock) -> None:
    first = start_tier(wall_clock=wall)
    second = start_tier(wall_clock=wall, ttl_s=TTL_S)
    assert first.store([1]).success
    assert second.lookup(1)
    wall.now_s += TTL_S
    assert not second.lookup(1)
    assert second.load_right([1]) == set()
    assert first.load_right([1]) == {1}


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), "soon"])
def test_a_time_to_live_that_cannot_work_is_refused(start: Start, ttl_s: object) -> None:
    with pytest.raises(ConfigError, match="ttl_s"):
        start(ttl_s=ttl_s)
