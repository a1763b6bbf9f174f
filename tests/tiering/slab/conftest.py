"""Tiers on a file of the test, ended with it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, make_config, make_rows
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.superblock import SlabGeometry

HANG_GUARD_S = 60.0

StartTier = Callable[..., TierDriver]


def capacity_of(num_slots: int) -> int:
    """Return the capacity that gives a slab so many slots of the suite's rows."""
    return SlabGeometry(ROW_BYTES, num_slots).file_bytes


def offset_of(slot: int) -> int:
    """Return where a slot of the suite's rows begins."""
    return SlabGeometry(ROW_BYTES, 0).offset_of(slot)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of the tiers of a test; it does not exist yet."""
    return tmp_path / "blocks.slab"


@pytest.fixture
def start_tier(path: Path) -> Iterator[StartTier]:
    """Build tiers that know what is in the file, with something that drives them; one at a time owns it."""
    drivers: list[TierDriver] = []

    def start(
        model: str = "model-a", *, row_bytes: int = ROW_BYTES, is_indexed: bool = True, **options: object
    ) -> TierDriver:
        # One thread gives slots in the order of the keys; what many do at once, other tests of the tier show.
        arguments = {"path": path, "capacity_bytes": capacity_of(64), "num_threads": 1} | options
        rows = make_rows(row_bytes=row_bytes)
        tier = SlabTier(make_config(model, row_bytes), rows, **arguments)  # type: ignore[arg-type]  # a test's own options
        drivers.append(TierDriver(tier, rows))
        if is_indexed:
            assert tier.wait_indexed(HANG_GUARD_S)
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


def end(driver: TierDriver) -> None:
    """End a tier, so that its file is free for the next one."""
    assert driver.tier.shutdown(HANG_GUARD_S)
