"""The valkey tier keeps the contract of every secondary tier, on both servers, with TLS and on a cluster."""

from pathlib import Path

import pytest
from tests.tiering.patience import choose_timeout_s
from tests.tiering.valkey.conftest import StartServer
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.live_cluster import LiveCluster
from tests.tiering.valkey.live_tls import Certificates

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.namespace import make_namespace
from kvtier.testing.damage import flip_bit
from kvtier.testing.server_tier_suite import ServerTierSuite
from kvtier.testing.tier_server import TierServer
from kvtier.testing.tier_suite import TierSuite, make_config
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.blobs import ValkeyNames
from kvtier.tiering.valkey.cluster import slot_of

TIMEOUT_S = 0.5


class ServerOfSuite(TierServer):
    """A server that the suite hurts.

    Args:
        server: the server, running.
    """

    def __init__(self, server: LiveServer) -> None:
        self.url = server.url
        self._server = server

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def hang(self) -> None:
        self._server.pause()

    def wake(self) -> None:
        self._server.resume()

    def read_value(self, config: OffloadingConfig, key: OffloadKey) -> bytes | None:
        with self._server.client() as client:
            value = client.get(_name_of(config, key))
        assert value is None or isinstance(value, bytes)
        return value

    def write_value(self, config: OffloadingConfig, key: OffloadKey, value: bytes) -> None:
        with self._server.client() as client:
            client.set(_name_of(config, key), value)


def damage_value(server: LiveServer, key: OffloadKey) -> bool:
    """Flip a bit of the suite's block on a server."""
    name = _name_of(make_config(), key)
    with server.client() as client:
        value = client.get(name)
        damaged = flip_bit(value, key) if isinstance(value, bytes) else None
        if damaged is not None:
            client.set(name, damaged)
    return damaged is not None


def _name_of(config: OffloadingConfig, key: OffloadKey) -> bytes:
    return ValkeyNames().block(make_namespace(config, config.groups[0].page_size_bytes).name, key).encode()


@pytest.fixture(scope="module")
def hurt_server(start_server: StartServer) -> LiveServer:
    """A server that runs whenever a test begins."""
    return start_server("valkey")


@pytest.fixture(scope="module")
def small_server(start_server: StartServer) -> LiveServer:
    """A server that has room for some hundred blocks and evicts none."""
    return start_server("valkey", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")


class TestSingle(ServerTierSuite):
    """As configured by a user who names the server only, and shortens the time-out."""

    num_outages = 6
    names_siblings = True

    @pytest.fixture(autouse=True)
    def _use_servers(
        self, hurt_server: LiveServer, small_server: LiveServer, request: pytest.FixtureRequest
    ) -> None:
        for server in (hurt_server, small_server):
            with server.client() as client:
                client.flushall()
        self.server = ServerOfSuite(hurt_server)
        self.small_url = small_server.url
        self.timeout_s = choose_timeout_s(request, TIMEOUT_S)

    def get_server(self) -> ServerOfSuite:
        return self.server

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.server.url, timeout_s=self.timeout_s)

    def make_tier_on_small_server(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.small_url)


class TestDefaults(TierSuite):
    """As configured by a user who names the server only, on each kind of server."""

    names_siblings = True

    @pytest.fixture(autouse=True)
    def _server(self, shared_server: LiveServer) -> None:
        self.url = shared_server.url
        self.server = shared_server

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.url)

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return damage_value(self.server, key)


class TestWithoutExpiry(TestDefaults):
    """With blocks that are kept for ever, and one thread."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.url, ttl_s=0, num_threads=1)


class TestEncrypted(TierSuite):
    """With TLS."""

    names_siblings = True

    @pytest.fixture(autouse=True)
    def _server(self, tls_server: LiveServer, certificates: Certificates) -> None:
        with tls_server.client() as client:
            client.flushall()
        self.url = tls_server.tls_url
        self.server = tls_server
        self.ca_file = certificates.authority

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.url, ca_file=self.ca_file)

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return damage_value(self.server, key)


class TestCluster(TierSuite):
    """On three nodes."""

    names_siblings = True

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: LiveCluster) -> None:
        self.cluster = cluster

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.cluster.url, cluster=True)

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return damage_value(self.cluster.owner_of_slot(slot_of(_name_of(make_config(), key))), key)
