"""What a client library or a server says becomes a sentence with a remedy, and none of their words."""

import errno
import socket
import ssl
import struct
from collections.abc import Iterator

import pytest
import redis.exceptions

from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.errors import HandshakeRefusedError, refused, unreachable
from kvtier.tiering.valkey.resp import ReplyReader, read_reply, send_all

ADDRESS = Address("host", 6379)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (HandshakeRefusedError("NOPERM"), "NOPERM"),
        (redis.exceptions.TimeoutError("sesame"), "within timeout_s"),
        (ssl.SSLError(1, "sesame"), "TLS fails"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "sesame"), "Connection refused"),
        (redis.exceptions.ConnectionError("sesame"), "is it running"),
    ],
)
def test_an_exception_becomes_a_sentence_of_our_own(error: Exception, remedy: str) -> None:
    text = str(unreachable(ADDRESS, error))
    assert "host:6379" in text
    assert remedy in text
    assert "sesame" not in text


def test_what_the_system_said_counts_before_what_the_client_made_of_it() -> None:
    outer = redis.exceptions.ConnectionError("wrapped")
    outer.__context__ = OSError(errno.EHOSTUNREACH, "no route")
    assert "No route to host" in str(unreachable(ADDRESS, outer))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection, the first with a time-out of the kernel's as a lent socket has."""
    near, far = socket.socketpair()
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        near.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, 1000))
    with near, far:
        yield near, far


def test_a_time_out_of_the_kernel_is_told_as_one(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    far.sendall(b"$9\r\nabc")

    with pytest.raises(TimeoutError) as reading:
        read_reply(ReplyReader(near))
    with pytest.raises(TimeoutError) as writing:
        send_all(near, [bytes(2**24)])

    for found in (reading, writing):
        assert "it has not answered within timeout_s" in str(unreachable(ADDRESS, found.value))


def test_an_unknown_code_is_not_repeated() -> None:
    assert "sesame" not in str(refused(ADDRESS, "ERR,sesame"))
    assert "ERR" in str(refused(ADDRESS, "ERR"))
