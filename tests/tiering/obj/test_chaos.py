"""Blocks that share objects while the server goes away at random; one to an object, the tier's suite has them."""

import random

import pytest
from tests.tiering.obj.conftest import TIMEOUT_S, ServerOfSuite, StartTier

from kvtier.testing.tier_server import NUM_CHAOS_BLOCKS, Outage, churn, churn_through


@pytest.mark.parametrize("outage", Outage, ids=lambda outage: outage.value)
def test_a_random_outage_amid_groups_loses_no_job_and_brings_no_wrong_byte(
    start_tier: StartTier, suite_server: ServerOfSuite, outage: Outage
) -> None:
    driver = start_tier(timeout_s=TIMEOUT_S, blocks_per_object=4)
    choose = random.Random(4)
    num_loaded = churn(driver, choose) + churn_through(driver, suite_server, outage, choose)
    assert num_loaded > 0
    driver.poll_until(lambda: driver.store([NUM_CHAOS_BLOCKS]).success)
    assert driver.load_right([NUM_CHAOS_BLOCKS]) == {NUM_CHAOS_BLOCKS}
    assert driver.tier.stats()["open_jobs"] == 0
