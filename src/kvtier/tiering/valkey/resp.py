"""The protocol of Valkey and Redis, as far as the tier speaks it: requests in pieces, replies read into rows.

A row is sent from and read into the primary tier without a copy. Each exchange has a deadline, because a time-out of a
socket begins anew with each byte: a server that sends one now and then would keep a thread for ever.
"""

import math
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from kvtier.tiering.kit.envelope import Buffer

READ_AHEAD_BYTES = 4096
"""Bytes read at most beyond what was asked for. Enough for some hundred short replies in one call; what of them
belongs to a row is copied once, which for so little does not matter."""

MAX_BUFFERS = 512
"""Buffers handed to the kernel in one call; Linux takes 1024."""

SKIP_BYTES = 65_536

MAX_REPLY_BYTES = 2**20
"""Bytes of a reply that has no block in it. Ours are some dozen; more would let a server that lies fill the memory."""

MAX_DEPTH = 8
"""Arrays within arrays. A cluster's map has four; without a limit a reply of some thousand bytes would exhaust the
interpreter's stack."""

MIN_ELEMENT_BYTES = 4
"""The shortest element of an array, ``:1`` and a line's end less one: an empty line is none."""

CRLF = b"\r\n"

MAX_DIGITS = 19
_NUMBER = re.compile(rb"[+-]?[0-9]{1,%d}" % MAX_DIGITS)
"""Numbers of the protocol have 64 bits."""


class OverdueError(TimeoutError):
    """Bytes still come or go, and the time is over."""


class Deadline(NamedTuple):
    """A moment after which nothing more is read or written.

    Attributes:
        clock: seconds, monotonic.
        end_s: the moment.
    """

    clock: Callable[[], float]
    end_s: float

    def require_time(self) -> None:
        """Do nothing before the moment.

        Raises:
            OverdueError: it has passed.
        """
        if self.clock() >= self.end_s:
            raise OverdueError("the exchange takes too long")


def never() -> Deadline:
    """Return a deadline that does not come. Pure."""
    return Deadline(lambda: 0.0, math.inf)


class ProtocolError(Exception):
    """What came is not what the protocol allows, or ended within a reply."""


class ClosedError(ProtocolError):
    """The connection ended within a reply."""


class Reply(NamedTuple):
    """One reply.

    Attributes:
        kind: its first byte: "+" a status, "-" an error, ":" a number, "$" a value.
        number: of a number the number, of a value its length, -1 when there is none.
        text: of a status or an error.
    """

    kind: str
    number: int = 0
    text: str = ""

    @property
    def error_code(self) -> str:
        """The first word of an error, "" when it is none."""
        return self.text.partition(" ")[0] if self.kind == "-" else ""


class ReplyReader:
    """Reads from one socket, a little ahead; used by one thread for one batch of replies.

    Args:
        sock: connected, with a time-out.
        deadline: of all the replies; a call that has begun before it may take one time-out more.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline | None = None) -> None:
        self._sock = sock
        self._deadline = deadline or never()
        # Encryption hands over record by record; a plain socket can fill a row in one call.
        self._row_flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
        self._buffer = bytearray(READ_AHEAD_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0

    def read_line(self) -> bytes:
        """Return the next line without its end."""
        while (stop := self._buffer.find(CRLF, self._begin, self._end)) < 0:
            self._fill()
        line = bytes(self._view[self._begin : stop])
        self._begin = stop + len(CRLF)
        return line

    def read_into(self, target: memoryview) -> None:
        """Fill ``target``, format 'B'; what is not read ahead goes there without a copy."""
        num_done = min(len(target), self._end - self._begin)
        target[:num_done] = self._view[self._begin : self._begin + num_done]
        self._begin += num_done
        while num_done < len(target):
            num_done += self._receive(target[num_done:], self._row_flags)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is read ahead."""
        return self._begin == self._end

    def skip(self, num_bytes: int) -> None:
        """Read ``num_bytes`` and forget them."""
        if not num_bytes:
            return
        scratch = memoryview(bytearray(min(num_bytes, SKIP_BYTES)))
        while num_bytes > 0:
            part = scratch[:num_bytes]
            self.read_into(part)
            num_bytes -= len(part)

    def _fill(self) -> None:
        num_left = self._end - self._begin
        if num_left == READ_AHEAD_BYTES:
            raise ProtocolError(f"a line is longer than {READ_AHEAD_BYTES} bytes")
        self._view[:num_left] = bytes(self._view[self._begin : self._end])
        self._begin, self._end = 0, num_left
        self._end += self._receive(self._view[num_left:])

    def _receive(self, target: memoryview, flags: int = 0) -> int:
        self._deadline.require_time()
        try:
            num_bytes = self._sock.recv_into(target, 0, flags)
        except BlockingIOError as error:  # how the kernel's own time-out shows itself
            raise TimeoutError("nothing came in time") from error
        if num_bytes == 0:
            raise ClosedError("the connection was closed within a reply")
        return num_bytes


