"""Files that another program removes, replaces or cuts under a living tier cost their blocks, and nothing else."""

import os
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import HANG_GUARD_S, NUM_PACK_SLOTS, bytes_of_packs, tick
from tests.tiering.fs.slots import stored_blocks

from kvtier.base import ReqContext
from kvtier.misses import MissCause
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import NUM_ROWS, TierDriver, key_of
from kvtier.tiering.fs.pack_header import OWNER_OFFSET
from kvtier.tiering.fs.room import RETRY_S

NUM_BLOCKS = 2 * NUM_PACK_SLOTS


def keep(driver: TierDriver) -> None:
    """Let a tier look at its directory."""
    driver.tier.keeper.tick(is_due=True)  # type: ignore[attr-defined]  # a disk tier


def held(driver: TierDriver, numbers: Collection[int]) -> set[int]:
    """Return which blocks are found."""
    return {number for number in numbers if driver.lookup(number)}


def filled(start_tier: StartTier) -> TierDriver:
    """Return a tier with two full packs."""
    driver = start_tier()
    for number in range(NUM_BLOCKS):
        assert driver.store([number]).success
    return driver


def remove_directory(root: Path) -> None:
    shutil.rmtree(root)


def remove_namespace(root: Path) -> None:
    for folder in root.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)


def remove_packs(root: Path) -> None:
    for pack in root.rglob("*.pack"):
        pack.unlink()


def cut_packs(root: Path) -> None:
    for pack in root.rglob("*.pack"):
        os.truncate(pack, 5000)


def move_packs(root: Path) -> None:
    for pack in root.rglob("*.pack"):
        pack.rename(root.parent / pack.name)


def replace_packs(root: Path) -> None:
    for pack in root.rglob("*.pack"):
        copy = root.parent / pack.name
        shutil.copy(pack, copy)
        copy.write_bytes(bytes(copy.stat().st_size))
        copy.rename(pack)


LOSSES: dict[str, Callable[[Path], None]] = {
    "directory": remove_directory,
    "namespace": remove_namespace,
    "packs": remove_packs,
    "cut": cut_packs,
    "moved": move_packs,
    "replaced": replace_packs,
}
EVERY_LOSS = pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)


@EVERY_LOSS
def test_what_is_lost_is_a_miss_and_the_tier_goes_on(
    start_tier: StartTier, root: Path, lose: Callable[[Path], None]
) -> None:
    driver = filled(start_tier)
    lose(root)
    keep(driver)
    tick([driver])
    assert held(driver, range(NUM_BLOCKS)) == set()
    assert driver.load_right(list(range(NUM_BLOCKS))) == set()
    for number in range(NUM_BLOCKS):
        assert driver.store([number]).success
    assert driver.load_right(list(range(NUM_BLOCKS))) == set(range(NUM_BLOCKS))
    assert driver.tier.shutdown(HANG_GUARD_S)
    assert held(start_tier(), range(NUM_BLOCKS)) == set(range(NUM_BLOCKS))


@EVERY_LOSS
def test_a_load_or_a_store_that_comes_before_it_is_noticed_has_no_wrong_byte(
    start_tier: StartTier, root: Path, lose: Callable[[Path], None]
) -> None:
    driver = filled(start_tier)
    lose(root)
    driver.load_right(list(range(NUM_BLOCKS)))
    driver.store([100])
    keep(driver)
    tick([driver])
    driver.poll_until(lambda: driver.store([101]).success)
    assert driver.load_right([101]) == {101}


@EVERY_LOSS
def test_a_loss_under_jobs_costs_no_report_and_leaves_a_tier_that_works(
    start_tier: StartTier, root: Path, lose: Callable[[Path], None]
) -> None:
    driver = start_tier(num_threads=3)
    stopped = threading.Event()

    def lose_again_and_again() -> None:
        while not stopped.is_set():
            try:
                lose(root)
            except OSError:
                continue

    thread = threading.Thread(target=lose_again_and_again)
    thread.start()
    jobs = []
    try:
        for number in range(0, 40, 4):
            numbers = list(range(number, number + 4))
            driver.place(numbers, range(4))
            jobs.append(driver.submit(numbers, [0, 1, 2, 3], is_promotion=False))
            jobs.append(driver.submit(numbers, [8, 9, 10, 11], is_promotion=True))
            driver.poll_until(lambda: all(job in driver.results for job in jobs))
            keep(driver)
    finally:
        stopped.set()
        thread.join(HANG_GUARD_S)
    keep(driver)
    tick([driver])
    driver.poll_until(lambda: driver.store([1000]).success)
    assert driver.load_right([1000]) == {1000}
    stats = driver.tier.stats()
    assert stats["own_blocks"] <= stats["own_packs"] * NUM_PACK_SLOTS


