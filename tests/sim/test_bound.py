"""No simulated engine finds more than its bound, and a bound is reached where memory has room for what comes back."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cpu.policies import CACHE_POLICIES
from kvtier.sim.bound import count_bound_tokens
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.results import Simulation
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, TraceRequest, make_trace
from kvtier.testing.examples import num_examples
from kvtier.tiering.base import CascadeMode, TierSettings

BLOCK_TOKENS = 10
FAST = LinkSpeed(1e9, 1e9)
ENGINE = EngineModel(BLOCK_TOKENS, 100, num_device_blocks=4, prefill_tokens_per_s=10, decode_tokens_per_s=10)


def prompt(arrival_s: float, *hash_ids: int, num_more_tokens: int = 0) -> TraceRequest:
    return TraceRequest(arrival_s, BLOCK_TOKENS * len(hash_ids) + num_more_tokens, 1, hash_ids)


def bound_of(
    *prompts: TraceRequest, engine: EngineModel = ENGINE, host: HostModel | None = None
) -> int | None:
    trace = make_trace(prompts, BLOCK_TOKENS)
    return simulate(trace, engine, host, finds_bound=True).num_bound_tokens


def test_the_last_block_of_a_prompt_is_found_only_if_tokens_follow_it() -> None:
    whole = [prompt(0, 1, 2), prompt(50, 1, 2)]
    longer = [prompt(0, 1, 2), prompt(50, 1, 2, num_more_tokens=3)]

    assert (bound_of(*whole), bound_of(*longer)) == (10, 20)
    # A load brings it: the engine computes only the last token again.
    assert bound_of(*whole, host=HostModel(9)) == 20


def test_memory_of_all_tiers_counts_as_one() -> None:
    chats = [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    prompts = [prompt(50.0 * turn, *chats[turn % 3]) for turn in range(6)]
    disk = TierModel("disk", 1, FAST)

    assert bound_of(*prompts) == 30
    assert bound_of(*prompts, host=HostModel(1)) == 50
    assert bound_of(*prompts, host=HostModel(1, tiers=(disk,))) == 60


def test_nobody_has_asked_for_a_bound() -> None:
    found = simulate(make_trace([prompt(0, 1)], BLOCK_TOKENS), ENGINE, None)

    assert (found.num_bound_tokens, found.at_most_ratio) == (None, None)


def test_an_engine_with_room_for_everything_reaches_its_bound() -> None:
    prompts = [prompt(50.0 * number, 1, 2, 10 + number, num_more_tokens=5) for number in range(6)]
    found = simulate(make_trace(prompts, BLOCK_TOKENS), ENGINE, HostModel(100), finds_bound=True)

    assert found.not_computed_ratio == found.at_most_ratio == 5 * 20 / (6 * 35)


def test_no_request_at_all_has_a_bound_of_nothing() -> None:
    assert count_bound_tokens([], ENGINE, None) == 0
    assert bound_of() == 0


def test_requests_count_in_the_order_of_their_admission_and_not_in_that_of_their_ends() -> None:
    engine = dataclasses.replace(
        ENGINE, num_device_blocks=8, prefill_tokens_per_s=1000, decode_tokens_per_s=0.1
    )
    long = (1, 2, 3, 4, 5)
    before = [TraceRequest(0, 55, 0, long), TraceRequest(10, 55, 5, long)]
    while_it_runs = [TraceRequest(11.0 + number, 15, 0, (10 + number % 7,)) for number in range(14)]

    assert bound_of(*before, *while_it_runs, engine=engine) == 10 * (5 + 7)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Return a trace whose ids are chained, with more blocks than the memory of a test has room for."""
    requests = []
    for _ in range(draw(st.integers(2, 40))):
        last, ids = 0, []
        for _ in range(draw(st.integers(1, 5))):
            last = last * 4 + draw(st.integers(1, 3))
            ids.append(last)
        num_tokens = BLOCK_TOKENS * len(ids) - draw(st.sampled_from([0, 0, 3]))
        arrival_s = draw(st.floats(0, 60))
        requests.append(TraceRequest(arrival_s, num_tokens, draw(st.integers(0, 9)), tuple(ids)))
    return make_trace(requests, BLOCK_TOKENS)


SPEEDS = st.builds(LinkSpeed, st.floats(20, 1e6), st.floats(20, 1e6), st.floats(0, 2), st.integers(1, 4))
SETTINGS = st.builds(
    TierSettings,
    cascade=st.sampled_from(CascadeMode),
    store_threshold=st.sampled_from([0, 2]),
    fill=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=num_examples(60), deadline=None)
@given(data=st.data(), trace=traces())
def test_no_chain_of_tiers_finds_more_than_its_bound(data: st.DataObject, trace: Trace) -> None:
    engine = dataclasses.replace(
        ENGINE,
        num_device_blocks=data.draw(st.integers(6, 12)),
        prefill_tokens_per_s=data.draw(st.sampled_from([10.0, 200.0])),
    )
    tiers = tuple(
        TierModel(name, data.draw(st.integers(1, 6)), data.draw(SPEEDS), settings=data.draw(SETTINGS))
        for name in data.draw(st.sampled_from([(), ("disk",), ("disk", "store")]))
    )
    host = HostModel(
        data.draw(st.integers(1, 12)),
        data.draw(st.sampled_from(CACHE_POLICIES.names())),
        speed=data.draw(SPEEDS),
        tiers=tiers,
        store_threshold=data.draw(st.integers(0, 2)),
    )

    with_host = simulate(trace, engine, host, finds_bound=True)
    without = simulate(trace, engine, None, finds_bound=True)

    assert_bounded(with_host)
    assert_bounded(without)


def assert_bounded(found: Simulation) -> None:
    """Check that no more was found than the bound allows."""
    assert found.num_bound_tokens is not None
    assert sum(found.total.hit_tokens.values()) <= found.num_bound_tokens


@pytest.mark.parametrize("num_blocks", [8, 12, 30])
def test_every_policy_stays_below_the_bound_on_a_trace_with_reuse(num_blocks: int) -> None:
    prompts = [prompt(20.0 * turn, turn % 3, 10 + turn % 6, 20 + turn % 12, 40 + turn) for turn in range(60)]
    trace = make_trace(prompts, BLOCK_TOKENS)
    engine = dataclasses.replace(ENGINE, num_device_blocks=6)

    found = {
        policy: simulate(trace, engine, HostModel(num_blocks, policy, speed=FAST), finds_bound=True)
        for policy in CACHE_POLICIES.names()
    }

    for one in found.values():
        assert_bounded(one)
    assert any(one.not_computed_ratio > 0 for one in found.values())
