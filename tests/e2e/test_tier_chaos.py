"""Each secondary tier behind the manager, its server killed, restarted and hung at random while blocks travel.

    KVTIER_CHAOS_BLOCKS=10000 make test-all ARGS=tests/e2e/test_tier_chaos.py

is the large run, with as many more kills; it takes minutes a tier and prints what it did with ``-s``.
"""

import os
import random
from pathlib import Path

import pytest
from tests.e2e.tier_chaos import ChaosRun
from tests.e2e.tier_servers import SERVERS, ServerOrder

pytestmark = pytest.mark.servers

SMALL_NUM_BLOCKS = 400
NUM_BLOCKS = int(os.environ.get("KVTIER_CHAOS_BLOCKS", SMALL_NUM_BLOCKS))
SEEDS = {"fs": 2, "obj": 3, "valkey": 4, "mooncake": 5}
SMALL_TIMEOUT_S = 240
"""A guard against a hang; the small run of a tier takes about ten seconds."""

TIMEOUT_S = SMALL_TIMEOUT_S if NUM_BLOCKS <= SMALL_NUM_BLOCKS else 0
"""No limit for the large run: each of its waits has one of its own."""


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("name", "seed"), SEEDS.items())
def test_random_kills_restarts_and_hangs_bring_no_wrong_byte_and_lose_no_job(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(seed)
    server = SERVERS[name](ServerOrder(tmp_path, NUM_BLOCKS, choose, monkeypatch))
    try:
        report = ChaosRun(server, NUM_BLOCKS, random.Random(seed)).run()
    finally:
        server.close()
    print(f"{name}: {report}")
    assert report.num_kills > 0
    assert report.num_promoted > 0
