"""Objects live as long as ``ttl_s`` says, by the time at which the store has them written."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.tier_suite import TierDriver, make_config, make_rows
from kvtier.tiering.kit.blobs import evictor
from kvtier.tiering.obj import ObjTier

HANG_GUARD_S = 60.0
TTL_S = 1000.0
Start = Callable[..., TierDriver]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Build tiers on a folder of the test."""
    drivers: list[TierDriver] = []

    def make(**options: object) -> TierDriver:
        rows = make_rows()
        own = {"url": f"file://{folder}"} | options
        tier = ObjTier(make_config("m"), rows, **own)  # type: ignore[arg-type]  # a test's own
        drivers.append(TierDriver(tier, rows))
        return drivers[-1]

    yield make
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


def block_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]


def set_ages(folder: Path, age_s: float) -> None:
    then_s = time.time() - age_s
    for path in block_files(folder):
        os.utime(path, (then_s, then_s))


@pytest.mark.parametrize("age_s", [-1e7, 1e8])
def test_a_clock_that_is_set_makes_no_immortals(start: Start, folder: Path, age_s: float) -> None:
    driver = start(ttl_s=TTL_S)
    assert driver.store([1]).success
    set_ages(folder, age_s)
    assert not driver.load([1]).success
    assert driver.store([1]).success
    assert driver.load([1]).success


def test_what_is_over_is_deleted_without_a_capacity(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictor, "MIN_PASS_S", 0.01)
    monkeypatch.setattr(evictor, "MAX_PASS_S", 0.01)
    assert start().store([1, 2]).success
    set_ages(folder, 2 * TTL_S)
    driver = start(ttl_s=TTL_S)
    assert driver.store([3]).success
    driver.poll_until(lambda: len(block_files(folder)) == 1)
    assert driver.load([3]).success


@pytest.mark.parametrize(("name", "value"), [("ttl_s", 60), ("capacity_bytes", "1GiB")])
def test_where_it_cannot_be_kept_it_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*where nothing can be listed"):
        ObjTier(make_config("m"), make_rows(), url="https://host/x", **{name: value})  # type: ignore[arg-type]  # a test's own
