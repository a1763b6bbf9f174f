"""Who keeps a list of a tier's blocks from its events has the right one."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiering.fs.conftest import StartTier
from tests.tiering.fs.engine import HANG_GUARD_S, AwakeTier, bytes_of_packs
from tests.tiering.fs.slots import stored_blocks

from kvtier.base import OffloadKey, ReqContext
from kvtier.testing.examples import num_examples
from kvtier.testing.tier_driver import TierDriver, key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.kit.eviction_log import MAX_UNREPORTED_KEYS, EvictionLog

NUM_BLOCKS = 12
AT_ONCE_BYTES = 2**20
"""Enough for a job of each test to be handed over whole."""

TELLING = TierSettings(emit_events=True, max_in_flight_store_bytes=AT_ONCE_BYTES)


def of_slots(num_slots: int) -> dict[str, object]:
    """Return the settings of a directory of one pack."""
    return {"capacity_bytes": bytes_of_packs(1, num_slots), "pack_bytes": bytes_of_packs(1, num_slots)}


def numbers_of(keys: list[OffloadKey]) -> set[int]:
    """Return which of the few blocks of a test are named."""
    return {number for number in range(NUM_BLOCKS) if key_of(number) in keys}


@contextmanager
def manage(root: Path, num_slots: int, own: TierSettings) -> Iterator[TieringDriver]:
    """Give a manager of a small directory; its tier has ended afterwards."""

    def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
        config = make_config(row_bytes=ROW_BYTES)
        num_bytes = bytes_of_packs(1, num_slots, ROW_BYTES)
        return [AwakeTier(config, view, own, root_dir=root, capacity_bytes=num_bytes, pack_bytes=num_bytes)]

    driver = TieringDriver(8, make_tiers)
    try:
        yield driver
    finally:
        assert driver.tiers[0].shutdown(HANG_GUARD_S)


def store(driver: TieringDriver, numbers: list[int]) -> None:
    """Store blocks and wait until the tier has reported them."""
    driver.store(numbers)
    assert driver.manager.drain(HANG_GUARD_S)


def told(driver: TieringDriver) -> list[tuple[set[int], bool]]:
    """Return what the tier has told since the last call: which blocks, and whether they are gone."""
    events = driver.manager.take_events()
    return [(numbers_of(event.keys), event.removed) for event in events if event.medium == "fs"]


def test_an_evicted_block_is_told_once(root: Path) -> None:
    with manage(root, 2, TELLING) as driver:
        store(driver, [1, 2])
        assert told(driver) == [({1, 2}, False)]
        store(driver, [3])
        (stored, removed) = told(driver)
        assert stored == ({3}, False)
        assert removed in (({1}, True), ({2}, True))
        assert told(driver) == []


def test_nothing_is_told_unless_asked_to(root: Path) -> None:
    with manage(root, 2, TierSettings()) as driver:
        store(driver, [1, 2])
        store(driver, [3, 4])
        assert told(driver) == []
        assert not driver.tiers[0].drain_evicted()


def test_what_leaves_from_before_a_reset_is_not_told_after_it(root: Path) -> None:
    with manage(root, 2, TELLING) as driver:
        store(driver, [1, 2])
        driver.step()
        told(driver)
        store(driver, [3])
        driver.reset()
        # What was evicted before the reset is not told by itself: the reset withdraws everything.
        assert told(driver) == [({3}, False), ({1, 2, 3}, True)]
        store(driver, [4, 5])
        assert told(driver) == [({4, 5}, False)]


def test_what_was_there_at_the_start_is_told_when_it_leaves(root: Path) -> None:
    with manage(root, 2, TELLING) as driver:
        store(driver, [1])
        store(driver, [2])
    with manage(root, 2, TELLING) as driver:
        store(driver, [3])
        assert told(driver) == [({3}, False), ({1}, True)]


def test_a_block_of_another_model_that_leaves_is_not_told(start_tier: StartTier) -> None:
    driver = start_tier("model-b", **of_slots(2))
    driver.store([1, 2])
    assert driver.tier.shutdown(HANG_GUARD_S)
    driver = start_tier(settings=TELLING, **of_slots(2))
    driver.store([3])
    assert take(driver) == set()


def test_a_damaged_block_is_told_once_as_gone(root: Path, start_tier: StartTier) -> None:
    driver = start_tier(settings=TELLING)
    driver.store([1, 2])
    (block,) = [block for block in stored_blocks(root) if block.name == key_of(1)]
    block.flip()
    driver.load([1, 2])
    driver.load([1])
    assert take(driver) == {1}
    assert take(driver) == set()


def take(driver: TierDriver) -> set[int]:
    """Return what a tier by itself says it has evicted, each once."""
    evicted = list(driver.tier.drain_evicted() or ())
    assert len(evicted) == len(set(evicted))
    return numbers_of(evicted)


def test_a_pack_that_others_remove_is_told_block_by_block(root: Path, start_tier: StartTier) -> None:
    driver = start_tier(settings=TELLING)
    driver.store([1, 2, 3])
    assert take(driver) == set()
    (pack,) = root.rglob("*.pack")
    pack.unlink()
    driver.tier.keeper.tick(is_due=True)  # type: ignore[attr-defined]  # a disk tier
    assert take(driver) == {1, 2, 3}


def test_an_eviction_is_not_told_before_the_store_of_the_block_is_reported(start_tier: StartTier) -> None:
    driver = start_tier(settings=TELLING, **of_slots(1))
    for number in (1, 2):
        driver.submit([number], [0], is_promotion=False)
        assert driver.tier.drain(HANG_GUARD_S)
    assert take(driver) == set()
    driver.poll()
    assert len(driver.results) == 2
    assert take(driver) == {1}


def test_a_block_that_is_back_is_not_told_as_gone(start_tier: StartTier) -> None:
    driver = start_tier(settings=TELLING, **of_slots(1))
    for number in (1, 2, 1):
        driver.store([number])
    assert take(driver) == {2}
    driver.store([3])
    assert take(driver) == {1}


def test_too_many_untold_evictions_are_said_to_be_unknown_once() -> None:
    evicted = EvictionLog()
    for number in range(MAX_UNREPORTED_KEYS):
        evicted.add(key_of(number))
    assert len(evicted.take((), lambda key: False) or ()) == MAX_UNREPORTED_KEYS
    for number in range(MAX_UNREPORTED_KEYS + 1):
        evicted.add(key_of(number))
    assert evicted.take((), lambda key: False) is None
    assert evicted.take((), lambda key: False) == []


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"), st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4, unique=True)
        ),
        st.tuples(st.just("search"), st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=2)),
        st.tuples(st.sampled_from(["tell", "step", "drain", "reset"]), st.just([])),
    ),
    max_size=40,
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(operations=OPERATIONS, num_slots=st.integers(1, 5))
@settings(max_examples=num_examples(30), deadline=None)
def test_a_list_kept_from_events_is_what_the_tier_holds(
    policy: str, operations: list[tuple[str, list[int]]], num_slots: int
) -> None:
    own = TierSettings(emit_events=True, policy=policy, max_in_flight_store_bytes=AT_ONCE_BYTES)
    with tempfile.TemporaryDirectory() as folder, manage(Path(folder) / "fs", num_slots, own) as driver:
        mirror: set[int] = set()
        for name, numbers in [*operations, ("drain", []), ("tell", []), ("tell", [])]:
            if name == "store":
                prepared = driver.begin_store(numbers, ReqContext("store"))
                if prepared is not None:
                    driver.end_store(prepared)
            elif name == "search":
                driver.search(numbers, ReqContext("search"))
            elif name == "step":
                driver.step()
            elif name == "drain":
                assert driver.manager.drain(HANG_GUARD_S).has_ended
            if name in ("tell", "reset"):
                for keys, is_removed in told(driver):
                    mirror = mirror - keys if is_removed else mirror | keys
            if name == "reset":
                driver.reset()
                mirror.clear()
        tier = driver.tiers[0]
        held = {number for number in range(NUM_BLOCKS) if tier.lookup(key_of(number), ReqContext("end"))}
        assert mirror == held
