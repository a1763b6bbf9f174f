"""The mooncake tier keeps the contract of a tier that encrypts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiering.encrypted_suite import EncryptedSuite
from tests.tiering.mooncake.conftest import TIMEOUT_S, salted
from tests.tiering.mooncake.live import LiveStore, Vandal

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.tier_suite import make_config
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake import MooncakeTier
from kvtier.tiering.mooncake.blobs import MooncakeNames

pytestmark = pytest.mark.servers

LEASE_MS = 300
"""Short, so that a damaged value can be removed soon after it was read."""


@pytest.fixture(scope="module")
def short_store() -> Iterator[LiveStore]:
    """A store whose leases end soon."""
    store = LiveStore(num_providers=1, lease_ms=LEASE_MS)
    yield store
    store.close()


class TestPureClient(EncryptedSuite):
    """In the memory of others."""

    @pytest.fixture(autouse=True)
    def _join(self, short_store: LiveStore, tmp_path: Path) -> Iterator[None]:
        self.master = short_store.address
        self.salt = str(tmp_path)
        self.vandal = Vandal(self.master)
        yield
        self.vandal.close()

    def make_encrypting(
        self, config: OffloadingConfig, rows: memoryview, directory: Path
    ) -> SecondaryTierManager:
        own = replace(config, extra_config={**config.extra_config, "tenant_salt": self.salt})
        return MooncakeTier(own, rows, master=self.master, timeout_s=TIMEOUT_S, allow_any_interface=True)

    def own_config(self) -> OffloadingConfig:
        return salted(make_config(), self.salt)

    def read_value(self, tier: SecondaryTierManager, key: OffloadKey) -> bytes:
        assert isinstance(tier, MooncakeTier)
        return self.vandal.get(self.name_of(tier, key)) or b""

    def write_value(self, tier: SecondaryTierManager, key: OffloadKey, value: bytes) -> None:
        assert isinstance(tier, MooncakeTier)
        self.vandal.put(self.name_of(tier, key), value)

    def name_of(self, tier: MooncakeTier, key: OffloadKey) -> str:
        namespace = tier._namespace
        return MooncakeNames().block(namespace.name, namespace.format.name(key))
