"""Real stores and tiers on them, ended with the test; where the library is not installed the tests skip and say why."""

import dataclasses
import os
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from tests.servers import MOONCAKE_MISSING

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read while the library is loaded, by whoever is first
pytest.importorskip("mooncake.store", reason=MOONCAKE_MISSING, exc_type=ImportError)

from tests.tiering.mooncake.live import (
    HANG_GUARD_S,
    KEPT_CLIENTS,
    LiveStore,
    Vandal,
)  # needs the library itself
from tests.tiering.roles.bench import RawBackend

from kvtier.config import OffloadingConfig
from kvtier.namespace import make_namespace
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, key_of, make_config, make_rows
from kvtier.tiering.mooncake import MooncakeTier
from kvtier.tiering.mooncake.blobs import MooncakeNames

TIMEOUT_S = 1.0

StartTier = Callable[..., TierDriver]


def salted(config: OffloadingConfig, salt: str) -> OffloadingConfig:
    """Return a configuration whose blocks only tests with the same ``salt`` see."""
    return dataclasses.replace(config, extra_config={"tenant_salt": salt})


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
        self._vandal.remove(name)


@pytest.fixture(scope="session")
def shared_store() -> Iterator[LiveStore]:
    """A store with two providers that no test harms; its leases are short, so that removals need not wait long."""
    store = LiveStore(num_providers=2, lease_ms=300)
    yield store
    store.close()


@pytest.fixture(scope="session")
def cleared_store() -> Iterator[LiveStore]:
    """A store that each test of a few modules has for itself, cleared; its leases end nearly at once."""
    store = LiveStore(lease_ms=50)
    yield store
    KEPT_CLIENTS.close(store.address)
    store.close()


@pytest.fixture(scope="session")
def values_of_all(cleared_store: LiveStore) -> Iterator[Values]:
    """What it has."""
    values = Values(cleared_store)
    yield values
    values.close()


@pytest.fixture
def values(values_of_all: Values) -> Values:
    """The same, which is nothing."""
    values_of_all.clear()
    return values_of_all


@pytest.fixture
def store() -> Iterator[LiveStore]:
    """A store with one provider that the test may kill."""
    store = LiveStore()
    yield store
    store.close()


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """What keeps the blocks of a test from those of others in the same store."""
    return str(request.node.nodeid)


@pytest.fixture
def start_tier(salt: str) -> Iterator[StartTier]:
    """Build tiers on a store, with something that drives them."""
    drivers: list[TierDriver] = []

    def start(store: LiveStore | str, model: str = "model-a", **options: object) -> TierDriver:
        address = store if isinstance(store, str) else store.address
        arguments = {"master": address, "timeout_s": TIMEOUT_S, "allow_any_interface": True} | options
        rows = make_rows()
        config = salted(make_config(model), salt)
        tier = MooncakeTier(config, rows, **arguments)  # type: ignore[arg-type]  # a test's own options
        drivers.append(TierDriver(tier, rows))
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


@pytest.fixture
def name_of(salt: str) -> Callable[[int], str]:
    """Return the name under which a block of model-a is kept."""
    namespace = make_namespace(salted(make_config("model-a"), salt), ROW_BYTES).name
    return lambda number: MooncakeNames().block(namespace, key_of(number))


@pytest.fixture
def vandal(shared_store: LiveStore) -> Iterator[Vandal]:
    """Somebody else in the shared store."""
    vandal = Vandal(shared_store.address)
    yield vandal
    vandal.close()
