"""An engine that loads other weights in place goes on with the blocks of those, and of no others."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiering.drivers import make_driver

from kvtier.base import ReqContext
from kvtier.config import ModelIdentity
from kvtier.testing.tier_suite import make_config
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering.fs import FSTier

OLD, NEW = make_config("old").model, make_config("new").model
HANG_GUARD_S = 60.0

Start = Callable[[str], TieringDriver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a manager over one fs tier, of an engine that was started with a model."""
    drivers: list[TieringDriver] = []

    def start_one(model: str) -> TieringDriver:
        def make_tier(view: memoryview) -> FSTier:
            tier = FSTier(make_config(model), view, root_dir=tmp_path / "blocks", capacity_bytes="4MiB")
            assert tier.wait_indexed(HANG_GUARD_S)
            return tier

        drivers.append(TieringDriver(8, lambda view: [make_tier(view)]))
        return drivers[-1]

    yield start_one
    for driver in drivers:
        driver.manager.shutdown()


def switch(driver: TieringDriver, model: ModelIdentity | None) -> None:
    """Load other weights: what is computed from now on has other bytes."""
    driver.manager.switch_model(model)
    driver.generation += 1


def count_found(driver: TieringDriver, numbers: list[int], req_id: str) -> int:
    """Search for blocks and load what is found, with its bytes compared."""
    request = ReqContext(req_id)
    num_found = driver.search_until_known(numbers, request, max_steps=10**6)
    if num_found:
        driver.load(numbers[:num_found], request)
    return num_found


def test_with_other_weights_nothing_old_is_found_and_another_engine_finds_what_is_stored(
    start: Start,
) -> None:
    driver = start("old")
    driver.store([1, 2, 3])
    assert driver.manager.drain(HANG_GUARD_S)

    switch(driver, NEW)

    assert count_found(driver, [1, 2, 3], "switched") == 0
    driver.store([1, 2])
    assert driver.manager.drain(HANG_GUARD_S)
    other = start("new")
    other.generation = driver.generation
    assert count_found(other, [1, 2, 3], "other") == 2


def test_what_another_engine_has_stored_of_the_new_weights_is_found(start: Start) -> None:
    other = start("new")
    other.generation = 1
    other.store([1, 2, 3])
    assert other.manager.drain(HANG_GUARD_S)
    driver = start("old")

    switch(driver, NEW)

    assert count_found(driver, [1, 2, 3], "switched") == 3


def test_back_at_the_old_weights_the_old_blocks_are_found(start: Start) -> None:
    driver = start("old")
    driver.store([1, 2, 3])
    assert driver.manager.drain(HANG_GUARD_S)
    switch(driver, NEW)
    switch(driver, OLD)
    driver.generation = 0

    assert count_found(driver, [1, 2, 3], "back") == 3


def test_blocks_of_weights_without_a_name_are_in_host_memory_alone(start: Start, tmp_path: Path) -> None:
    driver = start("old")
    driver.store([1, 2, 3])
    assert driver.manager.drain(HANG_GUARD_S)
    files = set(tmp_path.rglob("*"))

    switch(driver, None)
    assert count_found(driver, [1, 2, 3], "unnamed") == 0
    driver.store([1, 2, 3, 4])
    assert driver.manager.drain(HANG_GUARD_S)

    assert count_found(driver, [1, 2, 3, 4], "again") == 4
    assert set(tmp_path.rglob("*")) == files


def test_after_weights_without_a_name_tiers_get_blocks_again(start: Start) -> None:
    driver = start("old")
    switch(driver, None)
    switch(driver, NEW)
    driver.store([1, 2])
    assert driver.manager.drain(HANG_GUARD_S)

    other = start("new")
    other.generation = driver.generation
    assert count_found(other, [1, 2], "other") == 2


def test_a_tier_that_cannot_switch_gets_an_epoch() -> None:
    driver = make_driver(num_blocks=8)
    driver.store([1, 2])
    assert driver.manager.drain(HANG_GUARD_S)

    switch(driver, NEW)

    assert count_found(driver, [1, 2], "switched") == 0
    driver.store([1])
    assert driver.manager.drain(HANG_GUARD_S)
    driver.manager.shutdown()
