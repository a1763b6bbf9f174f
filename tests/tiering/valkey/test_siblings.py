"""What a server says of other namespaces: which of them hold a block, in what they differ, and never more than that."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from tests.tiering.valkey.conftest import StartTier
from tests.tiering.valkey.live import LiveServer
from tests.tiering.valkey.scripted import ScriptedServer, array, bulk, number

from kvtier.misses import MissCause
from kvtier.namespace import make_namespace
from kvtier.settings import parse_settings
from kvtier.testing.tier_suite import ROW_BYTES, TierDriver, key_of, make_config
from kvtier.tiering.valkey.blobs import (
    LIST_NAME,
    MAX_LISTED,
    MAX_READ,
    ValkeyBlobs,
)
from kvtier.tiering.valkey.errors import NEEDED_PERMISSIONS
from kvtier.tiering.valkey.settings import ValkeySettings

OTHER = "ab" * 16
LISTING_PERMISSIONS = "+zadd +zremrangebyrank +zrevrange +getrange +scan"
"""What a user needs besides, for the descriptions of namespaces."""

PASSWORD = "sesame"  # noqa: S105  # of a server that lives for a second


def name_of(model: str) -> str:
    return make_namespace(make_config(model), ROW_BYTES).name


def sibling_of(driver: TierDriver, block: int = 1) -> dict[str, str | float] | None:
    """Return what an operator is told of a block that is missing; None when no sibling has it."""
    assert not driver.lookup(block)
    miss = driver.tier.explain(key_of(block), driver.request)
    return None if miss is None or miss.cause is not MissCause.OTHER_NAMESPACE else dict(miss.detail)


def test_what_lists_namespaces_is_bounded_and_expires_with_the_newest_block(
    shared_server: LiveServer, start_tier: StartTier
) -> None:
    settings = parse_settings(ValkeySettings, {"url": shared_server.url}, "a test")
    with closing(ValkeyBlobs(settings, wall_clock=lambda: 7.0)) as blobs:
        for count in range(3 * MAX_LISTED):
            blobs.put_document(f"{count:032x}", "{}")
    start_tier(shared_server.url, ttl_s=1000).store([1])
    with shared_server.client() as client:
        assert client.zcard(LIST_NAME) <= MAX_LISTED
        assert client.zrevrange(LIST_NAME, 0, 0) == [name_of("model-a").encode()]
        assert 900 < client.ttl(LIST_NAME) <= 1000


@pytest.mark.parametrize(
    ("more", "is_said"), [("", False), (LISTING_PERMISSIONS, True), ("+zadd +zrevrange", False)]
)
def test_a_server_that_denies_it_costs_the_cause_and_nothing_else(
    shared_server: LiveServer,
    start_tier: StartTier,
    more: str,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with shared_server.client() as client:
        permissions = f"{NEEDED_PERMISSIONS} {more}".split()
        client.execute_command("ACL", "SETUSER", "engine", "reset", "on", f">{PASSWORD}", *permissions)
    url = shared_server.url.replace("redis://", f"redis://engine:{PASSWORD}@")
    for model in ("model-b", "model-a"):
        driver = start_tier(url, model)
        assert (sibling_of(driver) is not None) == (is_said and model == "model-a")
        assert driver.store([1]).success
        assert driver.lookup(1)
        assert driver.load([1]).success
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_hostile_names_on_the_list_cost_nothing(shared_server: LiveServer, start_tier: StartTier) -> None:
    start_tier(shared_server.url, "model-b").store([1])
    with shared_server.client() as client:
        client.zadd(LIST_NAME, {b"x" * 2**24: 10**10, b"\xff\n": 10**10})
    driver = start_tier(shared_server.url)
    found = sibling_of(driver)
    assert found is not None
    assert found["namespace"] == name_of("model-b")[:8]
    assert driver.store([1]).success


def test_a_list_of_another_kind_costs_nothing(shared_server: LiveServer, start_tier: StartTier) -> None:
    with shared_server.client() as client:
        client.set(LIST_NAME, "else")
    start_tier(shared_server.url, "model-b").store([1])
    driver = start_tier(shared_server.url)
    assert sibling_of(driver) is None
    assert driver.store([1]).success


Serve = Callable[[dict[bytes, bytes]], ScriptedServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that hold nothing and answer some verbs as told."""
    servers: list[ScriptedServer] = []

    def start(replies: dict[bytes, bytes]) -> ScriptedServer:
        asked: dict[bytes, bytes] = {b"STRLEN": number(0), b"CLIENT": b"+OK\r\n"} | replies

        def answer(words: Sequence[bytes]) -> list[bytes]:
            return [asked.get(words[0], b"-NOPERM no\r\n")]

        servers.append(ScriptedServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


WORDS: dict[str, Any] = {"layout_version": 1, "model": {"name": "model-b"}}


@pytest.mark.parametrize(
    "replies",
    [
        {},
        {b"ZREVRANGE": array()},
        {b"ZREVRANGE": b"*-1\r\n"},
        {b"ZREVRANGE": bulk(b"x")},
        {b"ZREVRANGE": array(bulk(None), number(3), bulk(b"A" * 32), bulk(b"a" * 33))},
        {b"ZREVRANGE": array(bulk(OTHER.encode()))},
        {b"ZREVRANGE": array(bulk(OTHER.encode())), b"GETRANGE": number(1)},
        {b"ZREVRANGE": array(bulk(OTHER.encode())), b"GETRANGE": array(bulk(b"{}"))},
        {b"ZREVRANGE": array(bulk(OTHER.encode())), b"GETRANGE": bulk(json.dumps(WORDS).encode())},
        {
            b"ZREVRANGE": array(bulk(OTHER.encode())),
            b"GETRANGE": bulk(json.dumps(WORDS).encode()),
            b"SCAN": array(number(7), number(7)),
        },
    ],
)
def test_without_a_real_server_what_it_answers_costs_a_miss(
    serve: Serve, start_tier: StartTier, replies: dict[bytes, bytes]
) -> None:
    driver = start_tier(serve(replies).url)
    for block in range(3):
        assert sibling_of(driver, block) is None
    assert driver.tier.stats().get("store_errors", 0) == 0


def test_more_names_than_were_asked_for_are_no_reply(serve: Serve, start_tier: StartTier) -> None:
    names = [bulk(b"%032x" % count) for count in range(MAX_READ + 1)]
    driver = start_tier(serve({b"ZREVRANGE": array(*names)}).url)
    assert sibling_of(driver) is None
