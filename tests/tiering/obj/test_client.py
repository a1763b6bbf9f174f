"""A store that says nothing is left alone for a moment; one that refuses is asked each time."""

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.testing.clock import ManualClock
from kvtier.tiering.obj.blobs import PAUSE_S, ObjBlobs
from kvtier.tiering.obj.settings import ObjSettings


class Empty(BaseHTTPRequestHandler):
    """Has no object at all, or refuses."""

    status = 404

    def do_GET(self) -> None:
        """Answer without a body."""
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
        """Say nothing."""


class Refusing(Empty):
    """Lets nobody in."""

    status = 403


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which nobody listens yet, and which is not given to others."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def listening(port: int, handler: type[Empty]) -> HTTPServer:
    """Return a server that answers from now on."""
    server = HTTPServer(("127.0.0.1", port), handler, bind_and_activate=False)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.server_bind()
    server.server_activate()
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def client_of(port: int, clock: ManualClock) -> ObjBlobs:
    """Return a client of the server at ``port``."""
    settings = parse_settings(
        ObjSettings,
        {
            "url": f"http://127.0.0.1:{port}/blocks",
            "prefix": "",
            "timeout_s": 30.0,
            "num_threads": 1,
            "allow_http": True,
        },
    )
    return ObjBlobs(settings, clock)


def test_a_store_that_said_nothing_is_not_asked_before_the_pause_is_over(port: int) -> None:
    clock = ManualClock()
    client = client_of(port, clock)
    with pytest.raises(TierError, match="cannot be reached"):
        client.read_each(["block"], 4096)
    server = listening(port, Empty)
    try:
        with pytest.raises(TierError, match="cannot be reached"):
            client.read_each(["block"], 4096)
        clock.advance(PAUSE_S)
        assert not client.read_each(["block"], 4096)
    finally:
        server.shutdown()
        server.server_close()


def test_a_store_that_refuses_is_asked_each_time(port: int) -> None:
    clock = ManualClock()
    client = client_of(port, clock)
    server = listening(port, Refusing)
    try:
        with pytest.raises(TierError, match="refuses us"):
            client.read_each(["block"], 4096)
        server.RequestHandlerClass = Empty
        assert not client.read_each(["block"], 4096)
    finally:
        server.shutdown()
        server.server_close()
