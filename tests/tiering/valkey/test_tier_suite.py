"""The valkey tier keeps the contract of every secondary tier, on both servers, with TLS and on a cluster."""

from pathlib import Path

import pytest
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.live_cluster import LiveCluster
from tests.tiering.valkey.live_tls import Certificates

from kvtier.config import OffloadingConfig
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.valkey import ValkeyTier


class TestSingle(TierSuite):
    """As configured by a user who names the server only."""

    @pytest.fixture(autouse=True)
    def _server(self, shared_server: LiveServer) -> None:
        self.url = shared_server.url

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.url)


class TestWithoutExpiry(TestSingle):
    """With blocks that are kept for ever, and one thread."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.url, ttl_s=0, num_threads=1)


class TestEncrypted(TierSuite):
    """With TLS."""

    @pytest.fixture(autouse=True)
    def _server(self, tls_server: LiveServer, certificates: Certificates) -> None:
        with tls_server.client() as client:
            client.flushall()
        self.url = tls_server.tls_url
        self.ca_file = certificates.authority

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.url, ca_file=self.ca_file)


class TestCluster(TierSuite):
    """On three nodes."""

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: LiveCluster) -> None:
        cluster.flush()
        self.cluster = cluster

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.cluster.url, cluster=True)
