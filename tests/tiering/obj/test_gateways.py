"""A server that speaks S3 in its own way costs the object that it is about: a gateway of the tests answers as told."""

import logging
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple

import pytest
from tests.tiering.obj.conftest import StartTier, set_credentials, tiers_of

from kvtier.errors import ConfigError, TierError
from kvtier.testing.tier_suite import NUM_ROWS, ROW_BYTES, TierDriver, key_of
from kvtier.tiering.kit.blobs import Blob, PutKind
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.obj.blobs import ObjBlobs
from kvtier.tiering.obj.settings import ObjSettings

BLOCK_BYTES = ENVELOPE_BYTES + ROW_BYTES
NOWHERE = "http://localhost:9"


class Answer(NamedTuple):
    """What the gateway says instead of doing what it is asked for."""

    status: int
    code: str = ""
    location: str = ""


class Seen(NamedTuple):
    """A request."""

    method: str
    name: str
    is_conditional: bool


Rule = Callable[[Seen], Answer | None]


class Gateway(ThreadingHTTPServer):
    """A server that keeps objects under their paths, unless its rule has another answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.seen: list[Seen] = []
        self.rule: Rule = lambda _: None
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def num_puts(self, number: int) -> int:
        """Return how often a block was sent."""
        return sum(one.method == "PUT" and is_of(one, number) for one in self.seen)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_GET(self) -> None:
        """Do what was asked for, or what the rule says."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name = self.path.partition("?")[0].removeprefix("/bucket/")
        seen = Seen(self.command, name, self.headers.get("If-None-Match") == "*")
        self.server.seen.append(seen)
        answer = self.server.rule(seen)
        if answer is not None:
            location = {"Location": answer.location} if answer.location else {}
            self.answer(answer.status, f"<Error><Code>{answer.code}</Code></Error>".encode(), location)
        elif self.command == "PUT":
            is_there = seen.is_conditional and name in self.server.objects
            if not is_there:
                self.server.objects[name] = body
            self.answer(412 if is_there else 200, b"")
        elif name in self.server.objects:
            self.answer(200, self.server.objects[name])
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_PUT = do_HEAD = do_DELETE = do_POST = do_GET  # noqa: N815  # the base class names them so

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send an answer."""
        self.send_response(status)
        dated = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"e"'}
        for name, value in {**dated, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
        """Say nothing."""


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    set_credentials(monkeypatch)
    gateway = Gateway()
    Thread(target=gateway.serve_forever, daemon=True).start()
    yield gateway
    gateway.shutdown()
    gateway.server_close()


@pytest.fixture
def start(gateway: Gateway) -> Iterator[StartTier]:
    """Build tiers on the gateway."""
    with tiers_of(options_of(gateway)) as start:
        yield start


def options_of(gateway: Gateway) -> dict[str, object]:
    place = {"url": "s3://bucket", "endpoint": gateway.endpoint, "region": "here", "allow_http": True}
    return place | {"num_threads": 2, "timeout_s": 60.0}


def is_of(seen: Seen, number: int) -> bool:
    return seen.name.endswith(f"/{key_of(number).hex()}.kv")


def is_put_of(*numbers: int) -> Callable[[Seen], bool]:
    """Return what tells the writes of these blocks."""
    return lambda seen: seen.method == "PUT" and any(is_of(seen, number) for number in numbers)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def arrived(driver: TierDriver, numbers: list[int]) -> set[int]:
    """Store blocks; return which are said to be held."""
    result = driver.store(numbers)
    return {
        number for number in numbers if result.success or key_of(number) in (result.successful_keys or ())
    }


def test_a_gateway_that_knows_no_condition_stores_all_the_same_and_is_asked_once(
    start: StartTier, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.rule = lambda seen: Answer(501, "NotImplemented") if seen.is_conditional else None
    driver = start()
    driver.tier.check_reachable()
    num_asked = sum(seen.is_conditional for seen in gateway.seen)
    assert driver.store([1, 2, 3]).success
    assert driver.lookup(2)
    assert driver.load_right([1, 2, 3]) == {1, 2, 3}
    assert sum(seen.is_conditional for seen in gateway.seen) == num_asked
    (line,) = lines_of(caplog)
    assert "does not know conditional writes" in line


def test_where_no_condition_is_known_what_is_there_is_not_written_over(
    start: StartTier, gateway: Gateway
) -> None:
    gateway.rule = lambda seen: Answer(501, "NotImplemented") if seen.is_conditional else None
    assert start().store([1]).success
    (name,) = [name for name in gateway.objects if name.endswith(".kv")]
    gateway.objects[name] = bytes(BLOCK_BYTES)
    other = start()
    assert other.store([1]).success
    assert gateway.objects[name] == bytes(BLOCK_BYTES)
    assert other.tier.stats()["existed"] == 1


@pytest.mark.parametrize(("value", "is_sent"), [("never", False), ("always", True)])
def test_the_setting_decides_whether_a_condition_is_sent(
    start: StartTier, gateway: Gateway, value: str, *, is_sent: bool
) -> None:
    assert start(conditional_put=value).store([1]).success
    assert any(seen.is_conditional for seen in gateway.seen) is is_sent


def test_always_fails_where_no_condition_is_known(start: StartTier, gateway: Gateway) -> None:
    gateway.rule = lambda seen: Answer(501, "NotImplemented") if seen.is_conditional else None
    assert arrived(start(conditional_put="always"), [1]) == set()


def test_an_unknown_value_of_the_setting_is_refused(start: StartTier) -> None:
    with pytest.raises(ConfigError, match="conditional_put"):
        start(conditional_put="perhaps")


@pytest.mark.parametrize("status", [500, 503])
def test_what_was_written_is_said_although_others_have_failed(
    start: StartTier, gateway: Gateway, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    fails = is_put_of(1, 2)
    gateway.rule = lambda seen: Answer(status, "SlowDown") if fails(seen) else None
    driver = start()
    result = driver.store([1, 2, 3])
    assert result.successful_keys == frozenset({key_of(3)})
    assert result.is_fault
    assert driver.lookup(3)
    assert driver.tier.stats()["store_errors"] == 2
    assert driver.tier.stats()["stored_blocks"] == 1
    (line,) = lines_of(caplog)
    assert f"of {BLOCK_BYTES} bytes was not stored: {status} SlowDown" in line


def test_one_call_of_the_backend_names_each_outcome(gateway: Gateway) -> None:
    blobs = ObjBlobs(ObjSettings(**options_of(gateway)))  # type: ignore[arg-type]  # a test's own
    gateway.rule = lambda seen: {
        "slow": Answer(503, "SlowDown"),
        "long": Answer(413, "EntityTooLarge"),
        "full": Answer(507, "InsufficientStorage"),
        "locked": Answer(409, "OperationAborted"),
        "held": Answer(412, "PreconditionFailed"),
    }.get(seen.name)
    names = ["slow", "long", "full", "locked", "held", "good"]
    puts = blobs.put_new([Blob(name, [b"a", b"b"], 2) for name in names], None)
    assert [put.kind for put in puts] == [
        PutKind.FAILED,
        PutKind.REFUSED,
        PutKind.NO_ROOM,
        PutKind.REFUSED,
        PutKind.EXISTED,
        PutKind.WRITTEN,
    ]
    assert puts[3].words == "409 OperationAborted"
    assert gateway.objects == {"good": b"ab"}


def test_lack_of_rights_for_all_is_an_error_and_for_one_its_outcome(gateway: Gateway) -> None:
    blobs = ObjBlobs(ObjSettings(**options_of(gateway)))  # type: ignore[arg-type]  # a test's own
    gateway.rule = lambda seen: Answer(403, "AccessDenied") if seen.name != "good" else None
    with pytest.raises(TierError, match="refuses us"):
        blobs.put_new([Blob(name, [b"a"], 1) for name in ("one", "two")], None)
    puts = blobs.put_new([Blob(name, [b"a"], 1) for name in ("one", "good")], None)
    assert [put.kind for put in puts] == [PutKind.FAILED, PutKind.WRITTEN]


def test_a_conflict_is_the_outcome_of_that_block_and_no_loss_of_data(
    start: StartTier, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.rule = lambda seen: (
        Answer(409, "ConditionalRequestConflict")
        if is_put_of(2)(seen) or seen.name.endswith("namespace.json")
        else None
    )
    driver = start()
    result = driver.store([1, 2, 3])
    assert result.successful_keys == frozenset({key_of(1), key_of(3)})
    assert not result.is_fault
    gateway.rule = lambda _: None
    assert not driver.lookup(2)
    (line,) = lines_of(caplog)
    assert "409 ConditionalRequestConflict" in line
    assert driver.store([2]).success


def test_one_value_that_is_refused_is_said_once_with_its_size(
    start: StartTier, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    fails = is_put_of(1)
    gateway.rule = lambda seen: Answer(413, "EntityTooLarge") if fails(seen) else None
    driver = start()
    for _ in range(3):
        assert arrived(driver, [1, 2]) == {2}
        assert driver.lookup(2)
    (line,) = lines_of(caplog)
    assert f"{key_of(1).hex()}.kv of {BLOCK_BYTES} bytes was not stored: 413 EntityTooLarge" in line
    assert driver.tier.stats()["store_errors"] == 3


def test_a_block_that_was_just_stored_is_not_uploaded_again(start: StartTier, gateway: Gateway) -> None:
    driver = start()
    numbers = list(range(NUM_ROWS // 2))
    assert driver.store(numbers).success
    assert driver.store(numbers).success
    assert {gateway.num_puts(number) for number in numbers} == {1}
    assert driver.tier.stats()["existed"] == len(numbers)


def test_a_block_that_is_gone_is_uploaded_again(start: StartTier, gateway: Gateway) -> None:
    driver = start()
    assert driver.store([1, 2]).success
    gateway.objects.clear()
    assert driver.load_right([1, 2]) == set()
    assert driver.store([1, 2]).success
    assert driver.load_right([1, 2]) == {1, 2}


def test_one_object_that_cannot_be_read_costs_itself(start: StartTier, gateway: Gateway) -> None:
    driver = start()
    assert driver.store([1, 2, 3]).success
    gateway.rule = lambda seen: Answer(503, "SlowDown") if is_of(seen, 2) and seen.method == "GET" else None
    assert driver.load_right([1, 2, 3]) == {1, 3}
    assert driver.tier.stats()["io_error"] == 1
    gateway.rule = lambda seen: Answer(503) if is_of(seen, 2) else None
    other = start()
    assert other.lookup(1)
    assert not other.lookup(2)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_host_is_refused(
    start: StartTier, gateway: Gateway, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start()
    assert driver.store([1]).success
    with tiers_of(options_of(gateway)) as start_other:
        elsewhere = Gateway()
        Thread(target=elsewhere.serve_forever, daemon=True).start()
        elsewhere.objects |= {f"bucket/{name}": body for name, body in gateway.objects.items()}
        there = f"http://localhost:{elsewhere.server_port}/bucket/x"
        gateway.rule = lambda _: Answer(status, "", there)
        other = start_other()
        assert not other.load([1]).success
        assert not other.lookup(1)
        assert arrived(other, [2]) == set()
        with pytest.raises(TierError, match="redirects us"):
            other.tier.check_reachable()
        assert not elsewhere.seen
        elsewhere.shutdown()
        elsewhere.server_close()
    assert "redirects us" in lines_of(caplog)[0]
