"""Tiers on a directory of the test, ended with it; a directory's contents in a word."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.tier_suite import TierDriver, make_config, make_rows
from kvtier.tiering.fs import FSTier, evictor

HANG_GUARD_S = 60.0

StartTier = Callable[..., TierDriver]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of the tiers of a test; it does not exist yet."""
    return tmp_path / "blocks"


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at directories without the pauses of a second that spare a disk."""
    monkeypatch.setattr(evictor, "CHECK_S", 0.01)


@pytest.fixture
def start_tier(root: Path) -> Iterator[StartTier]:
    """Build tiers that know what is in the directory, with something that drives them."""
    drivers: list[TierDriver] = []

    def start(model: str = "model-a", **options: object) -> TierDriver:
        arguments = {"root_dir": root, "capacity_bytes": "4MiB"} | options
        rows = make_rows()
        tier = FSTier(make_config(model), rows, **arguments)  # type: ignore[arg-type]  # a test's own options
        assert tier.wait_indexed(HANG_GUARD_S)
        drivers.append(TierDriver(tier, rows))
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)
