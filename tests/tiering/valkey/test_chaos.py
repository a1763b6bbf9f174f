"""Blocks that travel while their server dies again and again: no wrong byte, no lost job, all well in the end."""

import random
import threading

import numpy as np
from tests.tiering.valkey.conftest import StartTier
from tests.tiering.valkey.live import LiveServer

from kvtier.testing.tier_suite import NUM_ROWS, TierDriver, content_of, key_of

NUM_BLOCKS = 400
NUM_ROUNDS = 12


def churn(driver: TierDriver, chance: random.Random, num_jobs: int) -> int:
    """Store and load random blocks, each in its own slot, and check what arrives; return how many did."""
    num_loaded = 0
    for _ in range(num_jobs):
        numbers = chance.sample(range(NUM_BLOCKS), NUM_ROWS // 2)
        slots = chance.sample(range(NUM_ROWS), len(numbers))
        driver.store(numbers, slots)
        wanted = chance.sample(range(NUM_BLOCKS), NUM_ROWS)
        result = driver.load(wanted)
        arrived = set(map(key_of, wanted)) if result.success else result.successful_keys or frozenset()
        for slot, number in enumerate(wanted):
            if key_of(number) in arrived:
                num_loaded += 1
                assert np.array_equal(driver.rows[slot], content_of(number)), f"block {number} is wrong"
    return num_loaded


def test_random_kills_and_restarts_bring_no_wrong_byte_and_lose_no_job(
    server: LiveServer, start_tier: StartTier
) -> None:
    driver = start_tier(server.url, timeout_s=0.5)
    chance = random.Random(4)
    num_loaded = churn(driver, chance, 10)
    for _ in range(NUM_ROUNDS):
        killer = threading.Timer(chance.uniform(0.0, 0.03), server.kill)
        killer.start()
        num_loaded += churn(driver, chance, 4)
        killer.join()
        server.start()
        num_loaded += churn(driver, chance, 4)
    assert num_loaded > 0
    driver.poll_until(lambda: driver.store(list(range(NUM_ROWS))).success)
    assert driver.load(list(range(NUM_ROWS))).success
    assert driver.tier.stats()["damaged"] == driver.tier.stats()["foreign"] == 0
    assert driver.tier.stats()["open_jobs"] == 0
