"""The values of a server keep the contract of named bytes, and what is wrong with one value is that value's outcome."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiering.valkey.conftest import StartServer, StartTier
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.live_cluster import LiveCluster, name_of
from tests.tiering.valkey.live_tls import Certificates

from kvtier.base import make_offload_key
from kvtier.settings import parse_settings
from kvtier.testing.blobs_suite import NAMESPACE, VALUE_BYTES, BlobsSuite
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import TierDriver, make_config, make_rows
from kvtier.tiering.kit.blobs import Blob, Put, PutKind
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.threaded_tier import CHECK_S
from kvtier.tiering.valkey import ValkeyTier, blobs
from kvtier.tiering.valkey.blobs import ValkeyBlobs, ValkeyNames
from kvtier.tiering.valkey.settings import ValkeySettings

HANG_GUARD_S = 60.0
LEAST_LIMIT_BYTES = 2**20
"""The least that servers take for ``proto-max-bulk-len``."""

SHORT_BYTES = 1000
LONG_WORDS = "ERR Protocol error: invalid bulk length"
NUM_FILLS = 2000


def open_blobs(url: str, **own: object) -> ValkeyBlobs:
    return ValkeyBlobs(parse_settings(ValkeySettings, {"url": url, "timeout_s": HANG_GUARD_S, **own}))


def blob_of(number: int, num_bytes: int) -> Blob:
    """Return a block of zeros."""
    name = ValkeyNames().block(NAMESPACE, make_offload_key(number.to_bytes(32, "big"), 0))
    return Blob(name, [bytes(num_bytes)], num_bytes)


class TestServers(BlobsSuite):
    """On a Valkey and on a Redis server."""

    @pytest.fixture(autouse=True)
    def _use_server(self, shared_server: LiveServer) -> None:
        self.url = shared_server.url

    def open(self, directory: Path) -> ValkeyBlobs:
        return open_blobs(self.url)


class TestAskingFirst(TestServers):
    """The same, asked first what is there, as where a call has many bytes."""

    @pytest.fixture(autouse=True)
    def _ask_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blobs, "ASK_FIRST_BYTES", 0)


class TestTLS(BlobsSuite):
    """With TLS."""

    @pytest.fixture(autouse=True)
    def _use_server(self, tls_server: LiveServer, certificates: Certificates) -> None:
        with tls_server.client() as client:
            client.flushall()
        self.url, self.ca_file = tls_server.tls_url, certificates.authority

    def open(self, directory: Path) -> ValkeyBlobs:
        return open_blobs(self.url, ca_file=self.ca_file)


class TestCluster(BlobsSuite):
    """On three nodes."""

    has_parts = True

    @pytest.fixture(autouse=True)
    def _use_cluster(self, cluster: LiveCluster) -> None:
        self.url = cluster.url

    def open(self, directory: Path) -> ValkeyBlobs:
        return open_blobs(self.url, cluster=True)


@pytest.fixture
def limited(shared_server: LiveServer) -> Iterator[LiveServer]:
    """A server that takes no value above a MiB."""
    with shared_server.client() as client:
        before = client.config_get("proto-max-bulk-len")["proto-max-bulk-len"]
        client.config_set("proto-max-bulk-len", LEAST_LIMIT_BYTES)
    yield shared_server
    with shared_server.client() as client:
        client.config_set("proto-max-bulk-len", before)


@pytest.mark.parametrize("num_bytes", [LEAST_LIMIT_BYTES + 1, 2**26])
def test_a_value_that_is_too_long_is_refused_alone(limited: LiveServer, num_bytes: int) -> None:
    lengths = [SHORT_BYTES, num_bytes, SHORT_BYTES, num_bytes, SHORT_BYTES]
    own = open_blobs(limited.url)
    try:
        puts = own.put_new([blob_of(number, length) for number, length in enumerate(lengths)], None)
        refusal = Put(PutKind.REFUSED, LONG_WORDS)
        assert puts == [Put(PutKind.WRITTEN) if length == SHORT_BYTES else refusal for length in lengths]
        assert own.sizes([blob_of(4, SHORT_BYTES).name], is_lookup=False)
    finally:
        own.close()


def test_rows_that_are_too_long_are_said_once_and_no_fault(
    limited: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    row_bytes = LEAST_LIMIT_BYTES
    rows = make_rows(2, row_bytes)
    driver = TierDriver(ValkeyTier(make_config(row_bytes=row_bytes), rows, url=limited.url), rows)
    try:
        for _ in range(3):
            result = driver.store([1, 2], [0, 1])
            assert (result.success, result.is_fault) == (False, False)
        assert not driver.lookup(1)
        assert driver.tier.drain_unanswered() == 0
        assert driver.tier.stats()["store_errors"] == 6
    finally:
        assert driver.tier.shutdown(HANG_GUARD_S)
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert f"of {ENVELOPE_BYTES + row_bytes} bytes was not stored: {LONG_WORDS}" in line


def test_a_value_that_exists_tells_its_length_and_lives_longer(shared_server: LiveServer) -> None:
    own = open_blobs(shared_server.url, ttl_s=1000)
    blob = blob_of(1, VALUE_BYTES)
    with shared_server.client() as client:
        client.set(blob.name, b"short", ex=10)
        assert own.put_new([blob], None) == [Put(PutKind.EXISTED, num_bytes=5)]
        assert client.get(blob.name) == b"short"
        assert 990_000 < client.pttl(blob.name) <= 1_000_000
        client.delete(blob.name)
        client.rpush(blob.name, "somebody's")
        assert own.put_new([blob], None) == [Put(PutKind.WRITTEN)]
        client.set(blob.name, b"")
        assert own.put_new([blob], None) == [Put(PutKind.WRITTEN)]
    own.close()


def test_what_a_full_server_has_is_there_and_not_declined(start_server: StartServer) -> None:
    server = start_server("valkey")
    own = open_blobs(server.url)
    there, new = blob_of(1, VALUE_BYTES), blob_of(2, VALUE_BYTES)
    own.put_new([there], None)
    with server.client() as client:
        client.config_set("maxmemory", 1)
        client.config_set("maxmemory-policy", "noeviction")
    assert own.put_new([there, new], None) == [
        Put(PutKind.EXISTED, num_bytes=VALUE_BYTES),
        Put(PutKind.NO_ROOM, "OOM"),
    ]
    own.close()


def test_a_description_that_a_server_evicts_before_the_blocks_is_written_again_and_no_loss(
    start_server: StartServer, start_tier: StartTier, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server("valkey", "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    driver = start_tier(server.url, ttl_s=0, clock=clock)  # so that no store is a use of it
    assert driver.store([1]).success
    names = ValkeyNames()
    with server.client() as client:
        (document,) = [name for name in client.scan_iter() if name.endswith(b":namespace.json")]
        for number in range(2, NUM_FILLS):
            if not client.exists(document):
                break
            assert driver.store([number]).success
        assert not client.exists(document)
        assert names.parse(document.decode()) is not None
        clock.advance(2 * CHECK_S)
        assert not driver.lookup(NUM_FILLS)
        assert client.exists(document)
        assert client.exists(name_of(number - 1))
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert not driver.tier.drain_emptied()
