"""Tiers below a directory of the test, ended with it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiering.fs.engine import HANG_GUARD_S, start_driver
from tests.tiering.fs.placed import Living

from kvtier.testing.tier_driver import ROW_BYTES, TierDriver, make_config
from kvtier.tiering.fs.place import PackPlace

StartTier = Callable[..., TierDriver]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of the tiers of a test; it does not exist yet."""
    return tmp_path / "packs"


@pytest.fixture
def start_tier(root: Path) -> Iterator[StartTier]:
    """Build tiers that know what is in the directory, with something that drives them."""
    drivers: list[TierDriver] = []

    def start(model: str = "model-a", *, row_bytes: int = ROW_BYTES, **options: object) -> TierDriver:
        config = make_config(model, row_bytes)
        drivers.append(start_driver(config, row_bytes, **({"root_dir": root} | options)))
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


@pytest.fixture
def living() -> Living:
    """The engines that answer while the place of the test waits; a test adds them."""
    return Living()


@pytest.fixture
def place(root: Path, living: Living) -> Iterator[PackPlace]:
    """The place of the test's tiers, which may be made before it is there."""
    found = PackPlace(root, clock=living.clock, pause=living.pause)
    yield found
    found.close()
