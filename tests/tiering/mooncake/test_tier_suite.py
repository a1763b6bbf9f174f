"""The mooncake tier keeps the contract of every secondary tier, with and without memory of its own."""

from pathlib import Path

import pytest
from tests.tiering.mooncake.conftest import TIMEOUT_S, salted
from tests.tiering.mooncake.live import LiveStore

from kvtier.config import OffloadingConfig
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake import MooncakeTier


class TestPureClient(TierSuite):
    """In the memory of others, each block twice."""

    @pytest.fixture(autouse=True)
    def _join(self, shared_store: LiveStore) -> None:
        self.master = shared_store.address

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        own = salted(config, str(directory))
        return MooncakeTier(own, rows, master=self.master, timeout_s=TIMEOUT_S, num_replicas=2)


class TestOwnSegment(TierSuite):
    """With memory of its own in the store."""

    @pytest.fixture(autouse=True)
    def _join(self, shared_store: LiveStore) -> None:
        self.master = shared_store.address

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        own = salted(config, str(directory))
        return MooncakeTier(
            own, rows, master=self.master, timeout_s=TIMEOUT_S, segment_bytes="16MiB", num_threads=1
        )
