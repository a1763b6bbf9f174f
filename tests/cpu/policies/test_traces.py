"""Golden hit counts on recorded traces, through the replay of the host; docs/policies.md has the whole table."""

from pathlib import Path

import pytest

from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.sim.belady import count_belady_hits
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.host_replay import HostCache, replay_host
from kvtier.sim.trace import Trace, make_trace
from scripts.policy_hits import list_accesses

TRACES = Path(__file__).parents[4] / "shared" / "traces"
"""Recorded traces that may lie beside a checkout; they are not part of the project."""

CAPACITIES = {"conversation": 9_140, "agentic_dev": 1_617}
"""A twentieth of the unique blocks of the whole trace."""

HITS = {
    "conversation": {"arc": 60542, "fifo": 50751, "lru": 56483, "mq": 63961, "s3fifo": 53857, "sieve": 36566},
    "agentic_dev": {
        "arc": 131527,
        "fifo": 124932,
        "lru": 133653,
        "mq": 130134,
        "s3fifo": 121344,
        "sieve": 124762,
    },
}
"""Blocks found, by trace and policy, in the first NUM_REQUESTS requests."""

BELADY_HITS = {"conversation": 105710, "agentic_dev": 153298}
NUM_REQUESTS = {"conversation": 12_031, "agentic_dev": 1_000}


def first_requests(name: str) -> Trace:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the trace {name} is not beside this checkout")
    trace = read_trace(path)
    return make_trace(trace.requests[: NUM_REQUESTS[name]], trace.block_tokens)


@pytest.mark.parametrize("name", HITS)
def test_each_policy_finds_what_it_found(name: str) -> None:
    trace = first_requests(name)

    found = {
        policy: replay_host(trace, HostCache(CAPACITIES[name], policy)).num_hits for policy in HITS[name]
    }

    assert found == HITS[name]


@pytest.mark.parametrize("name", HITS)
def test_the_bound_is_above_them_all(name: str) -> None:
    bound = count_belady_hits(list_accesses(first_requests(name)), CAPACITIES[name])
    assert bound == BELADY_HITS[name]
    assert bound >= max(HITS[name].values())


def test_policies_that_come_with_kvtier_have_golden_counts() -> None:
    assert all(set(CACHE_POLICIES.names()) >= set(hits) for hits in HITS.values())
