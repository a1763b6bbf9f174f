"""One server: sends it commands as one batch on one connection, and leaves it alone for a moment when it is away.

Without the pause each task of a job would wait once more for a server that hangs. A request that a server cannot read,
such as a value longer than it takes, is refused alone: the server closes the connection, and those behind it are sent
again on another.
"""

import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.kit.envelope import Buffer
from kvtier.tiering.kit.health import BackendHealth
from kvtier.tiering.valkey.connection import (
    Command,
    ReplyOrError,
    ServerConnections,
    error_code,
    make_command,
)
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.errors import (
    PROTOCOL_ERROR,
    REMEDIES,
    TIER_TYPE,
    HandshakeRefusedError,
    refused,
    unreachable,
)
from kvtier.tiering.valkey.resp import (
    Deadline,
    ProtocolError,
    Reply,
    ReplyReader,
    encode,
    read_reply,
    send_all,
)
from kvtier.tiering.valkey.settings import ValkeySettings

try:
    from redis.exceptions import RedisError
except ImportError as error:
    raise MissingExtraError("redis", "valkey") from error

PAUSE_S = 1.0
"""Seconds for which a server that did not answer gets no command. Longer loses its blocks after it came back;
shorter makes a job of many tasks wait ``timeout_s`` for several of them."""

MAX_EXCHANGE_S = 30.0
"""Seconds for an exchange that belongs to no job. More keeps a lookup behind a server that sends a byte now and then;
less times out on a slow one that answers."""

SEND_BYTES = 2**20
"""Bytes of requests that are made before they are sent, in whole requests. More keep the server waiting while blocks
get their headers, and a call with 16 MiB takes an eighth longer than one with 1 MiB; fewer are more calls."""

ASKING = encode(b"ASKING")
NO_TOUCH = tuple(make_command(b"CLIENT", b"NO-TOUCH", word) for word in (b"ON", b"OFF"))
"""Between the two a server takes no command for a use of its value, if it is Redis or Valkey 7.2 or later."""


class ServerNode:
    """Talks to one server; several threads at once, each on its own connection.

    Args:
        settings: how to connect.
        address: where to.
        clock: seconds, monotonic.

    Attributes:
        address: where the server is.
        health: whether it answers.
    """

    def __init__(self, settings: ValkeySettings, address: Address, clock: Callable[[], float]) -> None:
        self.address = address
        self._connections = ServerConnections(settings, address, clock)
        self._clock = clock
        self.health = BackendHealth(TIER_TYPE, clock, pause_s=PAUSE_S, name=f"{TIER_TYPE}, node {address}")

    def run(
        self,
        commands: Sequence[Command],
        end_s: float | None = None,
        *,
        is_asking: bool = False,
        is_use: bool = True,
        ignores_pause: bool = False,
    ) -> list[ReplyOrError]:
        """Send ``commands`` together and read their replies in order.

        Args:
            commands: what to send.
            end_s: deadline of the replies, on the node's clock; None: the default deadline.
            is_asking: whether the commands are about names that are just moving to the node.
            is_use: whether its order of uses may see them.
            ignores_pause: whether to try even a server that is left alone.

        Returns:
            One reply for each command. When the connection is lost those that came before have counted.

        Thread: any; blocks, a time-out at the most for each step that makes no progress, and one beyond ``end_s``.
        """
        if not ignores_pause:
            try:
                self.health.require_no_pause()
            except TierError as error:
                return [error] * len(commands)
        replies: list[ReplyOrError] = []
        try:
            deadline = Deadline(self._clock, self._clock() + MAX_EXCHANGE_S if end_s is None else end_s)
            while len(replies) < len(commands):
                self._exchange(commands, replies, deadline, is_asking=is_asking, is_use=is_use)
        except (RedisError, OSError, ProtocolError, HandshakeRefusedError) as error:
            self.health.begin_pause(f"{self.address} was away a moment ago and is left alone for a second")
            away = unreachable(self.address, error)
            replies.extend([away] * (len(commands) - len(replies)))
        return replies

    def close(self) -> None:
        """Close every connection."""
        self._connections.close()

    def _exchange(
        self,
        commands: Sequence[Command],
        replies: list[ReplyOrError],
        deadline: Deadline,
        *,
        is_asking: bool,
        is_use: bool,
    ) -> None:
        """Send the commands that have no reply yet, and add their replies up to one that closes the connection."""
        own = commands[len(replies) :]
        framed = own if is_use else [NO_TOUCH[0], *own, NO_TOUCH[1]]
        first = 0 if is_use else 1
        connection = self._connections.take()
        is_clean = False
        try:
            sock = connection.lend_socket()
            lost = _send(sock, framed, deadline, (ASKING,) if is_asking else ())
            reader = ReplyReader(sock, deadline)
            try:
                for index, command in enumerate(framed):
                    if is_asking:
                        read_reply(reader)
                    reply = command.read(reader)
                    if first <= index < first + len(own):
                        replies.append(reply)
                    if reply.kind == "-" and reply.text.startswith(PROTOCOL_ERROR):
                        return
            except (OSError, ProtocolError):
                if lost is not None:
                    raise lost from None
                raise
            is_clean = True
        finally:
            # Replies that were not read would be taken for those of the next batch.
            self._connections.give_back(connection, is_clean=is_clean)


