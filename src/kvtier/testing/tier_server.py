"""The server behind a tier, as something that a suite may hurt and look into.

It is no client of the tier's: a suite uses it to be the crash, the hang and the stranger. How a server is started,
and on which port, is the business of whoever implements it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig


class Outage(Enum):
    """How a server goes away.

    A killed one refuses connections and breaks those that stand. One that hangs keeps them and answers nobody.
    """

    HANG = "hang"
    KILL = "kill"


class TierServer(ABC):
    """A server that runs; every call returns when what it does is done."""

    @abstractmethod
    def start(self) -> None:
        """Start it after a kill, where it was before, with or without its data; it takes blocks now."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, as a crash does (SIGKILL)."""

    @abstractmethod
    def hang(self) -> None:
        """Make it stop answering while connections stand (SIGSTOP)."""

    @abstractmethod
    def wake(self) -> None:
        """Make it go on after ``hang`` (SIGCONT)."""

    @abstractmethod
    def read_value(self, config: OffloadingConfig, key: OffloadKey) -> bytes | None:
        """Return what the server keeps for a block, past the tier; None when that is nothing.

        Args:
            config: the engine whose block it is; its rows have the length of its group's pages.
            key: the block.
        """

    @abstractmethod
    def write_value(self, config: OffloadingConfig, key: OffloadKey, value: bytes) -> None:
        """Put ``value`` in the place of what the server keeps for a block, past the tier."""

    @contextmanager
    def away(self, outage: Outage) -> Iterator[None]:
        """Let the server be away, and bring it back afterwards, whatever happened meanwhile."""
        begin, end = (self.kill, self.start) if outage is Outage.KILL else (self.hang, self.wake)
        begin()
        try:
            yield
        finally:
            end()
