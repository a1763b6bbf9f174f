"""A simulated engine takes the time that its rules say, and finds what the production managers hold."""

import dataclasses
import json
import tracemalloc
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.base import LoadStoreSpec, OffloadKey, ReqContext
from kvtier.errors import BlockNotReadyError, ConfigError
from kvtier.sim.engine import SimulatedEngine
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.request import SimulatedRequest, make_request
from kvtier.sim.results import DEVICE, MAX_PERIODS, Spread, quantiles_of, spread_of
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, TraceRequest, make_trace
from kvtier.testing.examples import num_examples
from kvtier.tiering.base import CascadeMode, TierSettings

BLOCK_TOKENS = 10
FAST = LinkSpeed(1e9, 1e9)
ENGINE = EngineModel(
    BLOCK_TOKENS,
    block_bytes=100,
    num_device_blocks=4,
    prefill_tokens_per_s=10,
    decode_tokens_per_s=10,
    max_step_tokens=1000,
)


def request(arrival_s: float, *hash_ids: int, num_output_tokens: int = 10) -> TraceRequest:
    return TraceRequest(arrival_s, BLOCK_TOKENS * len(hash_ids), num_output_tokens, hash_ids)


def trace_of(*requests: TraceRequest) -> Trace:
    return make_trace(requests, BLOCK_TOKENS)


def serve(trace: Trace, engine: EngineModel, host: HostModel | None = None) -> list[SimulatedRequest]:
    """Return the requests in the order in which they were done."""
    done: list[SimulatedRequest] = []
    SimulatedEngine(engine, host, done.append).run(
        [make_request(number, one, BLOCK_TOKENS) for number, one in enumerate(trace.requests)]
    )
    return done


def sources_of(done: list[SimulatedRequest]) -> dict[str, dict[str, int]]:
    """Return, for each request by number, the tokens it did not compute, by source."""
    return {
        one.request_id: {
            **({DEVICE: one.num_device_tokens} if one.num_device_tokens else {}),
            **one.loaded_tokens,
        }
        for one in done
    }


def test_the_first_token_comes_when_the_prompt_is_computed() -> None:
    (done,) = serve(trace_of(request(2.0, 1, 2, 3)), ENGINE)

    assert done.first_token_s == 2.0 + 3.0


def test_prompts_are_computed_one_after_another_and_answers_at_once() -> None:
    engine = dataclasses.replace(ENGINE, num_device_blocks=100)

    found = simulate(trace_of(request(0, 1, 2, 3), request(0, 4, 5, 6)), engine, None)

    assert found.total.first_token == Spread(mean_s=4.5, p50_s=3.0, p90_s=6.0, p99_s=6.0, max_s=6.0)
    assert found.duration_s == 6.0 + 1.0


def test_a_request_waits_for_device_blocks() -> None:
    done = serve(trace_of(request(0, 1, 2, 3), request(0, 4, 5, 6)), ENGINE)

    assert [one.admitted_s for one in done] == [0.0, 4.0]


def test_no_more_requests_run_than_may() -> None:
    engine = dataclasses.replace(ENGINE, num_device_blocks=100, max_running=2)

    done = serve(trace_of(*(request(0, number) for number in range(3))), engine)

    assert [one.admitted_s for one in done] == [0.0, 0.0, 2.0]


def test_what_the_device_has_is_not_computed_but_for_the_last_block() -> None:
    done = serve(trace_of(request(0, 1, 2, 3), request(10, 1, 2, 3)), ENGINE)

    assert sources_of(done) == {"0": {}, "1": {DEVICE: 20}}
    assert done[1].first_token_s == 10 + 1.0


def test_an_engine_that_computes_only_the_last_token_of_a_held_prompt_uses_all_its_blocks() -> None:
    engine = dataclasses.replace(ENGINE, is_last_block_computed=False)

    done = serve(trace_of(request(0, 1, 2), request(60, 1, 2), request(120, 1, 2, 3)), engine)

    assert [one.num_device_tokens for one in done] == [0, 2 * BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS]
    assert done[0].block_ids[:2] == done[1].block_ids[:2] == done[2].block_ids[:2]


def test_the_last_token_of_an_answer_takes_no_room() -> None:
    engine = dataclasses.replace(ENGINE, num_device_blocks=1)

    fits, too_long = (simulate(trace_of(request(0, 1, num_output_tokens=n)), engine, None) for n in (1, 2))

    assert (fits.num_rejected, too_long.num_rejected) == (0, 1)


