"""The contestants of the valkey tier: its own data path, redis-py, and bare sockets.

They write and read rows under their numbers, a batch at a time, without sealing.
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from redis import Redis
from redis._parsers import Encoder
from redis.connection import ConnectionPool, PythonRespSerializer

from kvtier.settings import parse_settings
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES, Buffer
from kvtier.tiering.valkey.connection import Command
from kvtier.tiering.valkey.resp import Reply, encode, encode_set, read_value
from kvtier.tiering.valkey.servers import ServerNode
from kvtier.tiering.valkey.settings import ValkeySettings

TIMEOUT_S = 10.0

HEADER = bytes(ENVELOPE_BYTES)

Part = Sequence[int]


class Client(ABC):
    """Writes and reads rows under their numbers.

    Args:
        rows: format 'B', one for each block.
    """

    def __init__(self, rows: Sequence[memoryview]) -> None:
        self.rows = rows

    @abstractmethod
    def put(self, part: Part) -> None:
        """Write the blocks of ``part`` as one batch."""

    @abstractmethod
    def get(self, part: Part) -> None:
        """Read the blocks of ``part`` as one batch, into their rows."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class PathClient(Client):
    """The tier's own data path: an empty header in front of each row, without checks.

    Args:
        rows: format 'B', one for each block.
        url: the server's.
        num_threads: connections.
        clock: seconds, monotonic.
    """

    def __init__(
        self, rows: Sequence[memoryview], url: str, num_threads: int, clock: Callable[[], float]
    ) -> None:
        super().__init__(rows)
        values = {"url": url, "timeout_s": TIMEOUT_S, "num_threads": num_threads}
        settings = parse_settings(ValkeySettings, values)
        self._node = ServerNode(settings, settings.url.address, clock)

    def put(self, part: Part) -> None:
        """Write the blocks of ``part`` as one batch."""
        commands = [Command(name_of(n), self._set_pieces(n)) for n in part]
        assert all(isinstance(reply, Reply) and reply.kind == "+" for reply in self._node.run(commands))

    def get(self, part: Part) -> None:
        """Read the blocks of ``part`` as one batch, into their rows."""
        replies = self._node.run([self._get_call(number) for number in part])
        assert all(isinstance(reply, Reply) and reply.number > 0 for reply in replies)

    def close(self) -> None:
        """Close the connections."""
        self._node.close()

    def _set_pieces(self, number: int) -> list[Buffer]:
        parts = (HEADER, self.rows[number])
        return list(encode_set(name_of(number), parts, sum(map(len, parts))))

    def _get_call(self, number: int) -> Command:
        header = memoryview(bytearray(ENVELOPE_BYTES))
        request = (encode(b"GET", name_of(number)),)
        return Command(name_of(number), request, lambda reader: read_value(reader, header, self.rows[number]))


class RedisPyClient(Client):
    """redis-py with hiredis, tuned for large values, with a header before each row like the tier's.

    It takes a value as one buffer, so the header and the row are joined before they are sent.

    Args:
        rows: format 'B', one for each block.
        url: the server's.
    """

    def __init__(self, rows: Sequence[memoryview], url: str) -> None:
        super().__init__(rows)
        # redis-py 8.1 has no annotations there.
        encoder = Encoder("utf-8", "strict", decode_responses=False)  # type: ignore[no-untyped-call]
        packer = PythonRespSerializer(6000, encoder.encode)
        pool = ConnectionPool.from_url(
            url, socket_read_size=1 << 20, command_packer=packer, socket_timeout=TIMEOUT_S, protocol=2
        )
        self._redis = Redis.from_pool(pool)

    def put(self, part: Part) -> None:
        """Write the blocks of ``part`` as one batch."""
        with self._redis.pipeline(transaction=False) as pipe:
            for number in part:
                pipe.set(name_of(number), b"".join((HEADER, self.rows[number])))
            assert all(pipe.execute())

    def get(self, part: Part) -> None:
        """Read the blocks of ``part`` as one batch, into their rows."""
        with self._redis.pipeline(transaction=False) as pipe:
            for number in part:
                pipe.get(name_of(number))
            for number, value in zip(part, pipe.execute(), strict=True):
                self.rows[number][:] = memoryview(value)[len(HEADER) :]

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


class RawClient(Client):
    """Bare sockets: each thread has one, and knows the lengths of the replies.

    Args:
        rows: format 'B', one for each block.
        address: the server's host and port.
        num_threads: connections.
    """

    def __init__(self, rows: Sequence[memoryview], address: tuple[str, int], num_threads: int) -> None:
        super().__init__(rows)
        self._idle = [socket.create_connection(address) for _ in range(num_threads)]
        for sock in self._idle:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, part: Part) -> None:
        """Write the blocks of ``part`` as one batch."""
        sock = self._idle.pop()
        for number in part:
            name, row = name_of(number), self.rows[number]
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(row))
            num_left = len(head) + len(row) + 2
            num_left -= sock.sendmsg([head, row, b"\r\n"])
            if num_left > 2:
                sock.sendall(row[len(row) + 2 - num_left :])
                num_left = 2
            sock.sendall(b"\r\n"[2 - num_left :])
        receive(sock, [memoryview(bytearray(len(b"+OK\r\n") * len(part)))])
        self._idle.append(sock)

    def get(self, part: Part) -> None:
        """Read the blocks of ``part`` as one batch, into their rows."""
        sock = self._idle.pop()
        sock.sendall(b"".join(encode(b"GET", name_of(number)) for number in part))
        for number in part:
            row = self.rows[number]
            receive(sock, [memoryview(bytearray(len(b"$%d\r\n" % len(row)))), row, memoryview(bytearray(2))])
        self._idle.append(sock)

    def close(self) -> None:
        """Close the connections."""
        for sock in self._idle:
            sock.close()


def name_of(number: int) -> bytes:
    """Return a name as long as the tier's. Pure."""
    return b"bench:{%0102d}" % number


def receive(sock: socket.socket, targets: Sequence[memoryview]) -> None:
    """Fill ``targets``, usually with one call."""
    num_left = sum(map(len, targets))
    while num_left:
        num_read, _, _, _ = sock.recvmsg_into(targets, 0, socket.MSG_WAITALL)
        assert num_read, "the server closed the connection"
        num_left -= num_read
        targets = behind(targets, num_read)


def behind(targets: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return ``targets`` without their first ``num_bytes`` bytes. Pure."""
    left = []
    for target in targets:
        left.append(target[num_bytes:])
        num_bytes = max(0, num_bytes - len(target))
    return left
