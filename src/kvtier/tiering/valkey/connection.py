"""Commands to a server, and the connections that they go over.

A command has the bytes of its request and the way its reply is read. Connections are redis-py's, which lend their
sockets, so that rows are read and written without a copy.
"""

import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.kit.envelope import Buffer
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.resp import ProtocolError, Reply, ReplyReader, encode, read_reply
from kvtier.tiering.valkey.settings import ValkeySettings

try:
    from redis.backoff import NoBackoff
    from redis.connection import Connection, ConnectionPool, SSLConnection
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtraError("redis", "valkey") from error

CONNECT_TIMEOUT_S = 1.0
"""Seconds to connect in, unless ``timeout_s`` is less. Within a data centre it takes a millisecond; three seconds
are what a kernel waits before it tries a second time."""

SPARE_CONNECTIONS = 4
"""Connections beyond one for each thread that moves blocks: for lookups, and for the check at the start."""


ReplyOrError: TypeAlias = Reply | TierError
"""A reply, or why there is none. A reply may be an error too: then the server is there and refuses."""


class Command(NamedTuple):
    """One command about one name.

    Attributes:
        name: which decides the node of a cluster.
        request: its bytes, in pieces. They are read each time that it is sent, which after a redirection is
            once more: no iterator, therefore.
        read: reads the reply, and puts a value where it belongs.
    """

    name: bytes
    request: Iterable[Buffer]
    read: Callable[[ReplyReader], Reply] = read_reply


def make_command(verb: bytes, name: bytes, *arguments: bytes) -> Command:
    """Return the command with that verb, without a value. Pure."""
    return Command(name, (encode(verb, name, *arguments),))


def error_code(reply: ReplyOrError) -> str:
    """Return the code of the refusal that ``reply`` is, "" when it is something else. Pure."""
    return reply.error_code if isinstance(reply, Reply) else ""


class ServerConnections:
    """Connections to one address, made when they are needed; any thread may take one.

    Args:
        settings: how to connect.
        address: where to.
    """

    def __init__(self, settings: ValkeySettings, address: Address) -> None:
        is_tls = settings.url.is_tls
        self._pool = ConnectionPool(
            connection_class=TLSConnection if is_tls else PlainConnection,
            max_connections=settings.num_threads + SPARE_CONNECTIONS,
            host=address.host,
            port=address.port,
            **connection_arguments(settings),
            **(tls_arguments(settings) if is_tls else {}),
        )

    def take(self) -> "PlainConnection | TLSConnection":
        """Return a connection that is open and has nothing to read; blocks while it is made.

        Raises:
            RedisError: it cannot be made.
        """
        connection = self._pool.get_connection()
        assert isinstance(connection, PlainConnection | TLSConnection), "the pool makes no other"
        return connection

    def give_back(self, connection: "PlainConnection | TLSConnection", *, is_clean: bool) -> None:
        """Keep ``connection`` for the next one, or close it when replies may still come on it."""
        if is_clean:
            connection.take_back_socket()
        else:
            connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py 8.1 has no annotations there
        self._pool.release(connection)

    def close(self) -> None:
        """Close every connection."""
        self._pool.disconnect()


class PlainConnection(Connection):
    """A connection of redis-py that lends its socket, whose time-outs are the kernel's as long as it is lent.

    With a time-out of Python's a socket never blocks: each of the dozen pieces in which a row of 1 MiB comes costs two
    calls and the interpreter's lock twice. The kernel puts a row together in one.
    """

    def lend_socket(self) -> socket.socket:
        """Return the connected socket; who does not read each reply must disconnect."""
        sock = _lent(self._sock)
        assert self.socket_timeout is not None, "every connection is made with a time-out"
        timeout = _timeval(self.socket_timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        sock.settimeout(None)
        return sock

    def take_back_socket(self) -> None:
        """Give redis-py back what it set."""
        _lent(self._sock).settimeout(self.socket_timeout)


class TLSConnection(SSLConnection):
    """The same with TLS."""

    def lend_socket(self) -> socket.socket:
        """Return the connected socket; who does not read each reply must disconnect."""
        return _lent(self._sock)

    def take_back_socket(self) -> None:
        """Do nothing: encryption works with redis-py's time-outs."""


def connection_arguments(settings: ValkeySettings) -> dict[str, Any]:  # Any: redis-py's keyword arguments
    """Return what redis-py must know for each connection but the address; has the password in it. Pure."""
    return {
        "db": settings.url.database,
        "username": settings.url.username or None,
        "password": settings.url.password or None,
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": min(CONNECT_TIMEOUT_S, settings.timeout_s),
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        # The third version may send unrequested data in front of a reply.
        "protocol": 2,
        # redis-py names itself on each new connection, and we let it: those replies also take the tickets off the
        # socket that a server sends after a TLS 1.3 handshake. Unread they make redis-py 8.1 believe in stray data
        # and give the connection up. A user who may not name himself is let in all the same.
    }


def tls_arguments(settings: ValkeySettings) -> dict[str, Any]:  # Any: redis-py's keyword arguments
    """Return what redis-py must know of TLS; the server's certificate and name are checked. Pure."""
    return {"ssl_ca_certs": settings.ca_file, "ssl_cert_reqs": "required", "ssl_check_hostname": True}


def _timeval(seconds: float) -> bytes:
    whole, rest = divmod(round(seconds * 1e6), 1_000_000)
    return struct.pack("@ll", whole, rest)


def _lent(sock: socket.socket | None) -> socket.socket:
    if sock is None:
        raise ProtocolError("the connection was closed")
    return sock