def encode(*arguments: bytes) -> bytes:
    """Return the request for a command and its arguments. Pure."""
    return b"*%d\r\n%b" % (
        len(arguments),
        b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]),
    )


def encode_set(name: bytes, parts: Iterable[Buffer], num_bytes: int, *options: bytes) -> Iterator[Buffer]:
    """Yield the request that stores ``parts`` as one value, each of them as it is. Pure.

    Args:
        name: under which.
        parts: of the value, iterated as they are sent.
        num_bytes: their length.
        options: of SET.
    """
    yield b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(name), name, num_bytes)
    yield from parts
    yield _encode_tail(options)


@lru_cache(maxsize=16)
def _encode_tail(options: tuple[bytes, ...]) -> bytes:
    """Return what follows the value of a SET: the same for every block of a call. Pure."""
    return CRLF + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)


def send_all(sock: socket.socket, buffers: Sequence[Buffer], deadline: Deadline | None = None) -> None:
    """Hand ``buffers`` to the kernel one after another, without joining them.

    Args:
        sock: connected, with a time-out.
        buffers: what to send.
        deadline: of all of them; a call that has begun before it may take one time-out more.

    Raises:
        OSError: the connection is lost, took nothing for as long as its time-out says, or took it too slowly.
    """
    deadline = deadline or never()
    # Encryption reads each buffer anyway, and offers no call for several.
    send = _send_first if isinstance(sock, ssl.SSLSocket) else _send_several
    views = [memoryview(buffer) for buffer in buffers]
    begin = 0
    while begin < len(views):
        deadline.require_time()
        try:
            num_sent = send(sock, views[begin : begin + MAX_BUFFERS])
        except BlockingIOError as error:
            raise TimeoutError("nothing was taken in time") from error
        while begin < len(views) and num_sent >= len(views[begin]):
            num_sent -= len(views[begin])
            begin += 1
        if num_sent:
            views[begin] = views[begin][num_sent:]


def read_reply(reader: ReplyReader) -> Reply:
    """Read one reply; the bytes of a value are skipped.

    Raises:
        ProtocolError: it is none, or ends too soon.
    """
    reply = _read_head(reader)
    if reply.kind == "$" and reply.number >= 0:
        if reply.number > MAX_REPLY_BYTES:
            raise ProtocolError(f"a reply without a block is longer than {MAX_REPLY_BYTES} bytes")
        reader.skip(reply.number)
        _read_value_end(reader)
    return reply


Tree: TypeAlias = "int | bytes | Reply | list[Tree] | None"
"""A whole reply: a number, a value, a status or an error, an array of them, or none."""


def read_tree(reader: ReplyReader, max_bytes: int = MAX_REPLY_BYTES) -> Tree:
    """Read one reply of any shape into memory.

    Args:
        reader: where from.
        max_bytes: bytes of the reply on the wire, at most; it takes some ten times as many in memory.

    Raises:
        ProtocolError: it is none, ends too soon, or is longer or deeper than it may be.
    """
    return _TreeReader(reader, max_bytes).read(0)


class _TreeReader:
    """Reads the parts of one reply, and counts their bytes before it takes them."""

    def __init__(self, reader: ReplyReader, max_bytes: int) -> None:
        self._reader = reader
        self._num_left = self._max_bytes = max_bytes

    def read(self, depth: int) -> Tree:
        line = self._reader.read_line()
        self._take(len(line) + len(CRLF))
        if line[:1] != b"*":
            reply = _parse_head(line)
            if reply.kind == "$":
                return self._read_value(reply.number)
            return reply.number if reply.kind == ":" else reply
        length = _parse_number(line[1:])
        if length < 0:
            return None
        if depth == MAX_DEPTH:
            raise ProtocolError(f"arrays are more than {MAX_DEPTH} deep")
        if length * MIN_ELEMENT_BYTES > self._num_left:
            raise self._too_long()
        return [self.read(depth + 1) for _ in range(length)]

    def _read_value(self, num_bytes: int) -> bytes | None:
        if num_bytes < 0:
            return None
        self._take(num_bytes + len(CRLF))
        value = _read_bytes(self._reader, num_bytes)
        _read_value_end(self._reader)
        return value

    def _take(self, num_bytes: int) -> None:
        self._num_left -= num_bytes
        if self._num_left < 0:
            raise self._too_long()

    def _too_long(self) -> ProtocolError:
        return ProtocolError(f"a reply is longer than {self._max_bytes} bytes")


