"""Commands to a server, and the connections that they go over.

A command has the bytes of its request and the way its reply is read. Connections are redis-py's, which lend their
sockets, so that rows are read and written without a copy.
"""

import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.kit.envelope import Buffer
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.errors import HandshakeRefusedError
from kvtier.tiering.valkey.resp import (
    Deadline,
    ProtocolError,
    Reply,
    ReplyReader,
    Tree,
    encode,
    read_reply,
    read_tree,
    send_all,
)
from kvtier.tiering.valkey.settings import ValkeySettings

try:
    from redis.backoff import NoBackoff
    from redis.connection import Connection, ConnectionPool, SSLConnection
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import RedisError
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtraError("redis", "valkey") from error

CONNECT_TIMEOUT_S = 1.0
"""Seconds to connect in, unless ``timeout_s`` is less. Within a data centre it takes a millisecond; three seconds
are what a kernel waits before it tries a second time."""

SPARE_CONNECTIONS = 6
"""Connections beyond one for each thread that moves blocks: for lookups, the check at the start, quotas, a purge."""


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


class Answer:
    """A reply that is kept.

    Args:
        read: reads it; a refusal comes as a ``Reply``.

    Attributes:
        tree: the reply, once it was read.
    """

    def __init__(self, read: Callable[[ReplyReader], Tree] = read_tree) -> None:
        self.tree: Tree = None
        self._read = read

    def read(self, reader: ReplyReader) -> Reply:
        """Read the reply; a refusal is returned, so that a cluster can follow it."""
        self.tree = self._read(reader)
        return self.tree if isinstance(self.tree, Reply) else Reply("+")


class ServerConnections:
    """Connections to one address, made when they are needed; any thread may take one.

    Args:
        settings: how to connect.
        address: where to.
        clock: seconds, monotonic.
    """

    def __init__(
        self, settings: ValkeySettings, address: Address, clock: Callable[[], float] = time.monotonic
    ) -> None:
        is_tls = settings.url.is_tls
        self._pool = ConnectionPool(
            connection_class=TLSConnection if is_tls else PlainConnection,
            max_connections=settings.num_threads + SPARE_CONNECTIONS,
            host=address.host,
            port=address.port,
            clock=clock,
            **connection_arguments(settings),
            **(tls_arguments(settings) if is_tls else {}),
        )

    def take(self) -> "PlainConnection | TLSConnection":
        """Return a connection that is open and has nothing to read; blocks while it is made.

        Raises:
            RedisError, OSError, ProtocolError, HandshakeRefusedError: it cannot be made.
        """
        try:
            connection = self._pool.get_connection()
        except (RedisError, OSError, ProtocolError, HandshakeRefusedError):
            raise
        except Exception as error:  # foreign: resolving a name and TLS raise more than they document
            raise RedisConnectionError(type(error).__name__) from error
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

    Args:
        clock: seconds, monotonic.
        arguments: redis-py's.
    """

    def __init__(self, *, clock: Callable[[], float], **arguments: Any) -> None:  # noqa: ANN401  # redis-py's
        super().__init__(**arguments)  # type: ignore[no-untyped-call]  # redis-py 8.1 has none there
        self._clock = clock

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, in place of redis-py's handshake, which reads whatever a server sends for as long as it sends."""
        del check_health
        greet(self, self._clock)

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

    def __init__(self, *, clock: Callable[[], float], **arguments: Any) -> None:  # noqa: ANN401  # redis-py's
        super().__init__(**arguments)
        self._clock = clock

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, likewise."""
        del check_health
        greet(self, self._clock)

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
    }


NAMING = encode(b"CLIENT", b"SETINFO", b"LIB-NAME", b"kvtier")
"""Sent on each new connection. Its reply also takes the tickets off the socket that a server sends after a TLS 1.3
handshake; unread they make redis-py 8.1 believe in stray data and give the connection up. Servers that do not know it,
or do not allow it, refuse it, which is no matter."""


def greet(connection: "PlainConnection | TLSConnection", clock: Callable[[], float]) -> None:
    """Log in on a new connection and choose its database; a connection that cannot is closed.

    The whole exchange may take ``timeout_s``, and each reply a line.

    Raises:
        HandshakeRefusedError: the server refuses.
        OSError, ProtocolError: it does not answer in time, or not as the protocol has it.
    """
    try:
        _log_in(connection, clock)
    except BaseException:
        # redis-py closes for its own errors only, and would use a connection that is not logged in.
        connection.disconnect()  # type: ignore[no-untyped-call]  # redis-py 8.1 has no annotations there
        raise


def _log_in(connection: "PlainConnection | TLSConnection", clock: Callable[[], float]) -> None:
    connection._parser.on_connect(connection)  # noqa: SLF001  # as redis-py's own handshake does
    sock, timeout_s = _lent(connection._sock), connection.socket_timeout  # noqa: SLF001
    assert timeout_s is not None, "every connection is made with a time-out"
    password, username = connection.password, connection.username
    login = [part.encode() for part in (username, password) if part]
    requests = [encode(b"AUTH", *login)] if password else []
    requests.append(NAMING)
    if connection.db:
        requests.append(encode(b"SELECT", b"%d" % connection.db))
    deadline = Deadline(clock, clock() + timeout_s)
    send_all(sock, requests, deadline)
    reader = ReplyReader(sock, deadline)
    for request in requests:
        reply = read_reply(reader)
        if reply.kind not in {"+", "-"}:
            raise ProtocolError("a status was expected")
        if reply.kind == "-" and request is not NAMING:
            is_login = request is requests[0] and bool(password)
            # Older servers say "ERR" to a wrong password, and those without one to any.
            raise HandshakeRefusedError(
                "WRONGPASS" if is_login and reply.error_code == "ERR" else reply.error_code
            )
    if not reader.is_drained:
        raise ProtocolError("more came than was asked for")


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
