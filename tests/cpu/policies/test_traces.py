"""Golden hit counts on recorded traces, through the primary tier's manager; docs/policies.md has the whole table."""

from pathlib import Path

import pytest

from kvtier.base import OffloadKey
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.sim.belady import count_belady_hits
from scripts.policy_hits import count_prefix_hits, read_requests

TRACES = Path(__file__).parents[4] / "shared" / "traces"
"""Recorded traces that may lie beside a checkout; they are not part of the project."""

CAPACITIES = {"conversation": 9_140, "agentic_dev": 1_617}
"""A twentieth of the unique blocks of the whole trace."""

HITS = {
    "conversation": {"arc": 60542, "fifo": 50751, "lru": 56483, "mq": 64446, "s3fifo": 54780, "sieve": 36566},
    "agentic_dev": {
        "arc": 131527,
        "fifo": 124932,
        "lru": 133653,
        "mq": 131660,
        "s3fifo": 121949,
        "sieve": 124762,
    },
}
"""Blocks found, by trace and policy, in the first NUM_REQUESTS requests."""

BELADY_HITS = {"conversation": 105710, "agentic_dev": 153298}
NUM_REQUESTS = {"conversation": 12_031, "agentic_dev": 1_000}


def first_requests(name: str) -> list[list[OffloadKey]]:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the trace {name} is not beside this checkout")
    return read_requests(path)[: NUM_REQUESTS[name]]


@pytest.mark.parametrize("name", HITS)
def test_each_policy_finds_what_it_found(name: str) -> None:
    requests = first_requests(name)
    found = {}
    for policy in HITS[name]:
        manager = CPUOffloadingManager(CAPACITIES[name], policy)
        found[policy] = count_prefix_hits(manager, requests)
        manager.check()
    assert found == HITS[name]


@pytest.mark.parametrize("name", HITS)
def test_the_bound_is_above_them_all(name: str) -> None:
    accesses = [key for keys in first_requests(name) for key in keys]
    bound = count_belady_hits(accesses, CAPACITIES[name])
    assert bound == BELADY_HITS[name]
    assert bound >= max(HITS[name].values())


def test_policies_that_come_with_kvtier_have_golden_counts() -> None:
    assert all(set(CACHE_POLICIES.names()) >= set(hits) for hits in HITS.values())
