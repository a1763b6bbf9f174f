"""A server that lies, babbles or trickles costs the blocks that it was asked for, and bounded time and memory."""

import itertools
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

import pytest
from tests.tiering.valkey.conftest import StartTier
from tests.tiering.valkey.scripted import ScriptedServer, array, bulk, number, slot_range

from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.testing.clock import ManualClock
from kvtier.tiering.valkey import ValkeyTier
from kvtier.tiering.valkey.cluster import MAX_NODES, SlotMap, fetch_slot_map, parse_slot_map
from kvtier.tiering.valkey.connection import Command
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.resp import MAX_DEPTH, MAX_REPLY_BYTES, ProtocolError, Reply
from kvtier.tiering.valkey.servers import SingleServer
from kvtier.tiering.valkey.settings import ValkeySettings

OK = b"+OK\r\n"
ASKED = Address("asked", 7)
HERE = Address("127.0.0.1", 1234)
SERVED = {b"STRLEN": number(0), b"PEXPIRE": number(0), b"GET": bulk(None), b"UNLINK": number(0)}

Serve = Callable[[Callable[[list[bytes]], Iterable[bytes]]], ScriptedServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start scripted servers that end with the test."""
    servers: list[ScriptedServer] = []

    def start(script: Callable[[list[bytes]], Iterable[bytes]]) -> ScriptedServer:
        servers.append(ScriptedServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def answering(reply: Iterable[bytes], *commands: bytes) -> Callable[[list[bytes]], Iterable[bytes]]:
    """Return a script that has one reply for ``commands`` and serves the others."""
    return lambda words: reply if words[0] in commands else [SERVED.get(words[0], OK)]


def settings_of(server: ScriptedServer, user: str = "", **own: object) -> ValkeySettings:
    """Return settings that name it."""
    url = server.url.replace("//", f"//{user}@") if user else server.url
    return parse_settings(ValkeySettings, {"url": url, "timeout_s": 60.0, **own})


def check(settings: ValkeySettings, clock: Callable[[], float]) -> str:
    """Return why a tier with these settings cannot reach its server."""
    servers = SingleServer(settings, clock)
    try:
        with pytest.raises(TierError) as refusal:
            servers.check_reachable()
    finally:
        servers.close()
    return str(refusal.value)


def ticking() -> Callable[[], float]:
    """Return a clock that moves a tenth of a second whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) / 10


ENDLESS: dict[str, Callable[[], Iterable[bytes]]] = {
    "a status without an end": lambda: itertools.chain([b"+"], itertools.repeat(b"x" * 1000)),
    "a byte at a time": lambda: itertools.chain([b"+"], itertools.repeat(b"x")),
    "arrays in arrays": lambda: [b"*1\r\n" * 100_000],
    "gigabytes": lambda: itertools.chain([b"$9000000000\r\n"], itertools.repeat(bytes(1000))),
    "an array of 2^62": lambda: [b"*4611686018427387904\r\n"],
    "a number of 4,000 digits": lambda: [b":" + b"9" * 4000 + b"\r\n"],
    "nothing at all": lambda: [b"\r\n"],
    "a page of a web server": lambda: [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
    "two answers": lambda: [OK * 2 + OK],
}


@pytest.mark.parametrize("command", [b"AUTH", b"CLIENT", b"SELECT", b"STRLEN"])
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_reply_without_end_or_sense_costs_a_bounded_time_and_memory(
    serve: Serve, command: bytes, kind: str
) -> None:
    server = serve(lambda words: ENDLESS[kind]() if words[0] == command else [SERVED.get(words[0], OK)])
    settings = parse_settings(ValkeySettings, {"url": server.url.replace("//", "//:marker@") + "/3"})
    if kind == "two answers" and command != b"SELECT":
        return  # the second is taken for that of the next command
    tracemalloc.start()
    try:
        reason = check(settings, ticking())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "marker" not in reason
    assert peak_bytes < 8 * MAX_REPLY_BYTES


def test_a_login_that_trickles_ends_after_one_time_out(serve: Serve, clock: ManualClock) -> None:
    def trickle() -> Iterator[bytes]:
        yield b"+"
        for _ in range(100):
            clock.advance(1.0)
            yield b"x"

    server = serve(lambda words: trickle() if words[0] == b"AUTH" else [OK])
    assert "too slowly" in check(settings_of(server, user=":sesame", timeout_s=60.0), clock)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"-WRONGPASS marker\r\n", "WRONGPASS"),
        (b"-ERR invalid password marker\r\n", "WRONGPASS"),
        (b"-NOPERM marker\r\n", "NOPERM"),
        (b"-LOADING marker\r\n", "LOADING"),
        (b"-marker!\r\n", "no known code"),
        (b":1\r\n", "not the protocol"),
    ],
)
def test_a_login_that_is_refused_says_why_and_repeats_no_word_of_the_server(
    serve: Serve, clock: ManualClock, reply: bytes, reason: str
) -> None:
    server = serve(answering([reply], b"AUTH"))
    text = check(settings_of(server, user="eve:sesame"), clock)
    assert reason in text
    assert not {"marker", "sesame", "eve"} & set(text.replace("!", " ").split())


