"""Requests and replies survive any fragmentation, and what is no reply is an error and never a value."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvtier.tiering.valkey.resp import (
    READ_AHEAD_BYTES,
    ProtocolError,
    Reply,
    ReplyReader,
    encode,
    encode_set,
    read_reply,
    read_value,
    send_all,
)

HEADER = b"h" * 128
ROW = bytes(range(256)) * 64
VALUE = b"$%d\r\n%b%b\r\n" % (len(HEADER) + len(ROW), HEADER, ROW)


class Wire:
    """Two ends of a connection; what is said on one side is read on the other."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.settimeout(60.0)
        self.header = memoryview(bytearray(len(HEADER)))
        self.row = memoryview(bytearray(len(ROW)))

    def say(self, *pieces: bytes) -> None:
        """Send pieces from the far end, then close it."""

        def send() -> None:
            for piece in pieces:
                self.far.sendall(piece)
            self.far.close()

        threading.Thread(target=send).start()

    def close(self) -> None:
        """Close both ends."""
        self.near.close()
        self.far.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A connection."""
    wire = Wire()
    yield wire
    wire.close()


def test_a_request_is_the_protocol_s() -> None:
    assert encode(b"GET", b"name") == b"*2\r\n$3\r\nGET\r\n$4\r\nname\r\n"


def test_a_row_is_sent_from_where_it_lies() -> None:
    row = memoryview(bytearray(ROW))
    pieces = list(encode_set(b"n", [HEADER, row], len(HEADER) + len(ROW)))
    assert any(piece is row for piece in pieces)
    begin = b"*3\r\n$3\r\nSET\r\n$1\r\nn\r\n$%d\r\n" % (len(HEADER) + len(ROW))
    assert b"".join(pieces) == begin + HEADER + ROW + b"\r\n"


def test_an_expiry_is_sent_behind_the_row() -> None:
    request = b"".join(encode_set(b"n", [b"h", memoryview(b"r")], 2, b"NX", b"PX", b"1500"))
    assert request == b"*6\r\n$3\r\nSET\r\n$1\r\nn\r\n$2\r\nhr\r\n$2\r\nNX\r\n$2\r\nPX\r\n$4\r\n1500\r\n"


def test_more_buffers_than_the_kernel_takes_at_once_arrive_in_order(wire: Wire) -> None:
    pieces = [b"%06d" % number * 50 for number in range(5000)]
    received = bytearray()

    def receive() -> None:
        while piece := wire.far.recv(65_536):
            received.extend(piece)

    reader = threading.Thread(target=receive)
    reader.start()
    send_all(wire.near, pieces)
    wire.near.shutdown(socket.SHUT_WR)
    reader.join()
    assert received == b"".join(pieces)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (b"+OK\r\n", Reply("+", text="OK")),
        (b"-OOM command not allowed\r\n", Reply("-", text="OOM command not allowed")),
        (b":42\r\n", Reply(":", 42)),
        (b"$-1\r\n", Reply("$", -1)),
        (b"$5\r\nhello\r\n", Reply("$", 5)),
    ],
)
def test_each_kind_of_reply_is_read_byte_by_byte(wire: Wire, text: bytes, reply: Reply) -> None:
    wire.say(*(bytes([byte]) for byte in text + b"+NEXT\r\n"))
    reader = ReplyReader(wire.near)
    assert read_reply(reader) == reply
    assert read_reply(reader) == Reply("+", text="NEXT")


@pytest.mark.parametrize("size", [1, 7, 137, READ_AHEAD_BYTES, len(VALUE)])
def test_values_and_misses_in_a_row_land_where_they_belong(wire: Wire, size: int) -> None:
    text = b"$-1\r\n" + VALUE + b"$-1\r\n" + b":1\r\n"
    wire.say(*(text[begin : begin + size] for begin in range(0, len(text), size)))
    reader = ReplyReader(wire.near)
    replies = [read_value(reader, wire.header, wire.row) for _ in range(3)]
    assert [reply.number for reply in replies] == [-1, len(HEADER) + len(ROW), -1]
    assert (bytes(wire.header), bytes(wire.row)) == (HEADER, ROW)
    assert read_reply(reader) == Reply(":", 1)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 500, len(HEADER) + len(ROW) + 1, 200_000])
def test_a_value_of_another_length_leaves_the_row_alone(wire: Wire, length: int) -> None:
    wire.say(b"$%d\r\n%b\r\n+NEXT\r\n" % (length, b"x" * length))
    reader = ReplyReader(wire.near)
    assert read_value(reader, wire.header, wire.row) == Reply("$", length)
    assert not any(wire.row)
    assert bool(wire.header[0]) == (length >= len(HEADER))
    assert read_reply(reader) == Reply("+", text="NEXT")


@pytest.mark.parametrize("num_bytes", [0, 1, 5, 100, 200, 5000, len(VALUE) - 2, len(VALUE) - 1])
def test_a_value_that_is_cut_off_is_none(wire: Wire, num_bytes: int) -> None:
    wire.say(VALUE[:num_bytes])
    with pytest.raises(ProtocolError):
        read_value(ReplyReader(wire.near), wire.header, wire.row)


@pytest.mark.parametrize("text", [b"\r\n", b"?x\r\n", b":x\r\n", b"$-2\r\n", b"$1\r\nxy\r\n", b"x" * 9000])
def test_what_is_no_reply_is_refused(wire: Wire, text: bytes) -> None:
    wire.say(text)
    with pytest.raises(ProtocolError):
        read_reply(ReplyReader(wire.near))


def test_a_server_that_says_nothing_is_a_time_out(wire: Wire) -> None:
    wire.near.settimeout(0.01)
    with pytest.raises(TimeoutError):
        read_reply(ReplyReader(wire.near))
