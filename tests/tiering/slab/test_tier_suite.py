"""The slab tier keeps the contract of every secondary tier, with and without direct I/O."""

import errno
import os
from pathlib import Path

from kvtier.config import OffloadingConfig
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


class TestDefaults(TierSuite):
    """As configured by a user who names the file only."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return SlabTier(config, rows, path=slab_of(config, directory), capacity_bytes="1MiB")


class TestBuffered(TierSuite):
    """Through the page cache, one thread."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        path = slab_of(config, directory)
        return SlabTier(config, rows, path=path, capacity_bytes="1MiB", direct_io=False, num_threads=1)


class TestWithoutDirectIO(TierSuite):
    """On a file system that refuses direct I/O, with another eviction policy."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        calls = SystemCalls(set_flags=refuse_direct_io)
        settings = TierSettings(policy="arc")
        path = slab_of(config, directory)
        return SlabTier(config, rows, settings, path=path, capacity_bytes="1MiB", calls=calls)