def test_what_the_device_gave_away_is_loaded_from_the_host() -> None:
    trace = trace_of(request(0, 1, 2, 3), request(10, 4, 5, 6), request(20, 1, 2, 3))
    host = HostModel(num_blocks=100, speed=LinkSpeed(100.0, 1e9, latency_s=0.5))

    done = serve(trace, ENGINE, host)

    assert sources_of(done)["2"] == {"host": 29}
    assert done[2].first_token_s == pytest.approx(20 + (0.5 + 3.0) + 0.1)


def test_what_the_host_has_evicted_is_promoted_from_a_tier() -> None:
    trace = trace_of(request(0, 1, 2, 3), request(10, 4, 5, 6), request(20, 1, 2, 3))
    tier = TierModel("disk", 100, LinkSpeed(100.0, 1e9, latency_s=0.25, num_streams=4))

    found = simulate(trace, ENGINE, HostModel(3, speed=FAST, tiers=(tier,)))

    assert found.total.hit_tokens == {DEVICE: 0, "disk": 29}
    assert found.num_loaded_tokens == 29
    assert found.hit_ratio("disk") == 29 / 90
    assert [(one.name, one.num_read_blocks) for one in found.tiers] == [("host", 3), ("disk", 3)]


def test_a_promotion_takes_the_time_of_its_link() -> None:
    trace = trace_of(request(0, 1, 2, 3), request(10, 4, 5, 6), request(20, 1, 2, 3))
    tier = TierModel("disk", 100, LinkSpeed(100.0, 1e9, latency_s=0.25, num_streams=4))

    done = serve(trace, ENGINE, HostModel(3, speed=FAST, tiers=(tier,)))

    assert done[2].first_token_s == pytest.approx(20 + (0.25 + 3.0) + 0.1, abs=1e-5)


def test_a_second_tier_has_what_the_first_has_evicted() -> None:
    trace = trace_of(request(0, 1, 2, 3), request(10, 4, 5, 6), request(20, 1, 2, 3))
    small = TierModel("disk", 3, FAST)
    large = TierModel("store", 100, FAST)

    found = simulate(trace, ENGINE, HostModel(3, speed=FAST, tiers=(small, large)))

    assert found.total.hit_tokens == {DEVICE: 0, "store": 29}


def test_a_tier_that_is_too_slow_costs_its_deadlines_and_the_request_is_computed() -> None:
    trace = trace_of(request(0, 1, 2, 3), request(10, 4, 5, 6), request(20, 1, 2, 3))
    tier = TierModel("disk", 100, LinkSpeed(0.1, 1e9))
    host = HostModel(3, speed=FAST, tiers=(tier,), lookup_deadline_s=2.0)

    done = serve(trace, ENGINE, host)

    assert sources_of(done)["2"] == {}
    assert 20 + 2.0 + 3.0 <= done[2].first_token_s <= 20 + 2 * 2.1 + 3.0


def test_a_request_whose_blocks_are_on_their_way_is_passed() -> None:
    engine = dataclasses.replace(ENGINE, num_device_blocks=8)
    trace = trace_of(
        request(0, 1, 2, 3),
        request(10, 4, 5, 6),
        request(15, 7, 8, 9),
        request(20, 1, 2, 3),
        request(20.1, 10),
    )
    tier = TierModel("disk", 100, LinkSpeed(75.0, 1e9))

    done = serve(trace, engine, HostModel(4, speed=FAST, tiers=(tier,)))

    assert [one.request_id for one in done] == ["0", "1", "2", "4", "3"]
    assert sources_of(done)["3"] == {"disk": 29}


def test_a_passed_request_keeps_its_place_before_those_that_came_later() -> None:
    engine = dataclasses.replace(ENGINE, max_running=1)
    trace = trace_of(
        request(0, 1, 2, 3), request(10, 4, 5, 6), request(20, 1, 2, 3), request(20, 7), request(20, 8)
    )
    tier = TierModel("disk", 100, LinkSpeed(225.0, 1e9))

    done = serve(trace, engine, HostModel(3, speed=FAST, tiers=(tier,)))

    assert [one.request_id for one in done] == ["0", "1", "3", "2", "4"]


def test_a_loaded_prefix_is_shared_before_the_rest_of_the_prompt_is_computed() -> None:
    engine = dataclasses.replace(ENGINE, num_device_blocks=14)
    trace = trace_of(
        request(0, 1, 2, 3),
        request(10, *range(20, 33)),
        request(25, *range(40, 44)),
        request(26, 1, 2, 3),
        request(27, 1, 2, 3),
    )

    done = serve(trace, engine, HostModel(100, speed=FAST))

    assert sources_of(done)["3"] == {"host": 29}
    assert sources_of(done)["4"] == {DEVICE: 20}


