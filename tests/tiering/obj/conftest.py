"""A server for all tests of the folder, and tiers over names of the test's own."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("obstore", reason="the obj tier needs its client: pip install 'kvtier[obj]'")

import obstore
from tests.tiering.obj.server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server  # needs the client itself

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.namespace import make_namespace
from kvtier.testing.tier_server import TierServer
from kvtier.testing.tier_suite import TierDriver, key_of, make_config, make_rows
from kvtier.tiering.kit.blobs import FolderNames
from kvtier.tiering.obj import ObjTier

HANG_GUARD_S = 60.0
TIMEOUT_S = 0.5
"""Of tiers whose server is hurt."""

StartTier = Callable[..., TierDriver]


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One real S3 server for the session."""
    server = S3Server(tmp_path_factory.mktemp("weed"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with room for about a megabyte."""
    server = S3Server(tmp_path_factory.mktemp("small"), "-volume.max=1 -master.volumeSizeLimitMB=1")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(shared_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, running, with credentials for it in the environment."""
    shared_server.start()
    set_credentials(monkeypatch)
    return shared_server


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the server's credentials, and no others, where the client looks for them."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


def s3_options(server: S3Server, prefix: str) -> dict[str, object]:
    """Return a tier's settings for the server and names of one test."""
    place = {"url": f"s3://{BUCKET}", "prefix": prefix, "endpoint": server.endpoint}
    return place | {"region": "us-east-1", "allow_http": True, "num_threads": 4}


@contextmanager
def tiers_of(options: dict[str, object]) -> Iterator[StartTier]:
    """Give a function that builds tiers with something that drives them, and end them afterwards."""
    drivers: list[TierDriver] = []

    def start(model: str = "model-a", **changes: object) -> TierDriver:
        rows = make_rows()
        tier = ObjTier(make_config(model), rows, **(options | changes))  # type: ignore[arg-type]  # a test's own
        drivers.append(TierDriver(tier, rows))
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.tier.shutdown(HANG_GUARD_S)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """What names begin with in this test and in no other."""
    return f"test/{abs(hash(request.node.nodeid)):x}"


class Bucket:
    """What is in the test's part of the bucket, seen past the tier.

    Args:
        server: the server.
        prefix: what the test's names begin with.
    """

    def __init__(self, server: S3Server, prefix: str) -> None:
        self._store = server.open_bucket()
        self._prefix = prefix

    def names(self, suffix: str = "") -> list[str]:
        """Return the names of objects that end so."""
        pages = obstore.list(self._store, self._prefix).collect()
        return sorted(meta["path"] for meta in pages if meta["path"].endswith(suffix))

    def name_of(self, number: int) -> str:
        """Return the name of the block ``number``, of the only namespace that has it."""
        (name,) = self.names(f"/{key_of(number).hex()}.kv")
        return name

    def read(self, name: str) -> bytes:
        """Return an object's bytes."""
        return bytes(obstore.get(self._store, name).bytes())

    def write(self, name: str, body: bytes) -> None:
        """Write over an object."""
        obstore.put(self._store, name, body)

    def remove(self, name: str) -> None:
        """Remove an object."""
        obstore.delete(self._store, name)

    def num_bytes(self, suffix: str = "") -> int:
        """Return the bytes of objects whose names end so."""
        return sum(len(self.read(name)) for name in self.names(suffix))


@pytest.fixture
def bucket(server: S3Server, prefix: str) -> Bucket:
    """The bucket, past the tier."""
    return Bucket(server, prefix)


class ServerOfSuite(TierServer):
    """A server that the suite hurts.

    Args:
        server: the server, running.
        bucket: the part of its bucket that is the test's.
        prefix: what names begin with there.
    """

    def __init__(self, server: S3Server, bucket: Bucket, prefix: str) -> None:
        self._server = server
        self._bucket = bucket
        self._prefix = prefix

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def hang(self) -> None:
        self._server.hang()

    def wake(self) -> None:
        self._server.wake()

    def read_value(self, config: OffloadingConfig, key: OffloadKey) -> bytes | None:
        name = self._name_of(config, key)
        return self._bucket.read(name) if name in self._bucket.names(".kv") else None

    def write_value(self, config: OffloadingConfig, key: OffloadKey, value: bytes) -> None:
        self._bucket.write(self._name_of(config, key), value)

    def _name_of(self, config: OffloadingConfig, key: OffloadKey) -> str:
        namespace = make_namespace(config, config.groups[0].page_size_bytes)
        return FolderNames(self._prefix).block(namespace.name, key)


@pytest.fixture
def suite_server(server: S3Server, bucket: Bucket, prefix: str) -> ServerOfSuite:
    """The server, to be hurt by the tiers' suite."""
    return ServerOfSuite(server, bucket, prefix)


@pytest.fixture
def start_tier(server: S3Server, prefix: str) -> Iterator[StartTier]:
    """Build tiers on the server."""
    with tiers_of(s3_options(server, prefix)) as start:
        yield start
