"""Blocks that travel while their server goes away at random moments, with an oracle that knows their bytes.

It decides by a seeded random source, so the order of jobs can be repeated; which of them an outage meets cannot.
"""

import random
import threading

from kvtier.testing.tier_driver import NUM_ROWS, TierDriver, arrived_of
from kvtier.testing.tier_server import Outage, TierServer

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
