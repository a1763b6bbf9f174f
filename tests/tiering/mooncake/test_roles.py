"""The roles of the mooncake tier, and the contract of its place, over a real store."""

import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from tests.tiering.mooncake.conftest import TIMEOUT_S
from tests.tiering.mooncake.live import LiveStore, Vandal
from tests.tiering.roles.bench import RawBackend
from tests.tiering.roles.every_role import EveryRole

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.damage import flip_bit
from kvtier.testing.place_suite import MODELS, PlaceSuite, name_of
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.mooncake import MooncakeTier

pytestmark = pytest.mark.servers

LEASE_MS = 300
"""Short, so that a damaged value can be removed soon after it was read."""


class Values(RawBackend):
    """The values of a store that is the test's alone.

    Args:
        store: the store.
    """

    def __init__(self, store: LiveStore) -> None:
        self._page = f"http://127.0.0.1:{store.admin_port}/get_all_keys"
        self._vandal = Vandal(store.address)

    def close(self) -> None:
        """Leave the store."""
        self._vandal.close()

    def clear(self) -> None:
        """Remove everything, leased or not."""
        for name in self.names():
            self.remove(name)

    def name_of(self, namespace: str, name: bytes) -> str:
        return f"{namespace}/{name.hex()}"

    def strange_names(self, namespace: str) -> list[str]:
        return ["notes", f"notes/{namespace}", f"x{namespace}/ab", f"{namespace[:-1]}/ab", f"{namespace}x/ab"]

    def names(self) -> list[str]:
        with urllib.request.urlopen(self._page, timeout=60.0) as answer:  # noqa: S310  # http
            found: bytes = answer.read()
        return [name for name in found.decode().splitlines() if not name.startswith("ready/")]

    def read(self, name: str) -> bytes | None:
        return self._vandal.get(name) or None

    def write(self, name: str, value: bytes) -> None:
        self._vandal.put(name, value)

    def remove(self, name: str) -> None:
        self._vandal._store.remove(name, True)


@pytest.fixture(scope="module")
def own_store() -> Iterator[LiveStore]:
    """A store whose leases end soon."""
    store = LiveStore(lease_ms=LEASE_MS)
    yield store
    store.close()


@pytest.fixture(scope="module")
def own_values(own_store: LiveStore) -> Iterator[Values]:
    """What it has."""
    values = Values(own_store)
    yield values
    values.close()


@pytest.fixture
def values(own_values: Values) -> Values:
    """The same, which is nothing."""
    own_values.clear()
    return own_values


def reach(store: LiveStore) -> dict[str, object]:
    """Return a tier's settings for the store."""
    place = {"master": store.address, "admin_port": store.admin_port, "allow_any_interface": True}
    return place | {"timeout_s": TIMEOUT_S}


class TestPureClient(EveryRole):
    """In the memory of others."""

    tier_class = MooncakeTier
    lacks: ClassVar = {
        "evictions": "a store evicts by itself and names no block",
        "quotas": "a store tells its clients neither what is in it nor when a block was used",
        "expiry": "a store has no time to live",
        "emptied": "a store is not looked after: what it has lost is found by loads",
        "lengths": "a lookup says that a value is there, not how long it is",
        "removal at once": "what was read is leased, and removed when that has ended",
        "empty values": "a store takes no value without bytes",
        "documents": "clients cannot list: descriptions have 32 names of their own",
    }

    @pytest.fixture(autouse=True)
    def _use_store(self, own_store: LiveStore, values: Values) -> None:
        self.store = own_store
        self.values = values

    def own_settings(self) -> dict[str, object]:
        return reach(self.store)

    def get_backend(self) -> Values:
        return self.values


class TestPlace(PlaceSuite):
    """What commands without an engine see."""

    tier_class = MooncakeTier

    @pytest.fixture(autouse=True)
    def _use_store(self, own_store: LiveStore, values: Values) -> None:
        self.store = own_store
        self.values = values

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        return reach(self.store)

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return MooncakeTier(config, rows, **reach(self.store))  # type: ignore[arg-type]  # a test's own

    def damage(self, directory: Path, key: OffloadKey) -> None:
        name = self.values.name_of(name_of(MODELS[0]), key)
        damaged = flip_bit(self.values.read(name) or b"", key)
        assert damaged is not None
        self.values.write(name, damaged)
