"""Engines that load only what is faster, walked at random while speeds change: no law is broken, and nobody waits."""

import pytest
from tests.property.connector_walk import Walk

pytestmark = pytest.mark.walks

NUM_WALKS = 300
WALK_OPERATIONS = 60


def test_walks_that_choose_keep_the_laws_and_load_and_refuse_and_measure() -> None:
    totals = dict.fromkeys(
        (
            "connector.loaded_tokens.example",
            "connector.not_loaded_tokens.example",
            "tier.0.example.probe_blocks",
        ),
        0.0,
    )
    for seed in range(NUM_WALKS):
        walk = Walk(seed, is_choosing=True)
        walk.go(WALK_OPERATIONS)
        stats = walk.driver.engine.scheduler.stats()
        for name in totals:
            totals[name] += stats.get(name, 0.0)
    assert all(totals.values()), totals
