"""Whoever answers calls about blocks: one server, or a cluster of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from kvtier.errors import TierError
from kvtier.tiering.valkey.call import Call, Outcome, command, error_code
from kvtier.tiering.valkey.endpoint import Address
from kvtier.tiering.valkey.node import Node
from kvtier.tiering.valkey.refusals import REMEDIES, refused
from kvtier.tiering.valkey.resp import Reply
from kvtier.tiering.valkey.settings import ValkeySettings

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
    def run(self, calls: Sequence[Call], end_s: float | None = None) -> list[Outcome]:
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
        self._node = Node(settings, settings.endpoint.address, clock)

    def run(self, calls: Sequence[Call], end_s: float | None = None) -> list[Outcome]:
        """Return one outcome for each call, in order.

        Raises:
            TierError: it did not answer.
        """
        outcomes = self._node.run(calls, end_s)
        raise_if_away(outcomes)
        return outcomes

    def is_fault(self, outcome: Outcome) -> bool:
        """Return True: there is nobody else."""
        return True

    def check_reachable(self) -> None:
        """Try everything that a block will need, once.

        Raises:
            TierError: it does not work, and why.
        """
        outcomes = self._node.run(PROBE, is_probe=True)
        raise_if_away(outcomes)
        raise_if_refused(self._node.address, outcomes, allowed={"OOM"})

    def close(self) -> None:
        """Close every connection."""
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
