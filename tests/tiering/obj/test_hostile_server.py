"""A store that lies costs the call that it was asked for; a store of files keeps them private."""

import os
import stat
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain, cycle
from pathlib import Path
from threading import Thread

import pytest

from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.testing.tier_suite import TierDriver, key_of, make_config, make_rows
from kvtier.tiering.obj import ObjTier
from kvtier.tiering.obj.blobs import LoopFinder, ObjBlobs
from kvtier.tiering.obj.settings import ObjSettings

ENTRY = (
    "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    "<ETag>e</ETag><Size>1</Size></Contents>"
)
PAGE = (
    "<ListBucketResult><Name>b</Name><IsTruncated>true</IsTruncated>"
    "<NextContinuationToken>same</NextContinuationToken>{}</ListBucketResult>"
)
MARK = "sesame"

Serve = Callable[[int, bytes], str]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start servers that answer every request with a status and a body."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", MARK)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", MARK)
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Fixed(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
                """Say nothing."""

        servers.append(HTTPServer(("127.0.0.1", 0), Fixed))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def client_of(endpoint: str) -> ObjBlobs:
    """Return a client of the server at ``endpoint``."""
    own = {
        "url": "s3://bucket",
        "prefix": "root",
        "endpoint": endpoint,
        "allow_http": True,
        "region": "here",
        "timeout_s": 30.0,
    }
    return ObjBlobs(parse_settings(ObjSettings, own))


def said_by(call: Callable[[], object]) -> str:
    """Return the error of a call, or "" when it has none."""
    try:
        call()
    except TierError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("num_entries", [1, 3, 1500])
def test_a_listing_with_the_same_continuation_ends(serve: Serve, num_entries: int) -> None:
    entries = "".join(ENTRY.format(f"root/{number}") for number in range(num_entries))
    client = client_of(serve(200, PAGE.format(entries).encode()))
    with pytest.raises(TierError, match="it has no end"):
        list(client.list_all())


@pytest.mark.parametrize("body", [b"", b"not xml", b"<a>" * 100_000, b"\xff\xfe", b"<ListBucketResult/>"])
def test_a_listing_that_is_none_is_one_line_or_empty(serve: Serve, body: bytes) -> None:
    client = client_of(serve(200, body))
    said = said_by(lambda: list(client.list_all()))
    assert "\n" not in said
    assert len(said) < 300


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 409, 416])
def test_an_error_s_body_is_neither_repeated_nor_searched_as_a_whole(serve: Serve, status: int) -> None:
    body = b"<Error><Code>%b</Code>" % MARK.encode() + b"x" * 4_000_000 + b"<Code>Late</Code>"
    client = client_of(serve(status, body))
    for call in (lambda: client.read_each(["root/name"], 100), lambda: list(client.list_all())):
        said = said_by(call)
        assert "Late" not in said
        assert "xxx" not in said
        assert len(said) < 400


@pytest.mark.parametrize("num_before", [0, 1, 7, 100])
@pytest.mark.parametrize("length", [1, 2, 5, 64])
def test_a_loop_is_found_wherever_it_begins(num_before: int, length: int) -> None:
    finder = LoopFinder()
    names = chain(
        (f"a{number}" for number in range(num_before)), cycle([f"b{number}" for number in range(length)])
    )
    for position, name in enumerate(names):
        if finder.is_repeated(name):
            break
        assert position < 4 * (num_before + length) + 4
    assert position >= length


def test_names_that_come_once_make_no_loop() -> None:
    finder = LoopFinder()
    assert not any(finder.is_repeated(str(number)) for number in range(5000))


def test_files_and_folders_are_their_owner_s_only(tmp_path: Path) -> None:
    root = tmp_path / "missing" / "parent" / "root"
    rows = make_rows()
    tier = ObjTier(make_config(), rows, url=f"file://{root}")
    driver = TierDriver(tier, rows)
    try:
        assert driver.store([1, 2, 3]).success
        assert driver.load([1, 2, 3]).success
    finally:
        tier.shutdown(60.0)
    found = {path: path.stat() for path in (tmp_path / "missing", *(tmp_path / "missing").rglob("*"))}
    assert sum(stat.S_ISREG(one.st_mode) for one in found.values()) >= 2
    for path, one in found.items():
        assert stat.S_IMODE(one.st_mode) == (0o600 if stat.S_ISREG(one.st_mode) else 0o700), path


def test_a_pipe_in_place_of_a_file_hangs_nothing_and_goes(tmp_path: Path) -> None:
    rows = make_rows()
    tier = ObjTier(make_config(), rows, url=f"file://{tmp_path}", timeout_s=30.0)
    driver = TierDriver(tier, rows)
    try:
        assert driver.store([1, 2]).success
        (path,) = tmp_path.rglob(f"{key_of(1).hex()}.kv")
        path.unlink()
        os.mkfifo(path)
        assert driver.load_right([1, 2]) == {2}
        assert tier.stats()["damaged"] == 1
        assert driver.store([1]).success
        assert driver.load_right([1, 2]) == {1, 2}
    finally:
        assert tier.shutdown(10.0)
