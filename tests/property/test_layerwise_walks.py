"""Engines that compute while they load, walked at random: no wrong byte is served, stored or shared, whatever fails."""

from collections import Counter

import pytest
from tests.property.connector_walk import Walk

pytestmark = pytest.mark.walks

NUM_WALKS = 400
WALK_OPERATIONS = 60

EVENTS = {
    "load by layer",
    "load by layer beyond a device hit",
    "load by layer failed",
    "load by layer failed, its request aborted",
    "load good",
    "load lost",
    "told to wait for a load by layer",
    "found again",
}
"""What the walks must have met, or they prove nothing."""


def test_walks_with_loads_by_layer_keep_the_laws_and_reach_each_kind_of_event() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        walk = Walk(seed, is_layerwise=True)
        walk.go(WALK_OPERATIONS)
        seen += walk.driver.seen
    assert not EVENTS - seen.keys()
