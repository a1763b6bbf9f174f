"""Hosts and tiers that want less than everything, walked at random, with other choices or without: no law is broken."""

import pytest
from tests.property.connector_walk import Walk

pytestmark = pytest.mark.walks

NUM_WALKS = 120
WALK_OPERATIONS = 60


@pytest.mark.parametrize(
    ("is_choosing", "reached"),
    [
        (False, {"refused_by_admission", "declined_cascades", "promoted_blocks"}),
        (True, {"refused_by_admission", "promoted_blocks", "probe_blocks"}),
    ],
)
def test_walks_with_choosy_tiers_keep_the_laws_and_leave_nothing_behind(
    is_choosing: bool, reached: set[str]
) -> None:
    totals = dict.fromkeys(reached, 0.0)
    for seed in range(NUM_WALKS):
        walk = Walk(seed, is_choosing=is_choosing, is_choosy=True)
        walk.go(WALK_OPERATIONS)
        stats = walk.driver.engine.scheduler.stats()
        for name in ("waiting_requests", "open_jobs", "connector.open_jobs", "connector.requests"):
            assert stats[name] == 0, f"walk {seed} has left {name}"
        for name in reached:
            totals[name] += sum(value for counter, value in stats.items() if counter.endswith(f".{name}"))
    assert all(totals.values()), totals
