"""One server: sends it calls as one batch on one connection, and leaves it alone for a moment when it is away.

It knows no cluster and no block. Without the pause each part of a job would wait once more for a server that hangs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from kvtier.errors import MissingExtraError, TierError
from kvtier.tiering.kit.envelope import Buffer
from kvtier.tiering.valkey.connection import Command, Outcome, ServerConnections, command, error_code
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.errors import REMEDIES, TIER_TYPE, refused, unreachable
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

LEFT_ALONE_S = 1.0
"""Seconds for which a server that did not answer is not asked again. Longer loses its blocks after it came back;
shorter makes a job of many parts wait ``timeout_s`` for several of them."""

MAX_EXCHANGE_S = 30.0
"""Seconds for an exchange that belongs to no job. More keeps a lookup behind a server that sends a byte now and then;
less gives up a slow one that answers."""

SEND_BYTES = 2**20
"""Bytes of requests that are made before they are sent, in whole requests. More keep the server waiting while blocks
are sealed, and a call with 16 MiB takes an eighth longer than calls with one; fewer are more calls for small blocks."""

ASKING = encode(b"ASKING")


class ServerNode:
    """Talks to one server; several threads at once, each on its own connection.

    Mutable is the time until which the server is left alone; each write of it is whole, the last one counts.

    Args:
        settings: how to connect.
        address: where to.
        clock: seconds, monotonic.
    """

    def __init__(self, settings: ValkeySettings, address: Address, clock: Callable[[], float]) -> None:
        self.address = address
        self._links = ServerConnections(settings, address)
        self._clock = clock
        self._left_alone_until_s = float("-inf")

    @property
    def is_left_alone(self) -> bool:
        """Whether the server has been away a moment ago."""
        return self._clock() < self._left_alone_until_s

    def run(
        self,
        calls: Sequence[Command],
        end_s: float | None = None,
        *,
        is_asking: bool = False,
        is_probe: bool = False,
    ) -> list[Outcome]:
        """Send ``calls`` together and read their replies in order.

        Args:
            calls: what to send.
            end_s: when to give up on replies that come too slowly, on the node's clock; None is in a while.
            is_asking: whether a node is asked for names that are just moving to it.
            is_probe: whether to ask even a server that is left alone.

        Returns:
            One outcome for each call. When the connection is lost those that came before have counted.

        Thread: any; blocks, a time-out at the most for each step that makes no progress, and one beyond ``end_s``.
        """
        if self.is_left_alone and not is_probe:
            away = TierError(
                TIER_TYPE, f"{self.address} was away a moment ago and is left alone for a second"
            )
            return [away] * len(calls)
        outcomes: list[Outcome] = []
        try:
            deadline = Deadline(self._clock, self._clock() + MAX_EXCHANGE_S if end_s is None else end_s)
            self._exchange(calls, outcomes, deadline, is_asking=is_asking)
        except (RedisError, OSError, ProtocolError) as error:
            self._left_alone_until_s = self._clock() + LEFT_ALONE_S
            away = unreachable(self.address, error)
            outcomes.extend([away] * (len(calls) - len(outcomes)))
        return outcomes

    def close(self) -> None:
        """Close every connection."""
        self._links.close()

    def _exchange(
        self, calls: Sequence[Command], outcomes: list[Outcome], deadline: Deadline, *, is_asking: bool
    ) -> None:
        link = self._links.take()
        try:
            sock = link.lend_socket()
            prefix = (ASKING,) if is_asking else ()
            for pieces in gather((chain(prefix, call.request) for call in calls), SEND_BYTES):
                send_all(sock, pieces, deadline)
            reader = ReplyReader(sock, deadline)
            for call in calls:
                if is_asking:
                    read_reply(reader)
                outcomes.append(call.read(reader))
        finally:
            # Replies that nobody has read would be taken for those of the next batch.
            self._links.give_back(link, is_clean=len(outcomes) == len(calls))


def gather(requests: Iterable[Iterable[Buffer]], num_bytes: int) -> Iterator[list[Buffer]]:
    """Yield the pieces of whole requests together, and make those of the next ones when they are asked for.

    Args:
        requests: asked for their pieces in order.
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


PROBE_NAME = b"kvtier:{probe}"
PROBE = (
    # What a tier does with a block, done to a name that is none, in the order in which a block would see it.
    command(b"STRLEN", PROBE_NAME),
    command(b"SET", PROBE_NAME, b"", b"PX", b"1000"),
    command(b"GET", PROBE_NAME),
    command(b"PEXPIRE", PROBE_NAME, b"1000"),
    command(b"UNLINK", PROBE_NAME),
)


class Servers(ABC):
    """Runs calls wherever their names are kept. Several threads call at once.

    Args:
        address: where the user said that they are.
    """

    def __init__(self, address: Address) -> None:
        self.address = address

    @abstractmethod
    def run(self, calls: Sequence[Command], end_s: float | None = None) -> list[Outcome]:
        """Return one outcome for each call, in order.

        Args:
            calls: what to send.
            end_s: when to give up on replies that come too slowly, on the clock; None is in a while.

        Raises:
            TierError: nobody has answered.

        Thread: any; may block for as long as the time-outs say.
        """

    @abstractmethod
    def is_fault(self, outcome: Outcome) -> bool:
        """Return whether ``outcome``, no reply or a refusal, speaks against the tier as a whole."""

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
        super().__init__(settings.endpoint.address)
        self._node = ServerNode(settings, settings.endpoint.address, clock)

    def run(self, calls: Sequence[Command], end_s: float | None = None) -> list[Outcome]:
        outcomes = self._node.run(calls, end_s)
        raise_if_away(outcomes)
        return outcomes

    def is_fault(self, outcome: Outcome) -> bool:
        return True

    def check_reachable(self) -> None:
        outcomes = self._node.run(PROBE, is_probe=True)
        raise_if_away(outcomes)
        raise_if_refused(self._node.address, outcomes, allowed={"OOM"})

    def close(self) -> None:
        self._node.close()


def raise_if_away(outcomes: Sequence[Outcome]) -> None:
    """Raise what came instead of replies when not one of ``outcomes`` is a reply.

    Raises:
        TierError: as said.
    """
    if outcomes and not any(isinstance(outcome, Reply) for outcome in outcomes):
        raise next(outcome for outcome in outcomes if isinstance(outcome, TierError))


def raise_if_refused(address: Address, outcomes: Sequence[Outcome], allowed: Collection[str]) -> None:
    """Raise the first refusal that is not one of ``allowed``.

    Raises:
        TierError: as said.
    """
    for outcome in outcomes:
        if (code := error_code(outcome)) and code not in allowed:
            raise refused(address, code)


def raise_if_all_refused(servers: Servers, outcomes: Sequence[Outcome]) -> None:
    """Raise when every outcome is the same refusal of the whole place; a full server only declines.

    Raises:
        TierError: as said.
    """
    codes = {error_code(outcome) for outcome in outcomes}
    code = codes.pop() if len(codes) == 1 else ""
    if code in REMEDIES and code != "OOM" and servers.is_fault(outcomes[0]):
        raise refused(servers.address, code)
