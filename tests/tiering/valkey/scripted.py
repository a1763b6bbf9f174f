"""A server that says what a test wants, on loopback: for what no real one would say."""

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

Script = Callable[[list[bytes]], Iterable[bytes]]
"""Returns the pieces of the reply to a command, given as its words; what raises ends the connection."""


class ScriptedServer:
    """Answers each command on each connection with what a script returns.

    Args:
        script: what to say.

    Attributes:
        port: where it listens.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End every connection and take no more."""
        for one in (self._listener, *self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as stream:
                while line := stream.readline():
                    words = []
                    for _ in range(int(line[1:])):
                        length = int(stream.readline()[1:])
                        words.append(stream.read(length + 2)[:-2])
                    for piece in self._script(words):
                        connection.sendall(piece)
        except (OSError, ValueError):
            return  # the tier has hung up


def array(*elements: bytes) -> bytes:
    """Return an array of encoded elements. Pure."""
    return b"*%d\r\n" % len(elements) + b"".join(elements)


def bulk(value: bytes | None) -> bytes:
    """Return a value, or that there is none. Pure."""
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def number(value: int) -> bytes:
    """Return a number. Pure."""
    return b":%d\r\n" % value


def slot_range(first: int, last: int, host: bytes | None, port: int, *further: bytes) -> bytes:
    """Return one range of a cluster's map. Pure."""
    return array(number(first), number(last), array(bulk(host), number(port), bulk(b"id"), *further))
