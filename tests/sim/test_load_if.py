"""Over a whole trace, loading only what is faster is never worse than loading everything, nor than loading nothing."""

import random
from dataclasses import replace
from functools import partial

import pytest

from kvtier.config import LoadIf
from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.request import SimulatedRequest, make_request
from kvtier.sim.results import Simulation
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, TraceRequest, make_trace

BLOCK_TOKENS = 512
BLOCK_BYTES = 64 * 2**20
ENGINE = EngineModel(BLOCK_TOKENS, BLOCK_BYTES, num_device_blocks=200, prefill_tokens_per_s=20_000.0)
"""A block is computed in 26 ms, so a tier breaks even at 2.6 GB/s."""

GB = 1e9
QUICK_STORES = 20 * GB
"""Only loads are slow here: a tier that cannot take what is stored has little to load."""


def sessions(seed: int = 1, num_sessions: int = 80, num_turns: int = 6, rate_per_s: float = 0.8) -> Trace:
    """Chats whose turns come back after others have filled device and host: each turn has all of the last and more."""
    rng = random.Random(seed)
    turns = [session for session in range(num_sessions) for _ in range(num_turns)]
    rng.shuffle(turns)
    lengths = [4 + rng.randrange(20) for _ in range(num_sessions)]
    requests, now_s = [], 0.0
    for session in turns:
        now_s += rng.expovariate(rate_per_s)
        lengths[session] += 1 + rng.randrange(8)
        ids = tuple(session * 10_000 + block for block in range(lengths[session]))
        requests.append(TraceRequest(now_s, len(ids) * BLOCK_TOKENS, 50, ids))
    return make_trace(requests, BLOCK_TOKENS)


def tier(
    read_bytes_per_s: float, name: str = "fs", num_blocks: int = 100_000, latency_s: float = 1e-4
) -> TierModel:
    """A tier that reads as fast as told."""
    return TierModel(name, num_blocks, LinkSpeed(read_bytes_per_s, QUICK_STORES, latency_s, num_streams=8))