def _send(
    sock: socket.socket, commands: Sequence[Command], deadline: Deadline, lead: tuple[bytes, ...]
) -> OSError | None:
    """Send commands; return why the connection was lost meanwhile. The server may have said why, which can be read.

    Args:
        sock: connected.
        commands: what to send.
        deadline: of the exchange.
        lead: what stands before each of them.
    """
    try:
        for pieces in gather((chain(lead, command.request) for command in commands), SEND_BYTES):
            send_all(sock, pieces, deadline)
    except (ConnectionError, ssl.SSLError) as error:
        return error
    return None


def gather(requests: Iterable[Iterable[Buffer]], num_bytes: int) -> Iterator[list[Buffer]]:
    """Yield the pieces of whole requests together, and make those of the next ones as late as possible.

    Args:
        requests: iterated in order.
        num_bytes: of a portion, at least; the last may have less.
    """
    pieces: list[Buffer] = []
    num_left = num_bytes
    for request in requests:
        for piece in request:
            pieces.append(piece)
            num_left -= len(piece)
        if num_left <= 0:
            yield pieces
            pieces, num_left = [], num_bytes
    if pieces:
        yield pieces


CHECK_NAME = b"kvtier:{probe}"
CHECK_COMMANDS = (
    # What a tier does with a block, done to a name that is none, in the order in which a block would see it.
    make_command(b"STRLEN", CHECK_NAME),
    make_command(b"SET", CHECK_NAME, b"", b"PX", b"1000"),
    make_command(b"GET", CHECK_NAME),
    make_command(b"PEXPIRE", CHECK_NAME, b"1000"),
    make_command(b"UNLINK", CHECK_NAME),
)


class Servers(ABC):
    """Runs commands wherever their names are kept. Several threads call at once.

    Args:
        address: where the user said that they are.
    """

    def __init__(self, address: Address) -> None:
        self.address = address

    @abstractmethod
    def run(
        self, commands: Sequence[Command], end_s: float | None = None, *, is_use: bool = True
    ) -> list[ReplyOrError]:
        """Return one reply for each command, in order.

        Args:
            commands: what to send.
            end_s: deadline of the replies, on the clock; None: the default deadline.
            is_use: whether servers that evict by use may see them.

        Raises:
            TierError: the server has not answered.

        Thread: any; may block for as long as the time-outs say.
        """

    @abstractmethod
    def nodes(self) -> list[ServerNode]:
        """Return the servers that have names.

        Raises:
            TierError: they are not known.
        """

    @abstractmethod
    def is_fault(self, reply: ReplyOrError) -> bool:
        """Return whether ``reply``, no reply or a refusal, speaks against the tier as a whole."""

    @abstractmethod
    def check_reachable(self) -> None:
        """Try everything that a block will need, once.

        Raises:
            TierError: it does not work, and why.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""


class SingleServer(Servers):
    """One server that has every block.

    Args:
        settings: where it is and how to connect.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: ValkeySettings, clock: Callable[[], float]) -> None:
        super().__init__(settings.url.address)
        self._node = ServerNode(settings, settings.url.address, clock)

    def run(
        self, commands: Sequence[Command], end_s: float | None = None, *, is_use: bool = True
    ) -> list[ReplyOrError]:
        replies = self._node.run(commands, end_s, is_use=is_use)
        raise_if_away(replies)
        return replies

    def nodes(self) -> list[ServerNode]:
        return [self._node]

    def is_fault(self, reply: ReplyOrError) -> bool:
        return True

    def check_reachable(self) -> None:
        replies = self._node.run(CHECK_COMMANDS, ignores_pause=True)
        raise_if_away(replies)
        raise_if_refused(self._node.address, replies, allowed={"OOM"})

    def close(self) -> None:
        self._node.close()


def raise_if_away(replies: Sequence[ReplyOrError]) -> None:
    """Raise what came instead of replies when not one of ``replies`` is a reply.

    Raises:
        TierError: as said.
    """
    if replies and not any(isinstance(reply, Reply) for reply in replies):
        raise next(reply for reply in replies if isinstance(reply, TierError))


def raise_if_refused(address: Address, replies: Sequence[ReplyOrError], allowed: Collection[str]) -> None:
    """Raise the first refusal that is not one of ``allowed``.

    Raises:
        TierError: as said.
    """
    for reply in replies:
        if (code := error_code(reply)) and code not in allowed:
            raise refused(address, code)


def raise_if_all_refused(servers: Servers, replies: Sequence[ReplyOrError]) -> None:
    """Raise when every reply is the same refusal of the whole place; a full server only declines.

    Raises:
        TierError: as said.
    """
    codes = {error_code(reply) for reply in replies}
    code = codes.pop() if len(codes) == 1 else ""
    if code in REMEDIES and code != "OOM" and servers.is_fault(replies[0]):
        raise refused(servers.address, code)