def read_beginning(reader: ReplyReader, max_bytes: int) -> Reply | bytes | None:
    """Read one reply whose value may be of any length; return what it begins with, and skip the rest.

    Args:
        reader: where from.
        max_bytes: of the value, at most.

    Returns:
        The bytes, None where there is no value, or a reply that has none.

    Raises:
        ProtocolError: it is none, or ends too soon.
    """
    reply = _read_head(reader)
    if reply.kind != "$":
        return reply
    if reply.number < 0:
        return None
    value = _read_bytes(reader, min(reply.number, max_bytes))
    reader.skip(reply.number - len(value))
    _read_value_end(reader)
    return value


def read_strings(reader: ReplyReader, max_strings: int, max_bytes: int) -> "Reply | list[Tree]":
    """Read one reply that is an array of values; those that are longer than ``max_bytes`` are skipped.

    Args:
        reader: where from.
        max_strings: values of the array, at most.
        max_bytes: of one of them, at most.

    Returns:
        The values, or a reply that is no array.

    Raises:
        ProtocolError: it is none, ends too soon, or has more values.
    """
    line = reader.read_line()
    if line[:1] != b"*":
        return _parse_head(line)
    length = _parse_number(line[1:])
    if length > max_strings:
        raise ProtocolError(f"an array has more than {max_strings} values")
    found: list[Tree] = []
    for _ in range(length):
        reply = _read_head(reader)
        if reply.kind != "$" or reply.number < 0:
            continue
        value = bytearray(reply.number if reply.number <= max_bytes else 0)
        reader.read_into(memoryview(value))
        reader.skip(reply.number - len(value))
        _read_value_end(reader)
        if len(value) == reply.number:
            found.append(bytes(value))
    return found


def read_value(reader: ReplyReader, header: memoryview, row: memoryview) -> Reply:
    """Read a reply whose value is a header and a row, into both; of any other value fill the header at most.

    Args:
        reader: where from.
        header: filled when the value is at least as long.
        row: filled when the value has exactly both lengths, otherwise left alone; format 'B'.

    Raises:
        ProtocolError: it is none, or ends too soon; ``row`` may then have part of it.
    """
    reply = _read_head(reader)
    if reply.kind != "$" or reply.number < 0:
        return reply
    num_left = reply.number
    if num_left >= len(header):
        reader.read_into(header)
        num_left -= len(header)
        if num_left == len(row):
            reader.read_into(row)
            num_left = 0
    reader.skip(num_left)
    _read_value_end(reader)
    return reply


def _read_bytes(reader: ReplyReader, num_bytes: int) -> bytes:
    # In pieces: what is announced and does not come takes no memory.
    pieces = []
    while num_bytes > 0:
        piece = bytearray(min(num_bytes, SKIP_BYTES))
        reader.read_into(memoryview(piece))
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _send_several(sock: socket.socket, views: Sequence[memoryview]) -> int:
    return sock.sendmsg(views)


def _send_first(sock: socket.socket, views: Sequence[memoryview]) -> int:
    return sock.send(views[0])


def _read_head(reader: ReplyReader) -> Reply:
    return _parse_head(reader.read_line())


def _parse_head(line: bytes) -> Reply:
    kind, rest = chr(line[0]) if line else "", line[1:]
    if kind in {"+", "-"}:
        return Reply(kind, text=rest.decode("ascii", "replace"))
    if kind in {":", "$"}:
        number = _parse_number(rest)
        if kind == "$" and number < -1:
            raise ProtocolError("a value has a negative length")
        return Reply(kind, number)
    raise ProtocolError(f"no reply begins with {kind!r}")


def _parse_number(text: bytes) -> int:
    if not (text.isdigit() and len(text) <= MAX_DIGITS) and _NUMBER.fullmatch(text) is None:
        raise ProtocolError("a number was expected")
    return int(text)


def _read_value_end(reader: ReplyReader) -> None:
    if reader.read_line():
        raise ProtocolError("a value is longer than it said")