def serve(trace: Trace, load_if: LoadIf, *tiers: TierModel, num_blocks: int = 100) -> Simulation:
    """Simulate the trace with a small host and these tiers."""
    return simulate(trace, ENGINE, HostModel(num_blocks, tiers=tiers, load_if=load_if))


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The chats."""
    return sessions()


@pytest.fixture(scope="module")
def without(trace: Trace) -> Simulation:
    """An engine that offloads nothing."""
    return simulate(trace, ENGINE, None)


def assert_no_later(found: Simulation, other: Simulation, tolerance: float) -> None:
    """Compare medians and ninetieth percentiles of the time to first token."""
    ours, theirs = found.total.first_token, other.total.first_token
    assert ours.p50_s <= theirs.p50_s * (1 + tolerance), (ours, theirs)
    assert ours.p90_s <= theirs.p90_s * (1 + tolerance), (ours, theirs)


@pytest.mark.parametrize("megabytes_per_s", [50, 200])
def test_a_slow_tier_costs_time_when_all_of_it_is_loaded_and_none_when_only_what_is_faster(
    trace: Trace, without: Simulation, megabytes_per_s: int
) -> None:
    slow = tier(megabytes_per_s * 1e6)

    always = serve(trace, LoadIf.ALWAYS, slow)
    faster = serve(trace, LoadIf.FASTER, slow)

    assert always.total.first_token.p50_s > without.total.first_token.p50_s
    assert always.total.first_token.p90_s > without.total.first_token.p90_s
    assert_no_later(faster, without, 0.02)
    assert_no_later(faster, always, 0.0)
    assert faster.counters["connector.not_loaded_tokens.fs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes_per_s", [0.5, 1.0, 2.0, 3.0])
def test_a_tier_near_its_break_even_is_no_worse_than_always_nor_on_average_than_never(
    trace: Trace, without: Simulation, gigabytes_per_s: float
) -> None:
    middling = tier(gigabytes_per_s * GB)

    faster = serve(trace, LoadIf.FASTER, middling)

    assert_no_later(faster, serve(trace, LoadIf.ALWAYS, middling), 0.02)
    # The median may be later: some wait, at half their weight, for what keeps the engine free for others.
    assert faster.total.first_token.mean_s <= without.total.first_token.mean_s
    assert faster.total.first_token.p90_s <= without.total.first_token.p90_s


@pytest.mark.slow
def test_a_fast_tier_is_loaded_from_as_with_always(trace: Trace) -> None:
    fast = tier(20 * GB)

    always = serve(trace, LoadIf.ALWAYS, fast)
    faster = serve(trace, LoadIf.FASTER, fast)

    assert faster.total.hit_tokens == always.total.hit_tokens
    assert faster.total.first_token == always.total.first_token


@pytest.mark.slow
def test_of_a_fast_disk_and_a_slow_store_the_disk_is_loaded_from(trace: Trace) -> None:
    disk, store = tier(10 * GB, "disk", num_blocks=500), tier(0.05 * GB, "obj", latency_s=0.05)

    always = serve(trace, LoadIf.ALWAYS, disk, store)
    faster = serve(trace, LoadIf.FASTER, disk, store)

    assert faster.hit_ratio("disk") > 0.05
    assert faster.hit_ratio("obj") < 0.01 < always.hit_ratio("disk")
    assert faster.counters["connector.not_loaded_tokens.obj"] > 0
    assert_no_later(faster, always, 0.0)


def test_what_is_computed_although_a_tier_has_it_is_not_written_there_again(trace: Trace) -> None:
    faster = serve(trace, LoadIf.FASTER, tier(0.05 * GB))

    _, disk = faster.tiers
    assert faster.counters["connector.not_loaded_tokens.fs"] > 0
    assert disk.writes_per_unique_block <= 1.0


@pytest.mark.slow
def test_a_tier_that_becomes_slow_is_given_up_and_taken_up_again_when_it_recovers(trace: Trace) -> None:
    fast, slow = tier(20 * GB).speed, tier(0.05 * GB).speed
    last_s = trace.requests[-1].arrival_s
    third_s = last_s / 3
    served: dict[LoadIf, list[SimulatedRequest]] = {}
    for load_if in LoadIf:
        done = served[load_if] = []
        engine = SimulatedEngine(ENGINE, HostModel(100, tiers=(tier(20 * GB),), load_if=load_if), done.append)
        assert engine.spec is not None
        link = engine.spec.tiers[0].link
        engine.timeline.at(third_s, partial(link.change_speed, slow))
        engine.timeline.at(2 * third_s, partial(link.change_speed, fast))
        engine.run([make_request(number, one, BLOCK_TOKENS) for number, one in enumerate(trace.requests)])

    def hits(load_if: LoadIf, begin_s: float, end_s: float) -> int:
        within = [one for one in served[load_if] if begin_s <= one.arrival_s < end_s]
        return sum(one.loaded_tokens.get("fs", 0) for one in within)

    def slowest_s(load_if: LoadIf) -> float:
        times = [one.first_token_s - one.arrival_s for one in served[load_if]]
        return sorted(times)[len(times) * 9 // 10]

    assert len(served[LoadIf.FASTER]) == len(trace.requests)
    assert hits(LoadIf.FASTER, 0, third_s) == hits(LoadIf.ALWAYS, 0, third_s) > 0
    assert hits(LoadIf.FASTER, third_s + 20, 2 * third_s) < 0.1 * hits(LoadIf.FASTER, 0, third_s)
    assert (
        hits(LoadIf.FASTER, 2 * third_s + 20, last_s)
        > 0.8 * hits(LoadIf.ALWAYS, 2 * third_s + 20, last_s)
        > 0
    )
    assert slowest_s(LoadIf.FASTER) < slowest_s(LoadIf.ALWAYS)


@pytest.mark.slow
def test_equal_input_gives_an_equal_result(trace: Trace) -> None:
    slow = tier(1 * GB)

    assert serve(trace, LoadIf.FASTER, slow) == serve(trace, LoadIf.FASTER, slow)


def test_an_engine_that_is_behind_loads_what_it_could_compute_sooner_on_its_own(trace: Trace) -> None:
    behind = replace(ENGINE, prefill_tokens_per_s=10_000.0)
    host = HostModel(100, tiers=(tier(1 * GB),), load_if=LoadIf.FASTER)

    found = simulate(trace, behind, host)

    assert found.hit_ratio("fs") > 0.1
