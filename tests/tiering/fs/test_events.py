"""What this process removes from the directory, of the blocks that it knows, it tells once."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.tiering.fs.conftest import HANG_GUARD_S, StartTier

from kvtier.base import OffloadKey
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, key_of, make_config
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.kit.eviction_log import MAX_UNREPORTED_KEYS

BLOCK_BYTES = ROW_BYTES + 4096
TELLING = TierSettings(emit_events=True, max_in_flight_store_bytes=2**20)


def numbers_of(keys: list[OffloadKey]) -> set[int]:
    """Return the numbers behind keys; each must be named once."""
    assert len(keys) == len(set(keys))
    return {int.from_bytes(key[:-4], "big") for key in keys}


def take(driver: TierDriver) -> set[int]:
    """Return what a tier by itself says it has evicted."""
    return numbers_of(list(driver.tier.drain_evicted() or ()))


def start_telling(start_tier: StartTier, model: str = "model-a", num_blocks: int = 2) -> TierDriver:
    """Return a tier on a small directory that collects what it evicts."""
    return start_tier(model, capacity_bytes=num_blocks * BLOCK_BYTES, settings=TELLING)


def age(root: Path, number: int, seconds: float) -> None:
    """Make a block look as if it had last been used ``seconds`` ago."""
    (path,) = root.glob(f"*/*/*/{key_of(number).hex()}.kv")
    then_s = path.stat().st_mtime - seconds
    os.utime(path, (then_s, then_s))


def test_an_evicted_block_is_told_once(start_tier: StartTier, root: Path) -> None:
    driver = start_telling(start_tier)
    driver.store([1, 2])
    age(root, 2, 100.0)
    driver.store([3])
    assert take(driver) == {2}
    assert take(driver) == set()


def test_nothing_is_kept_to_be_told_unless_events_are_asked_for(start_tier: StartTier) -> None:
    driver = start_tier(capacity_bytes=BLOCK_BYTES)
    driver.store([1])
    driver.store([2])
    assert driver.tier.stats()["evicted_blocks"] == 1
    assert take(driver) == set()


def test_a_block_of_another_namespace_that_is_evicted_is_not_told_though_we_have_its_key(
    start_tier: StartTier, root: Path
) -> None:
    theirs = start_telling(start_tier, "model-b")
    theirs.store([1])
    age(root, 1, 100.0)
    ours = start_telling(start_tier)
    ours.store([1])
    ours.store([2])
    assert ours.tier.stats()["evicted_blocks"] == 1
    assert take(ours) == set()
    assert take(theirs) == set()


def test_a_block_that_only_another_process_knew_is_not_told(start_tier: StartTier, root: Path) -> None:
    ours, theirs = start_telling(start_tier), start_telling(start_tier)
    theirs.store([1])
    age(root, 1, 100.0)
    ours.store([2])
    ours.store([3])
    assert ours.tier.stats()["evicted_blocks"] == 1
    assert take(ours) == set()


def test_what_leaves_from_before_a_reset_is_not_told_after_it(start_tier: StartTier) -> None:
    driver = start_telling(start_tier)
    driver.store([1])
    driver.store([2])
    driver.store([3])
    driver.tier.reset(bytes(range(16)))
    assert take(driver) == set()
    driver.store([4])
    driver.store([5])
    assert driver.tier.stats()["evicted_blocks"] == 3
    assert take(driver) == set()


def test_an_eviction_is_not_told_before_the_store_of_the_block_is_reported(start_tier: StartTier) -> None:
    driver = start_telling(start_tier, num_blocks=1)
    for number in (1, 2):
        driver.submit([number], [0], is_promotion=False)
        assert driver.tier.drain(HANG_GUARD_S)
    assert take(driver) == set()
    driver.poll()
    assert len(driver.results) == 2
    assert take(driver) == {1}


def test_a_block_that_is_back_is_not_told_as_gone(start_tier: StartTier) -> None:
    driver = start_telling(start_tier, num_blocks=1)
    for number in (1, 2, 1):
        driver.store([number])
    assert take(driver) == {2}
    driver.store([3])
    assert take(driver) == {1}


def test_a_damaged_block_is_told_once_as_gone_and_one_that_others_removed_is_not(
    start_tier: StartTier, root: Path
) -> None:
    driver = start_telling(start_tier, num_blocks=4)
    driver.store([1, 2, 3])
    (damaged,) = root.glob(f"*/*/*/{key_of(1).hex()}.kv")
    os.truncate(damaged, BLOCK_BYTES - 1)
    (removed,) = root.glob(f"*/*/*/{key_of(2).hex()}.kv")
    removed.unlink()
    driver.load([1, 2, 3])
    driver.load([1, 2])
    assert take(driver) == {1}
    assert take(driver) == set()


def test_too_many_untold_evictions_are_said_to_be_unknown() -> None:
    index = KeyIndex(2 * MAX_UNREPORTED_KEYS, is_complete=True, emit_events=True)
    keys = [key_of(number) for number in range(MAX_UNREPORTED_KEYS + 2)]
    index.add(keys)
    index.evict(keys)
    assert index.drain_evicted(()) is None


def test_a_key_that_has_no_room_in_the_index_is_told_as_gone() -> None:
    index = KeyIndex(2, is_complete=True, emit_events=True)
    index.add([key_of(1), key_of(2), key_of(3)])
    assert index.drain_evicted(()) == [key_of(1)]


def settle(driver: TieringDriver, numbers: list[int]) -> None:
    """Store blocks and wait until the tier has reported them."""
    driver.store(numbers)
    assert driver.manager.drain(HANG_GUARD_S)


def test_the_manager_hears_of_each_eviction_after_its_store(root: Path) -> None:
    def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
        config = make_config(row_bytes=view.shape[1]) if view.shape else make_config()
        return [FSTier(config, view, TELLING, root_dir=root, capacity_bytes=4 * (4096 + 4096))]

    driver = TieringDriver(32, make_tiers)
    mirror: set[int] = set()
    for number in range(16):
        settle(driver, [number])
        for event in driver.manager.take_events():
            if event.medium == "fs":
                change: Callable[[set[int]], None] = (
                    mirror.difference_update if event.removed else mirror.update
                )
                assert event.removed == (numbers_of(event.keys) <= mirror)
                change(numbers_of(event.keys))
    on_disk = {int(path.stem[:-8], 16) for path in root.glob("*/*/*/*.kv")}
    assert mirror == on_disk
    assert len(mirror) <= 4
    assert driver.tiers[0].shutdown(HANG_GUARD_S)
