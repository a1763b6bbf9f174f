"""The roles of the valkey tier, on each kind of server."""

from typing import ClassVar

import pytest
from tests.tiering.roles.bench import RawBackend
from tests.tiering.roles.every_role import EveryRole
from tests.tiering.valkey.live import LiveServer

from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.blobs import LIST_NAME


class Values(RawBackend):
    """The values of a server that is the test's alone.

    Args:
        server: the server.
    """

    def __init__(self, server: LiveServer) -> None:
        self._server = server

    def name_of(self, namespace: str, name: bytes) -> str:
        return f"kvtier:{{{namespace}:{name.hex()}}}"

    def document_name(self, namespace: str) -> str:
        return f"kvtier:{{{namespace}}}:namespace.json"

    def strange_names(self, namespace: str) -> list[str]:
        return [
            "somebody's",
            "kvtier:notes",
            "kvtier:{probe}",
            f"kvtier:{{{namespace}:}}",
            f"kvtier:{{{namespace}:ab}}:ab",
            f"kvtier:{{{namespace}:AB}}",
            f"kvtier:{{{namespace}x:ab}}",
            f"xkvtier:{{{namespace}:ab}}",
        ]

    def names(self) -> list[str]:
        with self._server.client() as client:
            return [name.decode() for name in client.scan_iter(count=10_000)]

    def read(self, name: str) -> bytes | None:
        with self._server.client() as client:
            if client.type(name) != b"string":
                return None
            value = client.get(name)
        assert isinstance(value, bytes)
        return value

    def write(self, name: str, value: bytes) -> None:
        with self._server.client() as client:
            client.set(name, value)

    def remove(self, name: str) -> None:
        with self._server.client() as client:
            client.delete(name)

    def add_age(self, name: str, seconds: float) -> None:
        age_ms = int(1000 * seconds)
        with self._server.client() as client:
            left_ms = client.pttl(name)
            assert isinstance(left_ms, int)
            if 0 <= left_ms <= age_ms:
                client.delete(name)
                return
            ttl_ms = left_ms - age_ms if left_ms >= 0 else 0
            client.restore(name, ttl_ms, client.dump(name), replace=True, idletime=int(seconds))


class TestServer(EveryRole):
    """As configured by a user who names the server only."""

    tier_class = ValkeyTier
    lacks: ClassVar = {
        "evictions": "a server evicts by itself and names no block",
        "untouched slots": "bytes are checked where they land, in the slot",
        "remains": "a server removes what is over, and no engine sees that it was there",
    }
    renews = True
    no_ttl = 0

    @pytest.fixture(autouse=True)
    def _use_server(self, shared_server: LiveServer) -> None:
        self.server = shared_server

    def own_settings(self) -> dict[str, object]:
        return {"url": self.server.url}

    def get_backend(self) -> Values:
        return Values(self.server)

    def test_a_namespace_that_was_removed_is_named_no_more(self) -> None:
        super().test_a_namespace_that_was_removed_is_named_no_more()
        with self.server.client() as client:
            assert client.zrange(LIST_NAME, 0, -1) == [self.namespace_of().encode()]
