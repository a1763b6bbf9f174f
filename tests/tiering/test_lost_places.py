"""Behind a manager a place that is lost costs misses, a line and an open breaker, and is used again when it is back."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.base import ReqContext
from kvtier.testing.tier_suite import HANG_GUARD_S, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.base import FAILURES_TO_OPEN
from kvtier.tiering.breaker import OPEN_S
from kvtier.tiering.fs import FSTier

NUM_BLOCKS = 8


def make_tier(place: Path, view: memoryview) -> FSTier:
    """Return a disk tier in a folder, whose keeper is the test's."""
    config = make_config(row_bytes=ROW_BYTES)
    tier = FSTier(config, view, root_dir=place, capacity_bytes="8MiB", has_thread=False)
    tier.keeper.tick()
    return tier


def lose_to_a_file(place: Path) -> None:
    """Put a file in the place of the directory."""
    shutil.rmtree(place)
    place.touch()


def find_a_folder(place: Path) -> None:
    """Take that away."""
    place.unlink()


def lose_to_others(place: Path) -> None:
    """Let everybody write to the directory."""
    place.chmod(0o777)


def find_private(place: Path) -> None:
    """Take that back."""
    place.chmod(0o700)


@pytest.mark.parametrize(
    ("lose", "find"),
    [(lose_to_a_file, find_a_folder), (lose_to_others, find_private)],
    ids=["file", "permissions"],
)
def test_a_lost_place_opens_the_breaker_which_closes_when_it_is_back(
    tmp_path: Path,
    lose: Callable[[Path], None],
    find: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = tmp_path / "place"
    driver = TieringDriver(NUM_BLOCKS, lambda view: [make_tier(place, view)])
    (tier,) = driver.tiers
    assert isinstance(tier, FSTier)

    def is_closed() -> bool:
        return driver.manager.stats()[f"tier.0.{driver.tiers[0].get_tier_type()}.breaker_open"] == 0

    driver.store([1, 2])
    driver.settle(HANG_GUARD_S)

    lose(place)
    tier.keeper.tick(is_due=True)
    number = 10
    while is_closed():
        assert number < 10 + 3 * FAILURES_TO_OPEN, "the breaker stays closed"
        driver.store([number])
        driver.settle(HANG_GUARD_S)
        number += 1
    driver.evict_everything()
    assert driver.search_until_known([1, 2], ReqContext("while it is away")) == 0
    lines = [
        record.getMessage() for record in caplog.records if "not reach a tier" not in record.getMessage()
    ]
    assert len(lines) == 1, lines

    find(place)
    tier.keeper.tick(is_due=True)
    driver.clock.advance(OPEN_S)
    while not is_closed():
        assert number < 100, "the breaker stays open"
        driver.store([number])
        driver.settle(HANG_GUARD_S)
        driver.clock.advance(OPEN_S)
        number += 1
    tier.keeper.tick(is_due=True)
    assert tier.wait_indexed(HANG_GUARD_S)
    driver.store([number])
    driver.settle(HANG_GUARD_S)
    driver.evict_everything()
    assert driver.search_until_known([number], ReqContext("when it is back"), max_steps=10**6) == 1
    assert tier.shutdown(HANG_GUARD_S)
