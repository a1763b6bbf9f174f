"""Golden hit counts through the replay of the host: on recorded traces, where they are, and on one that is made up.

docs/concepts/policies.md has the ratios of the recorded ones at seven capacities.
"""

import functools
from pathlib import Path

import pytest
from tests.cpu.policies.chats import make_chats

from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.sim.bound import count_belady_hits
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.host_replay import HostCache, replay_host
from kvtier.sim.trace import Trace, make_trace

TRACES = Path(__file__).parents[4] / "shared" / "traces"
"""Recorded traces that may lie beside a checkout; they are not part of the project."""

CAPACITIES = {"conversation": 9_140, "agentic_dev": 1_617}
"""A twentieth of the unique blocks of the whole trace."""

HITS = {
    "conversation": {"arc": 60542, "lru": 56483},
    "agentic_dev": {"arc": 131527, "lru": 133653},
}
"""Blocks found, by trace and policy, in the first NUM_REQUESTS requests."""

BELADY_HITS = {"conversation": 105710, "agentic_dev": 153298}
NUM_REQUESTS = {"conversation": 12_031, "agentic_dev": 1_000}


def list_accesses(trace: Trace) -> list[int]:
    return [hash_id for request in trace.requests for hash_id in request.hash_ids]


@functools.cache
def first_requests(name: str) -> Trace:
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the trace {name} is not beside this checkout")
    trace = read_trace(path)
    return make_trace(trace.requests[: NUM_REQUESTS[name]], trace.block_tokens)


@pytest.mark.traces
@pytest.mark.parametrize("name", HITS)
def test_each_policy_finds_what_it_found(name: str) -> None:
    trace = first_requests(name)

    found = {
        policy: replay_host(trace, HostCache(CAPACITIES[name], policy)).num_hits for policy in HITS[name]
    }

    assert found == HITS[name]


@pytest.mark.traces
@pytest.mark.parametrize("name", HITS)
def test_the_bound_is_above_them_all(name: str) -> None:
    bound = count_belady_hits(list_accesses(first_requests(name)), CAPACITIES[name])
    assert bound == BELADY_HITS[name]
    assert bound >= max(HITS[name].values())


MADE_UP_CAPACITIES = (381, 951, 3_805)
"""A fiftieth, a twentieth and a fifth of the made-up trace's unique blocks."""

MADE_UP_HITS = {
    "arc": (8792, 12515, 15150),
    "hazard": (11053, 15060, 15641),
    "lru": (8248, 11744, 15641),
}
MADE_UP_BELADY_HITS = (15276, 15641, 15641)


@pytest.fixture(scope="module")
def made_up() -> Trace:
    return make_chats()


def test_the_made_up_trace_is_the_same_everywhere(made_up: Trace) -> None:
    found = (len(made_up.requests), made_up.num_accesses, made_up.num_unique_blocks)
    assert found == (3_100, 34_667, 19_026)


@pytest.mark.slow
@pytest.mark.parametrize("policy", MADE_UP_HITS)
def test_each_policy_finds_what_it_found_of_made_up_chats(made_up: Trace, policy: str) -> None:
    found = [replay_host(made_up, HostCache(capacity, policy)).num_hits for capacity in MADE_UP_CAPACITIES]

    assert tuple(found) == MADE_UP_HITS[policy]


def test_the_bound_is_above_them_all_on_made_up_chats(made_up: Trace) -> None:
    accesses = list_accesses(made_up)
    bounds = tuple(count_belady_hits(accesses, capacity) for capacity in MADE_UP_CAPACITIES)

    assert bounds == MADE_UP_BELADY_HITS
    for hits in MADE_UP_HITS.values():
        assert all(found <= bound for found, bound in zip(hits, bounds, strict=True))


CONVERSATION_CAPACITIES = (1_828, 18_279)
"""A hundredth and a tenth of the blocks of `conversation`; a twentieth is above."""

CONVERSATION_HITS = {
    "arc": (18800, 81907),
    "hazard": (31511, 85807),
    "lru": (15138, 80466),
}


@pytest.mark.traces
@pytest.mark.parametrize("policy", CONVERSATION_HITS)
def test_each_policy_finds_what_it_found_at_a_hundredth_and_at_a_tenth(policy: str) -> None:
    trace = first_requests("conversation")

    found = [replay_host(trace, HostCache(size, policy)).num_hits for size in CONVERSATION_CAPACITIES]

    assert tuple(found) == CONVERSATION_HITS[policy]


def test_policies_that_come_with_kvtier_have_golden_counts() -> None:
    ours = {
        name
        for name in CACHE_POLICIES.names()
        if CACHE_POLICIES.resolve(name).__module__.startswith("kvtier.")
    }
    assert ours == set(MADE_UP_HITS) == set(CONVERSATION_HITS)
