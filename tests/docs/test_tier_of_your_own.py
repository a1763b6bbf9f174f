"""The tiers that docs/extend/tier.md shows in full keep the contracts of tiers, places and named bytes."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.settings import parse_settings
from kvtier.testing.blobs_suite import BlobsSuite
from kvtier.testing.damage import flip_bit
from kvtier.testing.place_suite import PlaceSuite
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.kit.blobs import Blobs
from scripts.check_docs import python_blocks

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "tier.md"


@pytest.fixture(scope="module")
def names_of_page() -> dict[str, Any]:  # Any: whatever the page defines
    """Return what the page's block with the tier defines."""
    return names_in("(SecondaryTierManager):")


def names_in(mark: str) -> dict[str, Any]:  # Any: likewise
    """Return what the page's only block with ``mark`` in it defines."""
    (block,) = [block for block in python_blocks(PAGE) if mark in block.code]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block.code, f"{PAGE.name}:{block.line}", "exec"), names)  # noqa: S102 - our own docs
    return names


class TestTierOfThePage(TierSuite):
    """The contract."""

    @pytest.fixture(autouse=True)
    def _use_page(self, names_of_page: dict[str, Any]) -> None:
        self.tier_class = names_of_page["DictTier"]

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        tier = self.tier_class(config, rows)
        assert isinstance(tier, SecondaryTierManager)
        return tier

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return False  # a dictionary of this process


@pytest.fixture(scope="module")
def blobs_of_page() -> dict[str, Any]:  # Any: whatever the page defines
    """Return what the page's block with the tier over named bytes defines."""
    return names_in("(BlobTier):")


class OfSqlite:
    """Over the page's database."""

    @pytest.fixture(autouse=True)
    def _use_page(self, blobs_of_page: dict[str, Any], tmp_path: Path) -> None:
        self.names = blobs_of_page
        self.directory = tmp_path
        type(self).tier_class = blobs_of_page["SqliteTier"]  # type: ignore[attr-defined]  # of the suite that knows it

    def own_settings(self, directory: Path) -> dict[str, object]:
        return {"path": str(directory / "blobs.sqlite")}

    def flip(self, key: OffloadKey) -> bool:
        """Change a byte of the row of ``key``."""
        with sqlite3.connect(self.directory / "blobs.sqlite") as database:
            for name, value in database.execute("SELECT name, value FROM blobs").fetchall():
                damaged = flip_bit(value, key)
                if damaged is not None:
                    database.execute("UPDATE blobs SET value = ? WHERE name = ?", (damaged, name))
                    return True
        return False


class TestSqliteTier(OfSqlite, TierSuite):
    """The contract of a tier."""

    names_siblings = True

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        tier = self.names["SqliteTier"](config, rows, **self.own_settings(directory))
        assert isinstance(tier, SecondaryTierManager)
        return tier

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return self.flip(key)

    def check_older_layouts_purge(self, tmp_path: Path, place: str) -> None:
        # The page's class has no module, by whose name a command could find it.
        assert place == str(tmp_path / "blobs.sqlite")


class TestSqlitePlace(OfSqlite, PlaceSuite):
    """The contract of a place."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        tier = self.names["SqliteTier"](config, rows, **self.own_settings(directory))
        assert isinstance(tier, SecondaryTierManager)
        return tier

    def damage(self, directory: Path, key: OffloadKey) -> None:
        assert self.flip(key)


class TestSqliteBlobs(OfSqlite, BlobsSuite):
    """The contract of named bytes."""

    def open(self, directory: Path) -> Blobs:
        settings = parse_settings(self.names["SqliteSettings"], self.own_settings(directory))
        blobs = self.names["SqliteBlobs"](settings, str(settings.path))
        assert isinstance(blobs, Blobs)
        return blobs
