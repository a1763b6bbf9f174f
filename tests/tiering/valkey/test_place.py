"""The values of the valkey tier, seen, checked and removed without an engine, on both servers and on a cluster."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.tiering.valkey.conftest import StartTier
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.live_cluster import LiveCluster
from tests.tiering.valkey.test_tier_suite import damage_value

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError
from kvtier.namespace import make_namespace
from kvtier.testing.place_suite import MODELS, PlaceSuite, name_of
from kvtier.testing.tier_suite import ROW_BYTES, make_config
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.kit.blobs import BlobKind
from kvtier.tiering.kit.place import BlockState
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.blobs import LIST_NAME, ValkeyNames
from kvtier.tiering.valkey.cluster import slot_of

NAMES = ValkeyNames()


class OnServers(PlaceSuite):
    """Over what a URL names."""

    tier_class = ValkeyTier

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return ValkeyTier(config, rows, **self.own_settings(directory))  # type: ignore[arg-type]  # a test's own


class TestSingle(OnServers):
    """On a Valkey and on a Redis server."""

    @pytest.fixture(autouse=True)
    def _server(self, shared_server: LiveServer) -> None:
        self.server = shared_server

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        return {"url": self.server.url}

    def damage(self, directory: Path, key: OffloadKey) -> None:
        assert damage_value(self.server, key)


class TestCluster(OnServers):
    """On three nodes."""

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: LiveCluster) -> None:
        self.cluster = cluster

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        return {"url": self.cluster.url, "cluster": True}

    def damage(self, directory: Path, key: OffloadKey) -> None:
        name = NAMES.block(name_of(MODELS[0]), key).encode()
        assert damage_value(self.cluster.owner_of_slot(slot_of(name)), key)


def test_names_can_be_read_back() -> None:
    key = OffloadKey(bytes(range(36)))
    namespace = name_of(MODELS[0])
    assert NAMES.parse(NAMES.block(namespace, key)) == (BlobKind.BLOCK, namespace, key)
    assert NAMES.parse(NAMES.document(namespace)) == (BlobKind.DOCUMENT, namespace, b"")
    for name in ("kvtier:{probe}", f"kvtier:{{{namespace}:}}", "other", LIST_NAME):
        assert NAMES.parse(name) is None


def test_seeing_and_checking_blocks_is_no_use_of_them(
    shared_server: LiveServer, start_tier: StartTier
) -> None:
    """A server evicts by use: after an inspection its order must be what engines made it."""
    start_tier(shared_server.url).store([1])
    name = NAMES.block(name_of(MODELS[0]), parse_key(shared_server))
    with shared_server.client() as client:
        client.execute_command("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
        client.execute_command("CONFIG", "SET", "lfu-log-factor", "0")
        before = client.execute_command("OBJECT FREQ", name)
    place = ValkeyTier.open_place({"url": shared_server.url})
    try:
        for _ in range(3):
            assert len(list(place.blocks())) == 1
        with shared_server.client() as client:
            assert client.execute_command("OBJECT FREQ", name) == before
    finally:
        place.close()
        with shared_server.client() as client:
            client.execute_command("CONFIG", "SET", "maxmemory-policy", "noeviction")
            client.execute_command("CONFIG", "SET", "lfu-log-factor", "10")


def parse_key(server: LiveServer) -> OffloadKey:
    """Return the key of the only block on a server."""
    with server.client() as client:
        parsed = [NAMES.parse(name.decode()) for name in client.scan_iter()]
    (found,) = [one for one in parsed if one is not None and one.block]
    return OffloadKey(found.block)


def test_other_names_are_left_alone(shared_server: LiveServer, start_tier: StartTier) -> None:
    start_tier(shared_server.url).store([1])
    with shared_server.client() as client:
        client.set("somebody", "else")
        client.set("kvtier:notes", "12345")
    place = ValkeyTier.open_place({"url": shared_server.url})
    blocks = list(place.blocks())
    assert place.summary().foreign.num == 1, "only names that begin like ours are looked at"
    assert place.remove(blocks, unless_changed=False).num == 1
    place.end_removal([name_of(MODELS[0])])
    place.close()
    with shared_server.client() as client:
        assert sorted(client.keys()) == [b"kvtier:notes", b"somebody"]


def test_a_value_of_another_kind_is_not_readable(shared_server: LiveServer, start_tier: StartTier) -> None:
    start_tier(shared_server.url).store([1])
    place = ValkeyTier.open_place({"url": shared_server.url})
    (block,) = place.blocks()
    with shared_server.client() as client:
        name = NAMES.block(name_of(MODELS[0]), parse_key(shared_server))
        client.delete(name)
        client.lpush(name, "list")
    assert place.check(block) is BlockState.UNREADABLE
    place.close()


def test_the_description_lives_as_long_as_the_newest_block(
    shared_server: LiveServer, start_tier: StartTier
) -> None:
    namespace = make_namespace(make_config(), ROW_BYTES)
    driver = start_tier(shared_server.url, ttl_s=1000)
    assert driver.store([1]).success
    with shared_server.client() as client:
        assert client.get(NAMES.document(namespace.name)) == namespace.document.encode()
        client.expire(NAMES.document(namespace.name), 10)
        driver.store([2])
        assert 900 < client.ttl(NAMES.document(namespace.name)) <= 1000
    assert start_tier(shared_server.url, ttl_s=0, model="model-b").store([1]).success
    with shared_server.client() as client:
        assert client.ttl(NAMES.document(name_of("model-b"))) == -1


def test_a_description_that_a_dead_server_did_not_get_is_sent_with_the_next_blocks(
    server: LiveServer, start_tier: StartTier
) -> None:
    driver = start_tier(server.url, timeout_s=0.5)
    server.kill()
    assert not driver.store([1]).success
    server.start()
    driver.poll_until(lambda: driver.store([1]).success)
    with server.client() as client:
        assert client.exists(NAMES.document(name_of(MODELS[0])))


def test_a_server_that_is_away_or_shut_is_said_without_the_password(server: LiveServer) -> None:
    with server.client() as client:
        client.execute_command("CONFIG", "SET", "requirepass", "hunter2")
    url = server.url.replace("//", "//:hunter3@")
    with pytest.raises(TierError, match="does not accept") as refused:
        ValkeyTier.open_place({"url": url})
    (finding,) = ValkeyTier.probe({"url": url})
    assert not finding.is_good
    assert "hunter" not in str(refused.value) + finding.text
    server.kill()
    with pytest.raises(TierError, match="cannot be reached"):
        ValkeyTier.open_place({"url": url})