def test_a_prompt_is_computed_when_the_stores_that_read_its_blocks_have_ended() -> None:
    trace = trace_of(request(0, 1, 2, 3), request(10, 4, 5, 6))

    done = serve(trace, ENGINE, HostModel(100, speed=LinkSpeed(1e9, 10.0)))

    assert done[1].admitted_s == 10
    assert done[1].first_token_s == (3.0 + 300 / 10.0) + 3.0


def test_a_request_that_never_fits_is_rejected_and_the_others_are_served() -> None:
    found = simulate(trace_of(request(0, 1, 2, 3, 4), request(0, 5)), ENGINE, HostModel(10))

    assert (found.num_rejected, found.total.num_requests) == (1, 1)


def test_write_back_writes_a_block_that_never_leaves_the_host_nowhere() -> None:
    trace = trace_of(request(0, 1, 2, 3))
    write_back = TierSettings(cascade=CascadeMode.ON_EVICT)

    def written(settings: TierSettings) -> int:
        tier = TierModel("disk", 100, FAST, settings=settings)
        return simulate(trace, ENGINE, HostModel(50, tiers=(tier,))).tiers[1].num_written_blocks

    assert (written(TierSettings()), written(write_back)) == (3, 0)


def test_traffic_counts_blocks_bytes_and_writes_per_unique_block() -> None:
    tier = TierModel("disk", 100, LinkSpeed(1e9, 100.0))

    found = simulate(trace_of(request(0, 1, 2, 3), request(10, 1, 2, 3)), ENGINE, HostModel(9, tiers=(tier,)))
    host, disk = found.tiers

    assert (host.num_written_blocks, host.written_bytes, host.writes_per_unique_block) == (3, 300, 1.0)
    assert (disk.num_written_blocks, disk.written_bytes, disk.writes_per_unique_block) == (3, 300, 1.0)
    assert disk.busy_ratio == pytest.approx(3.0 / found.duration_s)
    assert (disk.num_read_blocks, disk.read_bytes) == (0, 0)


def test_no_link_moves_more_than_its_bandwidth_allows() -> None:
    speed = LinkSpeed(1e9, 10.0, num_streams=2)
    tier = TierModel("disk", 100, speed, settings=TierSettings(job_timeout_s=15.0))
    engine = dataclasses.replace(ENGINE, num_device_blocks=100)
    trace = trace_of(*(request(4.0 * number, *range(9 * number, 9 * number + 3)) for number in range(20)))

    found = simulate(trace, engine, HostModel(100, speed=FAST, tiers=(tier,)))
    disk = found.tiers[1]

    assert 0 < disk.written_bytes <= speed.write_bytes_per_s * found.duration_s
    assert disk.num_written_blocks < 60


def test_a_tier_that_drains_ends_at_its_time_out() -> None:
    tier = TierModel("disk", 100, LinkSpeed(1e9, 1.0), settings=TierSettings(job_timeout_s=15.0))

    found = simulate(trace_of(request(0, 1, 2, 3)), ENGINE, HostModel(100, speed=FAST, tiers=(tier,)))

    assert found.tiers[1].num_written_blocks == 1
    assert found.duration_s == pytest.approx(103.0)


def test_periods_follow_each_other_without_gaps() -> None:
    found = simulate(trace_of(request(0, 1), request(35, 2)), ENGINE, None, period_s=10.0)

    assert [(one.begin_s, one.num_requests) for one in found.periods] == [(0, 1), (10, 0), (20, 0), (30, 1)]


def test_a_trace_over_ages_has_longer_periods_and_not_millions() -> None:
    found = simulate(trace_of(request(0, 1), request(35, 2), request(1.7e12, 3)), ENGINE, None)

    assert 2 <= len(found.periods) <= MAX_PERIODS
    assert sum(one.num_requests for one in found.periods) == 3
    assert found.period_s == found.periods[1].begin_s == pytest.approx(1.7e12 / MAX_PERIODS, rel=0.01)
    assert simulate(trace_of(request(0, 1)), ENGINE, None).period_s == 60.0


