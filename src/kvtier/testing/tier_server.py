"""The server behind a tier, as something that a suite may hurt and look into.

A suite uses it for crashes, hangs and foreign values. An implementation decides how a server is started and on which
port.
"""

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.tier_driver import NUM_ROWS, TierDriver, arrived_of


class Outage(Enum):
    """How a server goes away.

    A killed one refuses connections and breaks those that stand. One that hangs keeps them and sends no reply.
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


NUM_CHAOS_BLOCKS = 200
MIN_CHAOS_JOBS = 8
"""Pairs of jobs at least in each random outage, also where the server is back in no time."""

MAX_DELAY_S = 0.2
"""Seconds of work before a random outage, at most: enough for some jobs to be under way on a slow machine."""

MAX_HANG_S = 1.0
"""Seconds that a random hang lasts, at most: some end before a tier's time-out of half a second, some after."""


PAUSE_S = 0.01
"""Between jobs that fail at once while the server is started: the machine is not for the test alone."""


class RandomOutage(threading.Thread):
    """Takes a server away beside the test's own thread and brings it back; ``join`` it.

    Args:
        server: the server.
        outage: how it goes.
        choose: where chance comes from; not used by the thread itself.

    Attributes:
        error: what went wrong, None when nothing did.
    """

    def __init__(self, server: TierServer, outage: Outage, choose: random.Random) -> None:
        super().__init__(name="kvtier-random-outage", daemon=True)
        self.error: BaseException | None = None
        self._server = server
        self._outage = outage
        self._delay_s = choose.uniform(0.0, MAX_DELAY_S)
        self._hang_s = choose.uniform(0.0, MAX_HANG_S)
        self._is_given_up = threading.Event()

    def run(self) -> None:
        """Wait, take it away, wait, bring it back."""
        try:
            self._is_given_up.wait(self._delay_s)
            with self._server.away(self._outage):
                if self._outage is Outage.HANG:
                    self._is_given_up.wait(self._hang_s)
        except Exception as error:  # noqa: BLE001  # thread top
            self.error = error

    def give_up(self) -> None:
        """Bring the server back at once, and return when it is."""
        self._is_given_up.set()
        self.join()


def churn(driver: TierDriver, choose: random.Random, num_jobs: int = MIN_CHAOS_JOBS) -> int:
    """Store and load random blocks, each in its own slot, and check what comes; return how many did."""
    num_loaded, half = 0, NUM_ROWS // 2
    for _ in range(num_jobs):
        stored, wanted = (choose.sample(range(NUM_CHAOS_BLOCKS), half) for _ in range(2))
        slots = choose.sample(range(NUM_ROWS), NUM_ROWS)
        driver.place(stored, slots[:half])
        jobs = [
            driver.submit(stored, slots[:half], is_promotion=False),
            driver.submit(wanted, slots[half:], is_promotion=True),
        ]
        _, result = [driver.wait(job) for job in jobs]
        arrived = arrived_of(result, wanted)
        driver.require_right(
            (number, slot) for number, slot in zip(wanted, slots[half:], strict=True) if number in arrived
        )
        num_loaded += len(arrived)
    return num_loaded


def churn_through(driver: TierDriver, server: TierServer, outage: Outage, choose: random.Random) -> int:
    """Store and load random blocks before, during and after a random outage; return how many came."""
    away = RandomOutage(server, outage, choose)
    away.start()
    num_loaded = 0
    try:
        while away.is_alive():
            num_loaded += churn(driver, choose, num_jobs=1)
            away.join(PAUSE_S)
    finally:
        away.give_up()
    assert away.error is None, f"the server did not come back: {away.error}"
    return num_loaded + churn(driver, choose)
