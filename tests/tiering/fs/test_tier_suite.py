"""The tier of packs keeps the contract of every secondary tier, with and without direct I/O."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.tiering.fs.engine import AwakeTier

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.damage import flip_bit_in_files
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls


def refuse_direct_io(path: str, flags: int, mode: int) -> int:
    """Open a file like a file system without ``O_DIRECT``."""
    if flags & os.O_DIRECT:
        raise OSError(22, "no direct I/O")
    return REAL_CALLS.open(path, flags, mode)


class InDirectory(TierSuite):
    """Below a directory, which anything may damage."""

    settings = TierSettings()
    options: dict[str, Any] = {}  # noqa: RUF012  # Any: as the tier's own; not changed

    @pytest.fixture(autouse=True)
    def _note_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return flip_bit_in_files(self.directory, key)

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return AwakeTier(
            config, rows, self.settings, root_dir=directory / "packs", capacity_bytes="2MiB", **self.options
        )


class TestDefaults(InDirectory):
    """As configured by a user who names the directory only."""

    names_siblings = True


class TestBuffered(InDirectory):
    """Through the page cache, one thread."""

    options = {"direct_io": False, "num_threads": 1}  # noqa: RUF012


class TestWithoutDirectIO(InDirectory):
    """On a file system that refuses direct I/O, with another eviction policy."""

    settings = TierSettings(policy="arc")
    options = {"calls": SystemCalls(open=refuse_direct_io)}  # noqa: RUF012


class TestDurable(InDirectory):
    """With blocks that outlive a loss of power, and packs of one slot."""

    options = {"durability": "fdatasync", "pack_bytes": "16KiB"}  # noqa: RUF012
