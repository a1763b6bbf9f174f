"""Hundreds of blocks while the server is killed, restarted and stopped at random: no wrong byte, no lost job."""

import random
import threading

import numpy as np
import pytest
from tests.tiering.obj.conftest import StartTier
from tests.tiering.obj.server import S3Server

from kvtier.testing.tier_suite import NUM_ROWS, content_of, key_of

NUM_BLOCKS = 400
NUM_OUTAGES = 3


class Havoc:
    """Kills, restarts and stops the server, one outage after another, until it has had enough.

    Args:
        server: the server.
        rng: where chance comes from.
    """

    def __init__(self, server: S3Server, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the server runs and will go on running."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Wait until the server runs again."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        for number in range(NUM_OUTAGES):
            self._done.wait(self._rng.uniform(0.05, 0.4))
            if number % NUM_OUTAGES == NUM_OUTAGES - 1:
                self._server.kill()
                self._server.start()
            else:
                self._server.hang()
                self._done.wait(self._rng.uniform(0.1, 1.5))
                self._server.wake()


@pytest.mark.parametrize("blocks_per_object", [1, 4])
def test_random_outages_lose_no_job_and_make_no_wrong_byte(
    start_tier: StartTier, server: S3Server, blocks_per_object: int
) -> None:
    rng = random.Random(blocks_per_object)
    driver = start_tier(timeout_s=0.7, blocks_per_object=blocks_per_object)
    havoc = Havoc(server, rng)
    num_jobs = num_loaded = 0
    try:
        while num_jobs < NUM_BLOCKS // 4 or not havoc.is_over:
            slots = rng.sample(range(NUM_ROWS), 8)
            stored = rng.sample(range(NUM_BLOCKS), 4)
            wanted = rng.sample(range(NUM_BLOCKS), 4)
            for number, slot in zip(stored, slots[:4], strict=True):
                driver.rows[slot] = content_of(number)
            jobs = [
                driver.submit(stored, slots[:4], is_promotion=False),
                driver.submit(wanted, slots[4:], is_promotion=True),
            ]
            num_jobs += 1
            _, loaded = [driver.wait(job) for job in jobs]
            arrived = (
                {key_of(number) for number in wanted} if loaded.success else loaded.successful_keys or ()
            )
            for number, slot in zip(wanted, slots[4:], strict=True):
                if key_of(number) in arrived:
                    num_loaded += 1
                    assert np.array_equal(driver.rows[slot], content_of(number)), f"block {number} is wrong"
    finally:
        havoc.close()
    assert len(driver.results) == 2 * num_jobs
    assert num_loaded > 0
    assert driver.tier.stats()["open_jobs"] == 0
    assert driver.store([1, 2, 3]).success
    assert driver.load([1, 2, 3]).success
