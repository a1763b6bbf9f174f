"""Behind a manager a place that is lost costs misses, a line and an open breaker, and is used again when it is back."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.base import ReqContext
from kvtier.testing.tier_suite import HANG_GUARD_S, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, TieringDriver
from kvtier.tiering.base import FAILURES_TO_OPEN, SecondaryTierManager
from kvtier.tiering.breaker import OPEN_S
from kvtier.tiering.fs import FSTier
from kvtier.tiering.slab import SlabTier

NUM_BLOCKS = 8
PROJECT = Path(__file__).parents[2]

MakeTier = Callable[[Path, memoryview], SecondaryTierManager]


def make_fs(place: Path, view: memoryview) -> SecondaryTierManager:
    """Return an fs tier in a folder."""
    config = make_config(row_bytes=ROW_BYTES)
    return FSTier(config, view, root_dir=place, capacity_bytes="8MiB", negative_ttl_s=0.0)


def lose_fs(place: Path) -> None:
    """Put a folder in the place of its shared count."""
    usage = place / ".usage"
    while not usage.is_dir():
        usage.unlink(missing_ok=True)
        with suppress(FileExistsError):  # the tier has made the file again in between
            usage.mkdir()


def find_fs(place: Path) -> None:
    """Take that away."""
    (place / ".usage").rmdir()


def make_slab(place: Path, view: memoryview) -> SecondaryTierManager:
    """Return a slab tier in a folder."""
    place.mkdir(exist_ok=True)
    return SlabTier(make_config(row_bytes=ROW_BYTES), view, path=place / "slab", capacity_bytes="8MiB")


def lose_slab(place: Path) -> None:
    """Move its folder away."""
    place.rename(place.with_name("elsewhere"))


def find_slab(place: Path) -> None:
    """Bring it back."""
    place.with_name("elsewhere").rename(place)


@pytest.mark.parametrize(
    ("make_tier", "lose", "find"),
    [(make_fs, lose_fs, find_fs), (make_slab, lose_slab, find_slab)],
    ids=["fs", "slab"],
)
def test_a_lost_place_opens_the_breaker_which_closes_when_it_is_back(
    tmp_path: Path,
    make_tier: MakeTier,
    lose: Callable[[Path], None],
    find: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvtier.tiering.slab.reopening.CHECK_S", 0.0)
    place = tmp_path / "place"
    driver = TieringDriver(NUM_BLOCKS, lambda view: [make_tier(place, view)])

    def is_closed() -> bool:
        return driver.manager.stats()[f"tier.0.{driver.tiers[0].get_tier_type()}.breaker_open"] == 0

    driver.store([1, 2])
    driver.settle(HANG_GUARD_S)

    lose(place)
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
    # The tier may have looked while its count was deleted and the folder was not yet there, which it says as well.
    assert len([line for line in lines if "was deleted by another program" not in line]) == 1
    assert len(lines) <= 2

    find(place)
    driver.clock.advance(OPEN_S)
    while not is_closed():
        assert number < 100, "the breaker stays open"
        driver.store([number])
        driver.settle(HANG_GUARD_S)
        driver.clock.advance(OPEN_S)
        number += 1
    tier = driver.tiers[0]
    assert isinstance(tier, FSTier | SlabTier)
    assert tier.wait_indexed(HANG_GUARD_S)
    driver.store([number])
    driver.settle(HANG_GUARD_S)
    driver.evict_everything()
    assert driver.search_until_known([number], ReqContext("when it is back"), max_steps=10**6) == 1
    assert tier.shutdown(HANG_GUARD_S)


OTHER_USERS_COUNT = """
import os, shutil, tempfile
from pathlib import Path
from kvtier.testing.tier_suite import TierDriver, make_config, make_rows
from kvtier.tiering.fs import FSTier
with tempfile.TemporaryDirectory() as folder:
    root = Path(folder) / "blocks"
    root.mkdir(0o700)
    (root / "tmp").mkdir(0o700)
    for path in (Path(folder), root, root / "tmp"):
        os.chown(path, 65534, 65534)
    (root / ".usage").touch(0o600)  # of root
    # Once as the superuser: the other user may not read the modules that are imported on the way.
    rows = make_rows()
    tier = FSTier(make_config(), rows, root_dir=Path(folder) / "other", capacity_bytes="4MiB")
    assert TierDriver(tier, rows).store([1]).success
    assert tier.shutdown(60.0)
    shutil.rmtree(Path(folder) / "other")
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    rows = make_rows()
    tier = FSTier(make_config(), rows, root_dir=root, capacity_bytes="4MiB")
    driver = TierDriver(tier, rows)
    for number in range(5):
        result = driver.store([number])
        assert (result.success, result.is_fault) == (False, True), result
    (root / ".usage").unlink()
    driver.poll_until(lambda: driver.store([1]).success)
    assert driver.load_right([1]) == {1}
    assert tier.shutdown(60.0)
"""


@pytest.mark.slow
def test_a_count_of_another_user_is_a_fault_said_once_until_it_is_gone() -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser can become another user")
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USERS_COUNT],
        capture_output=True,
        text=True,
        timeout=2 * HANG_GUARD_S,
        check=False,
        cwd=PROJECT,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert ["Permission denied" in line for line in lines] == [True, False], done.stderr
