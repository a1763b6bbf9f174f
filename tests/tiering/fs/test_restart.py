"""What a tier has stored is found by the next one, with the order in which it leaves, and only what is whole."""

from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import HANG_GUARD_S, NUM_PACK_SLOTS, bytes_of_packs
from tests.tiering.fs.slots import stored_blocks

from kvtier.testing.tier_driver import NUM_ROWS, TierDriver, key_of
from kvtier.tiering.base import TierSettings
from kvtier.tiering.fs.pack_contents import UNSURE_S
from kvtier.tiering.fs.pack_header import OWNER_OFFSET, OwnerMark
from kvtier.tiering.fs.records import RECORD_BYTES

NUM_FULL = 4 * NUM_PACK_SLOTS
FULL = {"capacity_bytes": bytes_of_packs(4)}


class Wall:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1.7e9

    def __call__(self) -> float:
        return self.now_s


def held(driver: TierDriver, numbers: range) -> set[int]:
    """Return which blocks are found."""
    return {number for number in numbers if driver.lookup(number)}


def end(driver: TierDriver) -> None:
    """End a tier."""
    assert driver.tier.shutdown(HANG_GUARD_S)


def as_if_killed(root: Path) -> None:
    """Make packs look as those of a process that has not closed them, under another boot."""
    for pack in root.rglob("*.pack"):
        with pack.open("r+b") as file:
            file.seek(OWNER_OFFSET)
            mark = OwnerMark.unpack(file.read(4096))
            assert mark is not None
            file.seek(OWNER_OFFSET)
            file.write(mark._replace(is_closed=False, boot=bytes(16)).pack())


@pytest.mark.parametrize("policy", ["lru", "arc", "hazard"])
def test_a_restart_finds_everything_whatever_the_policy(start_tier: StartTier, policy: str) -> None:
    driver = start_tier(settings=TierSettings(policy=policy))
    for number in range(20):
        assert driver.store([number]).success
    end(driver)
    again = start_tier(settings=TierSettings(policy=policy))
    assert held(again, range(25)) == set(range(20))
    for first in range(0, 20, NUM_ROWS):
        part = list(range(first, min(first + NUM_ROWS, 20)))
        assert again.load_right(part) == set(part)
    assert again.tier.stats()["own_packs"] == 5
    assert again.tier.stats()["neighbour_packs"] == 0


def test_after_a_restart_the_blocks_used_longest_ago_leave_first(start_tier: StartTier) -> None:
    wall = Wall()
    driver = start_tier(wall_clock=wall, **FULL)
    for number in range(NUM_FULL):
        wall.now_s += 1
        assert driver.store([number]).success
    wall.now_s += 10
    driver.tier.touch([key_of(0), key_of(5)], driver.request)
    end(driver)
    again = start_tier(wall_clock=wall, **FULL)
    for number in range(100, 104):
        assert again.store([number]).success
    assert held(again, range(NUM_FULL)) == set(range(NUM_FULL)) - {1, 2, 3, 4}


@pytest.mark.parametrize("place", [0, 8, 40, 127])
def test_a_damaged_header_of_the_last_minutes_is_no_block_after_a_crash(
    start_tier: StartTier, root: Path, place: int
) -> None:
    driver = start_tier()
    assert driver.store([1, 2, 3]).success
    end(driver)
    as_if_killed(root)
    (block,) = [one for one in stored_blocks(root) if one.name == key_of(2)]
    block.flip(place)
    again = start_tier()
    assert held(again, range(5)) == {1, 3}
    assert again.load_right([1, 3]) == {1, 3}
    assert again.tier.stats()["damaged"] == 0
    assert again.store([2]).success


def test_a_slot_that_was_never_written_is_no_block_after_a_loss_of_power(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier()
    assert driver.store([1, 2, 3]).success
    end(driver)
    as_if_killed(root)
    for block in stored_blocks(root):
        if block.name == key_of(3):
            block.write(bytes(len(block.read())))
    again = start_tier()
    assert held(again, range(5)) == {1, 2}


def test_blocks_of_long_before_a_crash_are_taken_at_the_journals_word_and_checked_when_they_are_loaded(
    start_tier: StartTier, root: Path
) -> None:
    wall = Wall()
    driver = start_tier(wall_clock=wall)
    assert driver.store([1, 2]).success
    wall.now_s += UNSURE_S + 10
    assert driver.store([3]).success
    end(driver)
    as_if_killed(root)
    (block,) = [one for one in stored_blocks(root) if one.name == key_of(1)]
    block.flip(0)
    again = start_tier(wall_clock=wall)
    assert held(again, range(5)) == {1, 2, 3}
    assert again.load_right([1, 2, 3]) == {2, 3}
    assert held(again, range(5)) == {2, 3}


@pytest.mark.parametrize("num_bytes", [1, RECORD_BYTES // 2, RECORD_BYTES - 1])
def test_a_torn_record_at_the_end_is_none_and_storing_goes_on(
    start_tier: StartTier, root: Path, num_bytes: int
) -> None:
    driver = start_tier()
    for number in (1, 2, 3):
        assert driver.store([number]).success
    end(driver)
    (journal,) = root.rglob("*.index")
    journal.write_bytes(journal.read_bytes() + bytes(range(1, num_bytes + 1)))
    again = start_tier()
    assert held(again, range(5)) == {1, 2, 3}
    assert again.store([4]).success
    end(again)
    last = start_tier()
    assert held(last, range(6)) == {1, 2, 3, 4}
    assert last.load_right([1, 2, 3, 4]) == {1, 2, 3, 4}


def test_blocks_of_another_model_stay_until_their_room_is_needed(start_tier: StartTier) -> None:
    driver = start_tier("model-b", **FULL)
    for number in range(NUM_FULL):
        assert driver.store([number]).success
    end(driver)
    own = start_tier(**FULL)
    assert own.store([1]).success
    end(own)
    back = start_tier("model-b", **FULL)
    assert len(held(back, range(NUM_FULL))) == NUM_FULL - NUM_PACK_SLOTS


def test_packs_of_other_rows_are_left_alone_and_go_when_room_is_needed(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_tier(**FULL)
    for number in range(NUM_FULL):
        assert driver.store([number]).success
    end(driver)
    row_bytes = 2 * 8192
    other = start_tier(row_bytes=row_bytes, **FULL)
    assert held(other, range(NUM_FULL)) == set()
    assert other.store([1]).success
    assert other.load_right([1]) == {1}
    end(other)
    files = [path for path in root.rglob("*") if path.suffix in {".pack", ".index"}]
    assert sum(path.stat().st_blocks * 512 for path in files) <= bytes_of_packs(4)


def test_a_larger_or_smaller_pack_at_the_next_start_keeps_the_blocks(start_tier: StartTier) -> None:
    sizes = [1, 3, 8, 2]
    driver = start_tier(pack_bytes=bytes_of_packs(1, 4))
    stored: list[int] = []
    for number, num_slots in enumerate(sizes):
        end(driver)
        driver = start_tier(pack_bytes=bytes_of_packs(1, num_slots))
        assert held(driver, range(100)) == set(stored)
        numbers = [10 * number, 10 * number + 1]
        assert driver.store(numbers).success
        stored += numbers
    assert driver.load_right(stored) == set(stored)