def test_a_connection_that_was_refused_is_not_used_without_a_login(serve: Serve, clock: ManualClock) -> None:
    seen: list[bytes] = []

    def script(words: list[bytes]) -> Iterable[bytes]:
        seen.append(words[0])
        return [b"*0\r\n"] if words[0] == b"AUTH" else [OK]

    server = serve(script)
    servers = SingleServer(settings_of(server, user=":sesame", num_threads=1), clock)
    for _ in range(3):
        with pytest.raises(TierError):
            servers.run([Command(b"name", (b"*1\r\n$4\r\nPING\r\n",))])
        clock.advance(60.0)
    servers.close()
    assert b"PING" not in seen


MARVELLOUS_MAPS = {
    "no list": b":1\r\n",
    "a status": OK,
    "none": b"*-1\r\n",
    "an entry that is no range": array(number(1)),
    "a range of one number": array(array(number(1))),
    "words for numbers": array(array(bulk(b"0"), bulk(b"1"), array(bulk(b"here"), number(1)))),
    "a negative slot": array(slot_range(-1, 5, b"here", 1)),
    "a slot beyond the last": array(slot_range(0, 16_384, b"here", 1)),
    "a range up to 2^62": array(slot_range(0, 2**62, b"here", 1)),
    "a range that ends before it begins": array(slot_range(5, 4, b"here", 1)),
    "two that overlap": array(slot_range(0, 5, b"here", 1), slot_range(5, 9, b"there", 1)),
    "port 0": array(slot_range(0, 5, b"here", 0)),
    "port 70000": array(slot_range(0, 5, b"here", 70_000)),
    "a host of 300 letters": array(slot_range(0, 5, b"h" * 300, 1)),
    "a host with a line's end": array(slot_range(0, 5, b"a\r\nb", 1)),
    "a host that is no text": array(slot_range(0, 5, b"\xff\x00", 1)),
    "a node without an address": array(array(number(0), number(1), array())),
    "deep arrays": b"*1\r\n" * (MAX_DEPTH + 1),
    "10^5 deep arrays": b"*1\r\n" * 100_000,
    "10^6 nodes": b"*1000000\r\n" + slot_range(0, 0, b"here", 1) * 1000,
    "too many nodes": array(*(slot_range(slot, slot, b"h%d" % slot, 1) for slot in range(MAX_NODES + 1))),
    "gigabytes": b"$5000000000\r\n",
    "a megabyte of ranges": array(*(slot_range(slot, slot, b"h" * 60, 1) for slot in range(16_384))),
    "no slots": array(),
    "a refusal": b"-ERR This instance has cluster support disabled\r\n",
    "a sentence": b"-sesame marker\r\n",
}


@pytest.mark.parametrize("kind", MARVELLOUS_MAPS)
def test_a_map_that_cannot_be_right_is_one_line_that_names_the_node(
    serve: Serve, clock: ManualClock, kind: str
) -> None:
    server = serve(answering([MARVELLOUS_MAPS[kind]], b"CLUSTER"))
    with pytest.raises(TierError) as refusal:
        fetch_slot_map(
            settings_of(server, cluster=True, timeout_s=0.5), [Address("127.0.0.1", server.port)], clock
        )
    text = str(refusal.value)
    assert str(server.port) in text
    assert "\n" not in text
    assert "marker" not in text
    assert len(text) < 300


@pytest.mark.parametrize("kind", MARVELLOUS_MAPS)
def test_such_a_cluster_opens_the_tier_s_breaker_and_ends_no_start(
    serve: Serve, start_tier: StartTier, clock: ManualClock, kind: str
) -> None:
    server = serve(answering([MARVELLOUS_MAPS[kind]], b"CLUSTER"))
    driver = start_tier(server.url, cluster=True, clock=clock, timeout_s=0.5)
    with pytest.raises(TierError):
        driver.tier.check_reachable()
    assert driver.tier.drain_unanswered() >= 5
    result = driver.load([1, 2])
    assert (result.success, result.is_fault) == (False, True)


