"""The mooncake tier keeps the contract of every secondary tier, with and without memory of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiering.mooncake.conftest import TIMEOUT_S, salted
from tests.tiering.mooncake.live import LiveStore, Vandal

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.namespace import make_namespace
from kvtier.testing.damage import flip_bit
from kvtier.testing.server_tier_suite import ServerTierSuite
from kvtier.testing.tier_server import TierServer
from kvtier.testing.tier_suite import TierSuite, make_config
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake import MooncakeTier
from kvtier.tiering.mooncake.blobs import MooncakeNames

pytestmark = pytest.mark.servers

LEASE_MS = 300
"""Short, so that a damaged value can be removed soon after it was read."""


class ServerOfSuite(TierServer):
    """A master and its providers, which the suite hurts together.

    Args:
        store: they, running.
        salt: what keeps the blocks of the test from those of others.
    """

    def __init__(self, store: LiveStore, salt: str) -> None:
        self.store = store
        self.salt = salt
        self._vandal: Vandal | None = None

    def close(self) -> None:
        """Leave the store."""
        if self._vandal is not None:
            self._vandal.close()

    def start(self) -> None:
        self.store.restart()

    def kill(self) -> None:
        self.store.close()

    def hang(self) -> None:
        for process in (self.store.master, *self.store.providers):
            process.freeze()

    def wake(self) -> None:
        for process in (self.store.master, *self.store.providers):
            process.thaw()

    def read_value(self, config: OffloadingConfig, key: OffloadKey) -> bytes | None:
        return self._stranger().get(self._name_of(config, key)) or None

    def write_value(self, config: OffloadingConfig, key: OffloadKey, value: bytes) -> None:
        self._stranger().put(self._name_of(config, key), value)

    def _stranger(self) -> Vandal:
        if self._vandal is None:
            self._vandal = Vandal(self.store.address)
        return self._vandal

    def _name_of(self, config: OffloadingConfig, key: OffloadKey) -> str:
        namespace = make_namespace(salted(config, self.salt), config.groups[0].page_size_bytes)
        return MooncakeNames().block(namespace.name, key)


@pytest.fixture(scope="module")
def hurt_store() -> Iterator[LiveStore]:
    """A store that runs whenever a test begins."""
    store = LiveStore(num_providers=2, lease_ms=LEASE_MS)
    yield store
    store.close()


@pytest.fixture(scope="module")
def small_store() -> Iterator[LiveStore]:
    """A store whose provider lends as little as it may."""
    store = LiveStore(segment_bytes=16 * 2**20)
    yield store
    store.close()


class TestPureClient(ServerTierSuite):
    """In the memory of others, each block twice."""

    @pytest.fixture(autouse=True)
    def _join(self, hurt_store: LiveStore, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
        self.server = ServerOfSuite(hurt_store, str(tmp_path))
        self.request = request
        yield
        self.server.close()

    def get_server(self) -> ServerOfSuite:
        return self.server

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        own = salted(config, self.server.salt)
        address = self.server.store.address
        return MooncakeTier(
            own, rows, master=address, timeout_s=TIMEOUT_S, num_replicas=2, allow_any_interface=True
        )

    def make_tier_on_small_server(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        address = self.request.getfixturevalue("small_store").address
        return MooncakeTier(config, rows, master=address, timeout_s=TIMEOUT_S, allow_any_interface=True)


class TestOwnSegment(TierSuite):
    """With memory of its own in the store."""

    @pytest.fixture(autouse=True)
    def _join(self, shared_store: LiveStore, tmp_path: Path) -> Iterator[None]:
        self.master = shared_store.address
        self.server = ServerOfSuite(shared_store, str(tmp_path))
        yield
        self.server.close()

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        damaged = flip_bit(self.server.read_value(make_config(), key) or b"", key)
        if damaged is not None:
            self.server.write_value(make_config(), key, damaged)
        return damaged is not None

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        own = salted(config, str(directory))
        return MooncakeTier(
            own,
            rows,
            master=self.master,
            timeout_s=TIMEOUT_S,
            segment_bytes="16MiB",
            num_threads=1,
            allow_any_interface=True,
        )
