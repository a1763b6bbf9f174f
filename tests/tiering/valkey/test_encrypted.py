"""The valkey tier keeps the contract of a tier that encrypts, on each kind of server."""

from pathlib import Path

import pytest
from tests.tiering.encrypted_suite import EncryptedSuite
from tests.tiering.valkey.live import LiveServer

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.blobs import ValkeyNames


class TestServer(EncryptedSuite):
    """As configured by a user who names the server only."""

    @pytest.fixture(autouse=True)
    def _server(self, shared_server: LiveServer) -> None:
        self.url = shared_server.url
        self.server = shared_server

    def make_encrypting(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        return ValkeyTier(config, rows, url=self.url)

    def read_value(self, tier: SecondaryTierManager, key: OffloadKey) -> bytes:
        assert isinstance(tier, ValkeyTier)
        with self.server.client() as client:
            value = client.get(_name_of(tier, key))
        assert isinstance(value, bytes)
        return value

    def write_value(self, tier: SecondaryTierManager, key: OffloadKey, value: bytes) -> None:
        assert isinstance(tier, ValkeyTier)
        with self.server.client() as client:
            client.set(_name_of(tier, key), value)


def _name_of(tier: ValkeyTier, key: OffloadKey) -> str:
    return ValkeyNames().block(tier._namespace.name, tier._namespace.format.name(key))