def mapped(text: list[object]) -> SlotMap:
    """Return the map of a reply."""
    return parse_slot_map(text, ASKED)  # type: ignore[arg-type]  # a test's own lists


@pytest.mark.parametrize(
    ("node", "address"),
    [
        ([b"there", 5], Address("there", 5)),
        ([None, 5], Address("asked", 5)),
        ([b"", 5], Address("asked", 5)),
        ([b"?", 5], Address("asked", 5)),
        ([b"?", 5, b"id", [b"ip", b"10.0.0.1"]], Address("10.0.0.1", 5)),
        ([b"?", 5, b"id", [b"ip"]], Address("asked", 5)),
        ([b"?", 5, b"id", 7], Address("asked", 5)),
        ([b"::1", 5], Address("::1", 5)),
    ],
)
def test_a_node_without_a_name_is_where_the_one_is_that_was_asked(
    node: list[object], address: Address
) -> None:
    assert mapped([[0, 2, node], [9, 9, node]]) == dict.fromkeys((0, 1, 2, 9), address)


def test_the_map_of_a_thousand_nodes_with_long_names_fits(serve: Serve, clock: ManualClock) -> None:
    ranges = []
    for first in range(0, 16_384, 8):
        nodes = [
            array(
                bulk(b"valkey-node-%04d.valkey-headless.production.svc.cluster.local" % node),
                number(16_379),
                bulk(b"f" * 40),
                array(bulk(b"ip"), bulk(b"255.255.255.255")),
            )
            for node in (first // 8 % 500, 500 + first // 8 % 500)
        ]
        ranges.append(array(number(first), number(first + 7), *nodes))
    sent = array(*ranges)
    assert 600_000 < len(sent) < MAX_REPLY_BYTES
    server = serve(answering([sent], b"CLUSTER"))
    settings = settings_of(server, cluster=True)
    found = fetch_slot_map(settings, [Address("127.0.0.1", server.port)], clock)
    assert len(found) == 16_384
    assert len(set(found.values())) == 500


def test_slots_that_nothing_serves_are_left_out() -> None:
    assert set(mapped([[3, 4, [b"there", 5]]])) == {3, 4}


@pytest.mark.parametrize("slot", [16_384, 2**62, -1])
def test_a_slot_that_cannot_be_is_refused(slot: int) -> None:
    with pytest.raises(ProtocolError):
        mapped([[slot, slot, [b"there", 5]]])


def test_redirections_to_ever_new_nodes_end(serve: Serve, start_tier: StartTier, clock: ManualClock) -> None:
    places = itertools.count(1)
    whole: list[ScriptedServer] = []

    def script(words: list[bytes]) -> Iterable[bytes]:
        if words[0] == b"CLUSTER":
            return [array(slot_range(0, 16_383, None, whole[0].port))]
        return [b"-MOVED 1 127.0.0.%d:1\r\n" % (next(places) % 250 + 1)]

    whole.append(serve(script))
    driver = start_tier(whole[0].url, cluster=True, clock=clock, timeout_s=0.5)
    assert not driver.load(list(range(8))).success


@pytest.mark.parametrize(
    "reply", [b":1\r\n", array(bulk(b"0")), array(number(0), array()), array(bulk(b"0"), bulk(b"")), OK]
)
def test_a_listing_that_is_none_is_one_line(serve: Serve, reply: bytes) -> None:
    server = serve(answering([reply], b"SCAN"))
    place = ValkeyTier.open_place({"url": server.url})
    with pytest.raises(TierError, match="SCAN"):
        place.namespaces()
    place.close()


@pytest.mark.parametrize(
    "reply", [b":1\r\n", b"*0\r\n", bulk(b"maxmemory:9" + b"9" * 400), bulk(b"\xff"), OK]
)
def test_facts_that_are_none_are_taken_for_no_limit(serve: Serve, reply: bytes) -> None:
    server = serve(answering([reply], b"INFO"))
    place = ValkeyTier.open_place({"url": server.url})
    assert place.summary().capacity_bytes is None
    place.close()


def test_a_reply_is_what_it_was(serve: Serve, clock: ManualClock) -> None:
    server = serve(answering([number(7)], b"STRLEN"))
    servers = SingleServer(settings_of(server), clock)
    command = Command(b"name", (b"*2\r\n$6\r\nSTRLEN\r\n$4\r\nname\r\n",))
    assert servers.run([command]) == [Reply(":", 7)]
    servers.close()
