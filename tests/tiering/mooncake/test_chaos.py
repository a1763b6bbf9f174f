"""Blocks go in and out while servers are killed at random: no wrong byte, no lost job, no thread too many."""

import random
import threading

import pytest
from tests.tiering.mooncake.conftest import StartTier
from tests.tiering.mooncake.live import LiveStore

from kvtier.testing.tier_suite import NUM_ROWS, content_of, key_of

NUM_BLOCKS = 320
BLOCKS_PER_JOB = 8


@pytest.mark.parametrize("seed", [1, 2])
def test_random_kills_cost_blocks_but_no_job_and_no_wrong_byte(start_tier: StartTier, seed: int) -> None:
    choose = random.Random(seed)
    store = LiveStore(num_providers=2)
    driver = start_tier(store, num_replicas=choose.choice([1, 2]))
    kills = {choose.randrange(NUM_BLOCKS // BLOCKS_PER_JOB) for _ in range(3)}
    num_loaded = 0
    try:
        for step in range(NUM_BLOCKS // BLOCKS_PER_JOB):
            numbers = list(range(step * BLOCKS_PER_JOB, (step + 1) * BLOCKS_PER_JOB))
            for slot, number in enumerate(numbers):
                driver.rows[slot] = content_of(number)
            put = driver.submit(numbers, list(range(BLOCKS_PER_JOB)), is_promotion=False)
            wanted = choose.sample(range(numbers[-1] + 1), BLOCKS_PER_JOB)
            slots = list(range(BLOCKS_PER_JOB, NUM_ROWS))
            get = driver.submit(wanted, slots, is_promotion=True)
            if step in kills:
                choose.choice([store.master, *store.providers]).kill()
            driver.wait(put)
            result = driver.wait(get)
            arrived = frozenset(map(key_of, wanted)) if result.success else result.successful_keys
            for number, slot in zip(wanted, slots, strict=True):
                if key_of(number) in (arrived or ()):
                    assert bytes(driver.rows[slot]) == bytes(content_of(number))
                    num_loaded += 1
            if step in kills:
                store.restart()
        assert len(driver.results) == 2 * NUM_BLOCKS // BLOCKS_PER_JOB
        assert num_loaded > 0
        assert driver.tier.stats()["damaged"] == 0
        own = [thread for thread in threading.enumerate() if "kvtier-mooncake" in thread.name]
        assert len(own) <= 3
    finally:
        store.close()
