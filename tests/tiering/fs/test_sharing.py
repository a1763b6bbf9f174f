"""Engines that share a directory: they find each other's blocks, and room goes to the one that uses its blocks."""

import os
import shutil
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import NUM_PACK_SLOTS, bytes_of_packs, tick

from kvtier.errors import ConfigError
from kvtier.misses import MissCause
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import HANG_GUARD_S, TierDriver, key_of
from kvtier.tiering.base import PurgeOutcome, TierSettings
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.keeper import WANT_S
from kvtier.tiering.fs.pack_header import OWNER_OFFSET, OwnerMark, PackHeader
from kvtier.tiering.fs.room import RETRY_S

FULL = {"capacity_bytes": bytes_of_packs(4)}
NUM_FULL = 4 * NUM_PACK_SLOTS


class Clocks:
    """The clocks of every engine of a test."""

    def __init__(self) -> None:
        self.monotonic = ManualClock()
        self.now_s = 1.7e9

    def wall(self) -> float:
        """Return seconds since 1970."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.monotonic.advance(seconds)
        self.now_s += seconds

    def options(self) -> dict[str, object]:
        """Return what tells a tier the time."""
        return {"clock": self.monotonic, "wall_clock": self.wall}


def fill(driver: TierDriver, first: int, num: int) -> None:
    """Store blocks one after another."""
    for number in range(first, first + num):
        assert driver.store([number]).success


def keep(*drivers: TierDriver, rounds: int = 3) -> None:
    """Let every tier tell the others what is due, and answer what they have said."""
    for _ in range(rounds):
        for driver in drivers:
            driver.tier.keeper.tick(is_due=True)  # type: ignore[attr-defined]  # a tier of packs


def held(driver: TierDriver, numbers: range) -> set[int]:
    """Return which blocks a tier finds."""
    return {number for number in numbers if driver.lookup(number)}


def end_unused_for_long(driver: TierDriver, root: Path) -> None:
    """End a tier whose packs count as unused for longest, but for those that are first to go."""
    assert isinstance(driver.tier, FSTier)
    name = driver.tier._catalog.namespace.name
    assert driver.tier.shutdown(HANG_GUARD_S)
    for path in (root / name).glob("*.pack"):
        os.utime(path, (5000, 5000))


def own_packs(driver: TierDriver) -> float:
    """Return how many packs a tier writes."""
    return driver.tier.stats()["own_packs"]


def test_what_one_engine_stores_another_finds_and_does_not_write_again(
    start_tier: StartTier, root: Path
) -> None:
    first, second = start_tier(), start_tier()
    assert first.store([1, 2, 3]).success
    assert held(second, range(5)) == {1, 2, 3}
    assert second.load_right([3, 1]) == {1, 3}
    assert second.store([1, 2, 4]).success
    assert second.tier.stats()["stored_blocks"] == 1
    assert held(first, range(5)) == {1, 2, 3, 4}
    assert first.load_right([4, 2]) == {2, 4}


def test_a_block_that_its_owner_evicts_is_a_miss_for_others_and_no_fault(start_tier: StartTier) -> None:
    first, second = start_tier(**FULL), start_tier(**FULL)
    fill(first, 0, NUM_FULL)
    assert second.lookup(0)
    keep(first, second)
    fill(first, 100, NUM_FULL)
    result = second.load([0])
    assert (result.success, result.is_fault) == (False, False)
    assert second.tier.stats()["damaged"] == 0
    miss = second.tier.explain(key_of(0), second.request)
    assert miss is not None
    assert miss.cause is MissCause.EVICTED


def test_where_others_read_slots_are_dropped_before_they_are_written(start_tier: StartTier) -> None:
    alone = start_tier(**FULL)
    fill(alone, 0, 2 * NUM_FULL)
    assert len(held(alone, range(2 * NUM_FULL))) == NUM_FULL
    reader = start_tier(**FULL)
    keep(alone, reader)
    fill(alone, 100, 1)
    assert len(held(alone, range(101))) == NUM_FULL - NUM_PACK_SLOTS // 4


def test_an_engine_that_starts_in_a_full_directory_gets_room_from_the_one_with_the_oldest_blocks(
    start_tier: StartTier,
) -> None:
    clocks = Clocks()
    first = start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL)
    clocks.advance(100)
    second = start_tier(**FULL, **clocks.options())
    assert not second.store([100]).success
    keep(second, first)
    clocks.advance(RETRY_S)
    assert second.store([100]).success
    assert own_packs(first) == 3
    assert own_packs(second) == 1
    assert second.load_right([100]) == {100}


def test_the_blocks_of_a_pack_that_was_given_away_are_still_found_by_both(start_tier: StartTier) -> None:
    clocks = Clocks()
    first = start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL)
    clocks.advance(100)
    second = start_tier(**FULL, **clocks.options())
    assert not second.store([100]).success
    keep(second, first)
    for driver in (first, second):
        assert held(driver, range(NUM_FULL)) == set(range(NUM_FULL))
        assert driver.load_right([0, 5, 15]) == {0, 5, 15}


def test_an_engine_of_another_model_gets_room_too(start_tier: StartTier) -> None:
    clocks = Clocks()
    first = start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL)
    clocks.advance(100)
    second = start_tier("model-b", **FULL, **clocks.options())
    assert not second.store([100]).success
    keep(second, first)
    clocks.advance(RETRY_S)
    assert second.store([100]).success
    assert second.load_right([100]) == {100}
    assert len(held(first, range(NUM_FULL))) == NUM_FULL - NUM_PACK_SLOTS


def test_a_pack_that_is_given_to_another_model_goes_before_those_unused_for_longest(
    start_tier: StartTier, root: Path
) -> None:
    clocks = Clocks()
    first = start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL - NUM_PACK_SLOTS)
    clocks.advance(100)
    third = start_tier("model-c", **FULL, **clocks.options())
    fill(third, 0, NUM_PACK_SLOTS)
    second = start_tier("model-b", **FULL, **clocks.options())
    assert not second.store([100]).success
    keep(second, first)
    end_unused_for_long(third, root)
    clocks.advance(RETRY_S)
    assert second.store([100]).success
    assert len(held(first, range(NUM_FULL))) == NUM_FULL - 2 * NUM_PACK_SLOTS
    third = start_tier("model-c", **FULL, **clocks.options())
    assert held(third, range(NUM_PACK_SLOTS)) == set(range(NUM_PACK_SLOTS))


def test_of_one_s_packs_that_with_the_oldest_blocks_on_average_is_given(start_tier: StartTier) -> None:
    clocks = Clocks()
    first = start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL)
    clocks.advance(10)
    second_pack = range(NUM_PACK_SLOTS, 2 * NUM_PACK_SLOTS)
    first.tier.touch([key_of(number) for number in second_pack], first.request)
    clocks.advance(50)
    young = set(range(1, NUM_FULL)) - set(second_pack)  # and the first block is the oldest of all
    first.tier.touch([key_of(number) for number in young], first.request)
    second = start_tier("model-b", **FULL, **clocks.options())
    assert not second.store([100]).success
    keep(second, first)
    clocks.advance(RETRY_S)
    assert second.store([100]).success
    assert held(first, range(NUM_FULL)) == {0, *young}


def test_packs_of_a_reset_s_epoch_go_before_those_unused_for_longest(
    start_tier: StartTier, root: Path
) -> None:
    third = start_tier("model-c", **FULL)
    fill(third, 0, NUM_PACK_SLOTS)
    end_unused_for_long(third, root)
    first = start_tier(**FULL)
    fill(first, 0, NUM_PACK_SLOTS)
    for epoch in (b"1", b"2"):
        first.tier.reset(epoch * 16)
        fill(first, 0, NUM_PACK_SLOTS)
    second = start_tier("model-b", **FULL)
    fill(second, 0, NUM_PACK_SLOTS)  # in place of the first epoch's
    for driver in (first, start_tier(**FULL), start_tier("model-c", **FULL)):
        assert held(driver, range(NUM_PACK_SLOTS)) == set(range(NUM_PACK_SLOTS))


def test_one_that_does_not_store_any_more_is_given_no_pack(start_tier: StartTier) -> None:
    clocks = Clocks()
    first = start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL)
    clocks.advance(100)
    second = start_tier(**FULL, **clocks.options())
    assert not second.store([100]).success
    keep(second)
    clocks.advance(WANT_S + 1)
    keep(second, first)
    assert own_packs(first) == 4


def test_each_of_two_that_lack_room_is_given_a_pack_once(start_tier: StartTier) -> None:
    clocks = Clocks()
    first = start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL)
    clocks.advance(100)
    others = [start_tier(model, **FULL, **clocks.options()) for model in ("model-b", "model-c")]
    for other in others:
        assert not other.store([100]).success
    keep(*others, first, rounds=5)
    assert own_packs(first) == 2


def test_who_uses_its_blocks_keeps_them(start_tier: StartTier) -> None:
    clocks = Clocks()
    first, second = start_tier(**FULL, **clocks.options()), start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL // 2)
    fill(second, 100, NUM_FULL // 2)
    clocks.advance(100)
    for number in range(NUM_FULL // 2):
        first.tier.touch([key_of(number)], first.request)
    fill(first, 50, 1)
    keep(first, second)
    clocks.advance(RETRY_S)
    fill(first, 51, NUM_PACK_SLOTS - 1)
    assert own_packs(first) == 3
    assert own_packs(second) == 1


def test_a_use_by_another_engine_keeps_a_block(start_tier: StartTier) -> None:
    clocks = Clocks()
    first, second = start_tier(**FULL, **clocks.options()), start_tier(**FULL, **clocks.options())
    fill(first, 0, NUM_FULL)
    keep(first, second)
    assert second.load_right([0, 1]) == {0, 1}
    second.tier.touch([key_of(0), key_of(1)], second.request)
    keep(second, first)
    fill(first, 100, NUM_PACK_SLOTS)
    found = held(first, range(NUM_FULL))
    assert {0, 1} <= found
    assert 2 not in found


def test_of_what_another_engine_uses_the_first_block_is_the_last_to_leave(start_tier: StartTier) -> None:
    first, second = start_tier(**FULL), start_tier(**FULL)
    fill(first, 0, NUM_FULL)
    keep(first, second)
    second.tier.touch([key_of(number) for number in range(NUM_FULL)], second.request)
    keep(second, first)
    fill(first, 100, 4)
    left = held(first, range(NUM_FULL))
    assert left == set(range(len(left)))


def test_packs_of_an_engine_that_has_ended_are_adopted_and_its_oldest_blocks_leave_first(
    start_tier: StartTier,
) -> None:
    clocks = Clocks()
    first = start_tier(**FULL, **clocks.options())
    for number in range(NUM_FULL):
        clocks.advance(1)
        assert first.store([number]).success
    clocks.advance(1)
    first.tier.touch([key_of(0), key_of(1)], first.request)
    assert first.tier.shutdown(HANG_GUARD_S)
    second = start_tier(**FULL, **clocks.options())
    assert own_packs(second) == 4
    assert held(second, range(NUM_FULL)) == set(range(NUM_FULL))
    fill(second, 100, 4)
    assert held(second, range(NUM_FULL)) == set(range(NUM_FULL)) - {2, 3, 4, 5}


def test_an_engine_that_starts_beside_another_takes_no_pack_from_it(start_tier: StartTier) -> None:
    first = start_tier(**FULL)
    fill(first, 0, NUM_FULL)
    second = start_tier(**FULL)
    assert (own_packs(first), own_packs(second)) == (4, 0)


def test_the_smallest_capacity_of_living_engines_counts(start_tier: StartTier, root: Path) -> None:
    large = start_tier(capacity_bytes=bytes_of_packs(8))
    small = start_tier(capacity_bytes=bytes_of_packs(2), allow_shrink=True)
    keep(small, large)
    for number in range(6 * NUM_PACK_SLOTS):
        large.store([number])
    assert sum(path.stat().st_blocks * 512 for path in root.rglob("*.pack")) <= bytes_of_packs(2)
    assert small.tier.shutdown(HANG_GUARD_S)
    keep(large)
    large.poll_until(lambda: large.store([1000]).success and own_packs(large) > 2)


def test_an_engine_is_refused_whose_capacity_would_take_half_of_what_others_may_use(
    start_tier: StartTier,
) -> None:
    large = start_tier(capacity_bytes=bytes_of_packs(16))
    keep(large)
    with pytest.raises(ConfigError, match="that engines that use it allow"):
        start_tier(capacity_bytes=bytes_of_packs(4))
    allowed = start_tier(capacity_bytes=bytes_of_packs(4), allow_shrink=True)
    assert allowed.store([1]).success
    assert allowed.tier.shutdown(HANG_GUARD_S)
    assert large.tier.shutdown(HANG_GUARD_S)
    assert start_tier(capacity_bytes=bytes_of_packs(4)).lookup(1)


def test_a_damaged_block_of_another_engine_is_dropped_by_its_owner(start_tier: StartTier, root: Path) -> None:
    first, second = start_tier(), start_tier()
    assert first.store([1, 2]).success
    assert held(second, range(3)) == {1, 2}
    (pack,) = root.rglob("*.pack")
    header = PackHeader.unpack(pack.read_bytes()[:4096])
    assert header is not None
    with pack.open("r+b") as file:
        file.seek(header.geometry.offset_of(0) + 5000)
        file.write(b"damage")
    assert second.load_right([1, 2]) == {2}
    assert second.tier.stats()["damaged"] == 1
    keep(second, first)
    assert held(first, range(3)) == {2}
    assert second.store([1]).success
    assert first.load_right([1, 2]) == {1, 2}


def test_what_a_neighbour_calls_damaged_and_is_not_stays(start_tier: StartTier) -> None:
    first, second = start_tier(), start_tier()
    assert first.store([1]).success
    assert second.lookup(1)
    second.tier.drop([key_of(1)])
    second.poll_until(lambda: not second.lookup(1))
    keep(second, first)
    assert first.load_right([1]) == {1}


def test_a_purge_by_one_engine_removes_the_blocks_of_all(start_tier: StartTier) -> None:
    first, second = start_tier(), start_tier()
    assert first.store([1, 2]).success
    assert second.store([3, 4]).success
    keep(first, second)
    assert first.tier.purge() is None
    ended: list[PurgeOutcome] = []

    def is_done() -> bool:
        keep(second, first, rounds=1)
        found = first.tier.poll_purge()
        if isinstance(found, PurgeOutcome):
            ended.append(found)
        return bool(ended)

    first.poll_until(is_done)
    assert ended[0].error == ""
    for driver in (first, second):
        assert held(driver, range(6)) == set()
    assert second.store([3]).success
    assert held(first, range(6)) == {3}


def test_blocks_that_another_engine_evicts_are_withdrawn(start_tier: StartTier) -> None:
    telling = TierSettings(emit_events=True, max_in_flight_store_bytes=2**20)
    first, second = start_tier(**FULL, settings=telling), start_tier(**FULL, settings=telling)
    fill(first, 0, NUM_FULL)
    keep(first, second)
    assert set(second.tier.drain_evicted() or ()) == set()
    fill(first, 100, 2)
    gone = set(second.tier.drain_evicted() or ())
    assert {key_of(0), key_of(1)} <= gone
    assert gone == set(first.tier.drain_evicted() or ())


def test_a_directory_that_is_removed_costs_its_blocks_and_nothing_else(
    start_tier: StartTier, root: Path
) -> None:
    first, second = start_tier(), start_tier()
    assert first.store([1, 2]).success
    assert second.lookup(1)
    shutil.rmtree(root)
    keep(first, second)
    for driver in (first, second):
        assert held(driver, range(3)) == set()
        assert driver.load_right([1, 2]) == set()
    assert first.store([1]).success
    assert second.load_right([1]) == {1}


def test_a_pack_that_is_removed_costs_its_blocks_alone(start_tier: StartTier, root: Path) -> None:
    first, second = start_tier(), start_tier()
    fill(first, 0, 2 * NUM_PACK_SLOTS)
    assert held(second, range(8)) == set(range(8))
    victim = min(root.rglob("*.pack"), key=lambda path: path.stat().st_ino)
    victim.unlink()
    keep(first, second)
    left = held(first, range(8))
    assert len(left) == NUM_PACK_SLOTS
    assert held(second, range(8)) == left
    assert second.load_right(sorted(left)) == left


def test_a_pack_that_another_process_writes_although_it_is_locked_ends_the_use_of_the_directory(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier()
    assert driver.store([1]).success
    (pack,) = root.rglob("*.pack")
    mark = OwnerMark.unpack(pack.read_bytes()[OWNER_OFFSET : OWNER_OFFSET + 4096])
    assert mark is not None
    with pack.open("r+b") as file:
        file.seek(OWNER_OFFSET)
        file.write(mark._replace(token=bytes(16)).pack())
    keep(driver)
    assert not driver.lookup(1)
    assert not driver.store([2]).success
    tick([driver])
