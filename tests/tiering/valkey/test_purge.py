"""A living engine purges what it has on a server, and nothing of others."""

import pytest
from tests.tiering.purged import check_purge
from tests.tiering.valkey.live import LiveServer

from kvtier.testing.tier_suite import make_config
from kvtier.testing.tiering_driver import ROW_BYTES
from kvtier.tiering.valkey import ValkeyTier

pytestmark = pytest.mark.servers


def test_a_purge_leaves_nothing_to_find_and_what_is_not_ours(shared_server: LiveServer) -> None:
    with shared_server.client() as client:
        client.set("somebody", "else's")
    check_purge(lambda view: ValkeyTier(make_config("model-a", ROW_BYTES), view, url=shared_server.url))
    with shared_server.client() as client:
        assert client.get("somebody") == b"else's"
