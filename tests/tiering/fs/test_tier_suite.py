"""The fs tier keeps the contract of every secondary tier, with and without what file systems may lack."""

import errno
import os
from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.damage import flip_bit_in_files
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.system import SystemCalls


def open_without_unnamed_files(path: str, flags: int, mode: int) -> int:
    """Refuse ``O_TMPFILE`` as file systems do that lack it."""
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "no unnamed files", path)
    return os.open(path, flags, mode)


class OnDisk(TierSuite):
    """Over files, which anything may damage."""

    @pytest.fixture(autouse=True)
    def _note_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return flip_bit_in_files(self.directory, key)


class TestDefaults(OnDisk):
    """As configured by a user who names the directory only."""

    names_siblings = True

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return FSTier(config, rows, root_dir=directory, capacity_bytes="4MiB")


class TestBuffered(OnDisk):
    """Through the page cache."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return FSTier(config, rows, root_dir=directory, capacity_bytes="4MiB", direct_io=False)


class TestAlone(OnDisk):
    """When no other process writes to the directory."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return FSTier(config, rows, root_dir=directory, capacity_bytes="4MiB", shared=False)


class TestStepwise(OnDisk):
    """Where nothing was compiled: each call of the system by itself."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return FSTier(config, rows, root_dir=directory, capacity_bytes="4MiB", calls=SystemCalls())


class TestNamedTemporaries(OnDisk):
    """On a file system without unnamed files."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        calls = SystemCalls(open=open_without_unnamed_files)
        return FSTier(config, rows, root_dir=directory, capacity_bytes="4MiB", calls=calls, num_threads=2)