def test_a_trace_that_begins_late_has_no_periods_before_it() -> None:
    host = HostModel(9, tiers=(TierModel("disk", 100, LinkSpeed(1e9, 100.0)),))

    early, late = (simulate(trace_of(request(at_s, 1, 2, 3)), ENGINE, host) for at_s in (0, 2**30))

    assert [one.begin_s for one in late.periods] == [2**30 // 60 * 60]
    assert late.duration_s == pytest.approx(early.duration_s, abs=1e-4) == pytest.approx(6.0, abs=1e-4)
    assert late.tiers[1].busy_ratio == pytest.approx(0.5, abs=1e-4)


def test_memory_follows_the_trace_and_the_result_the_capacities() -> None:
    trace = trace_of(*(request(10.0 * number, number % 4, 7) for number in range(20)))
    engine = dataclasses.replace(ENGINE, num_device_blocks=10**15)
    host = HostModel(10**15, tiers=(TierModel("disk", 10**15, FAST),))
    tracemalloc.start()

    found = simulate(trace, engine, host)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most_bytes < 10_000_000
    assert [one.capacity_blocks for one in found.tiers] == [10**15, 10**15]
    assert found.counters["primary.capacity_blocks"] == 10**15


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_more_room_than_the_trace_has_blocks_changes_nothing(policy: str) -> None:
    trace = trace_of(*(request(number / 3, *range(number % 4), 50 + number % 7) for number in range(40)))
    engine = dataclasses.replace(ENGINE, num_device_blocks=5)
    disk = TierModel(
        "disk", 9, LinkSpeed(300, 200, 0.1, 2), settings=TierSettings(max_in_flight_store_bytes=3)
    )

    def hits(num_blocks: int) -> dict[str, int]:
        tiers = (dataclasses.replace(disk, num_blocks=num_blocks),)
        return dict(simulate(trace, engine, HostModel(num_blocks, policy, tiers=tiers)).total.hit_tokens)

    assert hits(22) == hits(10**6)


def test_equal_input_gives_an_equal_result() -> None:
    trace = trace_of(*(request(number / 3, *range(number % 4), 50 + number % 7) for number in range(40)))
    host = HostModel(
        5, speed=LinkSpeed(500, 500, 0.01), tiers=(TierModel("disk", 9, LinkSpeed(300, 200, 0.1, 2)),)
    )

    first, second = (simulate(trace, ENGINE, host) for _ in range(2))

    assert first == second
    assert first.hit_ratio("host") > 0


def test_a_load_whose_blocks_are_gone_is_computed() -> None:
    trace = trace_of(request(0, 1, 2, 3), request(10, 4, 5, 6), request(20, 1, 2, 3))
    done: list[SimulatedRequest] = []
    simulated = SimulatedEngine(ENGINE, HostModel(100), done.append)
    assert simulated.spec is not None
    manager = simulated.spec.get_manager()
    manager.prepare_load = lose  # type: ignore[method-assign]

    simulated.run([make_request(number, one, BLOCK_TOKENS) for number, one in enumerate(trace.requests)])

    assert sources_of(done)["2"] == {}
    assert done[2].first_token_s == 20 + 3.0


def lose(keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
    """Stand in for a manager that has lost what it found."""
    raise BlockNotReadyError(next(iter(keys)), "absent")


def test_a_result_is_json() -> None:
    found = simulate(trace_of(request(0, 1)), ENGINE, HostModel(2, tiers=(TierModel("disk", 2, FAST),)))

    again = json.loads(json.dumps(found.to_json()))

    assert again["total"]["num_prompt_tokens"] == 10
    assert [tier["name"] for tier in again["tiers"]] == ["host", "disk"]


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert spread_of([4.0, 1.0, 2.0, 3.0]) == Spread(2.5, 2.0, 4.0, 4.0, 4.0)
    assert spread_of([]) == Spread(0.0, 0.0, 0.0, 0.0, 0.0)


def test_few_times_are_all_kept_and_many_as_two_hundred_of_the_nearest_rank() -> None:
    assert quantiles_of([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert quantiles_of([]) == ()
    many = quantiles_of(float(number) for number in range(1, 1001))
    assert many == tuple(float(number) for number in range(5, 1001, 5))
    assert quantiles_of(map(float, range(201)))[-1] == 200.0


def test_the_quantiles_of_a_run_agree_with_its_spread() -> None:
    trace = trace_of(*(request(number, number % 3, 9) for number in range(20)))

    found = simulate(trace, ENGINE, None)

    quantiles_s = found.first_token_quantiles_s
    assert (quantiles_s[9], quantiles_s[17], quantiles_s[-1]) == (
        found.total.first_token.p50_s,
        found.total.first_token.p90_s,
        found.total.first_token.max_s,
    )


def test_the_history_shows_how_device_host_and_tier_fill_up() -> None:
    disk = TierModel("disk", 100, LinkSpeed(1e9, 100.0))

    found = simulate(
        trace_of(request(7, 1, 2, 3), request(20, 4, num_output_tokens=0)),
        ENGINE,
        HostModel(9, speed=FAST, tiers=(disk,)),
    )
    history = found.history

    at_19_s, end = history.at_s.index(19.0), -1
    assert history.at_s[0] == 7.0
    assert history.at_s[end] == 7.0 + found.duration_s
    assert [history.held_blocks[place][at_19_s] for place in (DEVICE, "host", "disk")] == [3, 3, 3]
    assert [history.held_blocks[place][end] for place in (DEVICE, "host", "disk")] == [4, 4, 4]
    assert {name: written[end] for name, written in history.written_blocks.items()} == {
        tier.name: tier.num_written_blocks for tier in found.tiers
    }


def test_without_offloading_the_history_has_the_device_alone() -> None:
    history = simulate(trace_of(request(0, 1)), ENGINE, None).history

    assert set(history.held_blocks) == {DEVICE}
    assert history.written_blocks == {}


def test_what_cannot_be_simulated_is_refused() -> None:
    trace = trace_of(request(0, 1))
    with pytest.raises(ConfigError, match="the trace has blocks of 10 tokens"):
        simulate(trace, dataclasses.replace(ENGINE, block_tokens=16), None)
    with pytest.raises(ConfigError, match="period"):
        simulate(trace, ENGINE, None, period_s=0)
    with pytest.raises(ConfigError, match="its own name"):
        HostModel(3, tiers=(TierModel("disk", 1, FAST), TierModel("disk", 1, FAST)))
    with pytest.raises(ConfigError, match="prefill_tokens_per_s"):
        dataclasses.replace(ENGINE, prefill_tokens_per_s=0)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Return a trace whose ids are chained: an id is made from the one before it."""
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        last, ids = 0, []
        for _ in range(draw(st.integers(1, 6))):
            last = last * 3 + draw(st.integers(1, 2))
            ids.append(last)
        num_tokens = BLOCK_TOKENS * len(ids) - draw(st.integers(0, BLOCK_TOKENS - 1))
        arrival_s = draw(st.floats(0, 30))
        requests.append(TraceRequest(arrival_s, num_tokens, draw(st.integers(0, 30)), tuple(ids)))
    return make_trace(requests, BLOCK_TOKENS)


SPEEDS = st.builds(LinkSpeed, st.floats(5, 1e6), st.floats(5, 1e6), st.floats(0, 3), st.integers(1, 4))
SETTINGS = st.builds(
    TierSettings,
    cascade=st.sampled_from(CascadeMode),
    store_threshold=st.sampled_from([0, 2]),
    fill=st.booleans(),
    job_timeout_s=st.floats(0.5, 30),
)


@settings(max_examples=num_examples(60), deadline=None)
@given(data=st.data(), trace=traces())
def test_each_request_is_served_and_nothing_stays_pinned(data: st.DataObject, trace: Trace) -> None:
    tiers = tuple(
        TierModel(name, data.draw(st.integers(1, 20)), data.draw(SPEEDS), settings=data.draw(SETTINGS))
        for name in data.draw(st.sampled_from([(), ("disk",), ("disk", "store")]))
    )
    host = HostModel(
        data.draw(st.integers(1, 20)),
        speed=data.draw(SPEEDS),
        tiers=tiers,
        store_threshold=data.draw(st.integers(0, 2)),
    )
    engine = dataclasses.replace(
        ENGINE,
        num_device_blocks=data.draw(st.integers(9, 20)),
        max_step_tokens=data.draw(st.integers(7, 100)),
    )
    done: list[SimulatedRequest] = []
    simulated = SimulatedEngine(engine, host, done.append)

    simulated.run([make_request(number, one, BLOCK_TOKENS) for number, one in enumerate(trace.requests)])

    assert len(done) == len(trace.requests)
    assert simulated.num_rejected == 0
    for one in done:
        assert one.num_computed_tokens == one.num_prompt_tokens
        assert one.arrival_s <= one.admitted_s < one.first_token_s
        record = next(each for each in simulated.records if each.req_id == one.request_id)
        record.check()
        assert record.tokens_by_origin.get("device", 0) == one.num_device_tokens
    stats = simulated.stats()
    assert stats["connector.open_jobs"] == stats["connector.requests"] == stats["open_jobs"] == 0
    assert stats["primary.evictable_blocks"] == stats["primary.held_blocks"]
    assert simulated.spec is not None
    simulated.spec.get_manager().check()
    for tier in simulated.spec.tiers:
        counts = tier._directory.stats()
        assert (
            counts["primary.evictable_blocks"] == counts["primary.held_blocks"] == tier.stats()["held_blocks"]
        )
