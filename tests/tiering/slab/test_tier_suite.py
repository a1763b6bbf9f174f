"""The slab tier keeps the contract of every secondary tier, with and without direct I/O."""

import errno
import os
from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.damage import flip_bit_in_files
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.slab import SlabTier
from kvtier.tiering.slab.slab_file import REAL_CALLS, SystemCalls


def refuse_direct_io(fd: int, flags: int) -> None:
    """Set flags like a file system without ``O_DIRECT``."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no direct I/O")
    REAL_CALLS.set_flags(fd, flags)


def slab_of(config: OffloadingConfig, directory: Path) -> Path:
    """Return a file for each engine: two tiers of a test live at the same time, and a slab has one owner."""
    return directory / f"{config.model.name}-{config.groups[0].page_size_bytes}.slab"


class InFile(TierSuite):
    """Over a file, which anything may damage."""

    @pytest.fixture(autouse=True)
    def _note_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return flip_bit_in_files(self.directory, key)


class TestDefaults(InFile):
    """As configured by a user who names the file only."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return SlabTier(config, rows, path=slab_of(config, directory), capacity_bytes="1MiB")


class TestBuffered(InFile):
    """Through the page cache, one thread."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        path = slab_of(config, directory)
        return SlabTier(config, rows, path=path, capacity_bytes="1MiB", direct_io=False, num_threads=1)


class TestWithoutDirectIO(InFile):
    """On a file system that refuses direct I/O, with another eviction policy."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        calls = SystemCalls(set_flags=refuse_direct_io)
        tier = SlabTier(config, rows, path=slab_of(config, directory), capacity_bytes="1MiB", calls=calls)
        tier.settings = TierSettings(policy="arc")
        return tier