def test_why_a_block_is_missing_that_others_removed(start_tier: StartTier, root: Path) -> None:
    driver = filled(start_tier)
    remove_packs(root)
    keep(driver)
    assert not driver.lookup(1)
    miss = driver.tier.explain(key_of(1), ReqContext("why"))
    assert miss is not None
    assert miss.cause in {MissCause.EVICTED, MissCause.PURGED}


def test_a_loss_is_one_line_however_many_packs_there_were(
    start_tier: StartTier, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = filled(start_tier)
    remove_directory(root)
    for _ in range(3):
        keep(driver)
    assert len(caplog.records) == 1, caplog.text


def test_the_capacity_holds_after_a_loss(start_tier: StartTier, root: Path) -> None:
    clock = ManualClock()
    driver = start_tier(capacity_bytes=bytes_of_packs(2), clock=clock)
    for first in range(0, 60, 10):
        clock.advance(RETRY_S)
        for number in range(first, first + 10):
            driver.store([number])
        remove_packs(root)
        keep(driver)
    clock.advance(RETRY_S)
    for number in range(100, 120):
        assert driver.store([number]).success
    files = [path for path in root.rglob("*") if path.suffix in {".pack", ".index", ".new"}]
    assert sum(path.stat().st_blocks * 512 for path in files) <= bytes_of_packs(2)


def test_a_journal_that_is_removed_costs_a_living_tier_nothing(start_tier: StartTier, root: Path) -> None:
    driver = filled(start_tier)
    for journal in root.rglob("*.index"):
        journal.unlink()
    assert driver.load_right(list(range(NUM_BLOCKS))) == set(range(NUM_BLOCKS))
    assert driver.tier.shutdown(HANG_GUARD_S)
    again = start_tier()
    found = held(again, range(NUM_BLOCKS))
    assert again.load_right(sorted(found)) == found


def test_a_journal_that_is_missing_at_the_start_is_made_again_of_the_slots(
    start_tier: StartTier, root: Path
) -> None:
    driver = filled(start_tier)
    assert driver.tier.shutdown(HANG_GUARD_S)
    for journal in root.rglob("*.index"):
        journal.unlink()
    again = start_tier()
    assert held(again, range(NUM_BLOCKS)) == set(range(NUM_BLOCKS))
    assert again.load_right(list(range(NUM_BLOCKS))) == set(range(NUM_BLOCKS))


def test_a_pack_that_was_copied_over_another_costs_that_ones_blocks_alone(
    start_tier: StartTier, root: Path
) -> None:
    driver = filled(start_tier)
    first, second = sorted(root.rglob("*.pack"))
    lost = {int.from_bytes(block.name[:32], "big") for block in stored_blocks(root) if block.pack == second}
    second.write_bytes(first.read_bytes())
    keep(driver)
    rest = set(range(NUM_BLOCKS)) - lost
    assert held(driver, range(NUM_BLOCKS)) == rest
    assert driver.load_right(list(range(NUM_BLOCKS))) == rest
    assert driver.store(sorted(lost)).success
    assert driver.load_right(list(range(NUM_BLOCKS))) == set(range(NUM_BLOCKS))


def test_a_directory_that_was_copied_is_used_with_its_blocks(start_tier: StartTier, root: Path) -> None:
    driver = filled(start_tier)
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    again = start_tier(root_dir=copy)
    assert again.load_right(list(range(NUM_BLOCKS))) == set(range(NUM_BLOCKS))
    assert driver.load_right(list(range(NUM_BLOCKS))) == set(range(NUM_BLOCKS))


def test_of_two_tiers_both_go_on_and_find_each_others_blocks(start_tier: StartTier, root: Path) -> None:
    first, second = filled(start_tier), start_tier()
    assert second.lookup(1)
    remove_directory(root)
    for driver in (first, second, first, second):
        keep(driver)
    for number, driver in ((1, first), (2, second)):
        driver.poll_until(lambda driver=driver, number=number: driver.store([number]).success)  # type: ignore[misc]
    for driver in (first, second):
        assert held(driver, range(NUM_ROWS)) == {1, 2}
        assert driver.load_right([1, 2]) == {1, 2}


def test_a_mark_that_is_damaged_ends_nothing(start_tier: StartTier, root: Path) -> None:
    driver = filled(start_tier)
    for pack in root.rglob("*.pack"):
        with pack.open("r+b") as file:
            file.seek(OWNER_OFFSET + 20)
            file.write(b"damage")
    keep(driver)
    assert driver.load_right(list(range(NUM_BLOCKS))) == set(range(NUM_BLOCKS))
    assert driver.store([100]).success
