"""Made-up traffic: equal for equal seeds, other for others, and of the kind that its name says."""

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import pytest

from kvtier.errors import ConfigError
from kvtier.sim.made_up import (
    JOB_PERIODS_S,
    MAX_AGENT_TOKENS,
    draw_jobs,
    make_agents,
    make_chat,
    make_chats_beside_jobs,
)
from kvtier.sim.trace import StopReason, Trace

MAKERS = (make_chat, make_agents, make_chats_beside_jobs)


def pauses_after(trace: Trace, stop: StopReason) -> list[float]:
    """Return the times from each request that ended so to the next that begins with all of its blocks."""
    last_seen: dict[int, float] = {}
    pauses = []
    for request in trace.requests:
        for hash_id in reversed(request.hash_ids):
            if hash_id in last_seen:
                pauses.append(request.arrival_s - last_seen.pop(hash_id))
                break
        if request.hash_ids and request.stop is stop:
            last_seen[request.hash_ids[-1]] = request.arrival_s
    return pauses


@pytest.mark.parametrize("make", MAKERS)
def test_equal_seeds_give_equal_traces_and_others_others(make: Callable[[int], Trace]) -> None:
    assert make(3) == make(3)
    assert make(3) != make(4)


@pytest.mark.parametrize("make", MAKERS)
def test_requests_come_in_order_with_prompts_as_long_as_their_blocks(make: Callable[[int], Trace]) -> None:
    trace = make(1)

    assert len(trace.requests) > 300
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(trace.requests))
    for request in trace.requests:
        assert len(request.hash_ids) == request.num_prompt_tokens // trace.block_tokens
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        assert request.num_output_tokens > 0


@pytest.mark.parametrize("make", MAKERS)
def test_an_id_stands_for_its_whole_prefix(make: Callable[[int], Trace]) -> None:
    parents: dict[int, int | None] = {}
    for request in make(2).requests:
        for parent, hash_id in pairwise((None, *request.hash_ids)):
            assert hash_id is not None
            assert parents.setdefault(hash_id, parent) == parent


def test_an_agent_comes_back_in_seconds_and_its_reader_in_minutes() -> None:
    trace = make_agents(1)

    tool, reader = (median(pauses_after(trace, stop)) for stop in (StopReason.TOOL_USE, StopReason.END_TURN))

    assert 2 < tool < 30
    assert 90 < reader < 400
    assert max(request.num_prompt_tokens for request in trace.requests) < 1.5 * MAX_AGENT_TOKENS


def test_a_chat_comes_back_after_about_a_minute() -> None:
    assert 30 < median(pauses_after(make_chat(1), StopReason.END_TURN)) < 150


@pytest.mark.parametrize("seed", range(5))
def test_jobs_come_back_after_their_period(seed: int) -> None:
    mix = draw_jobs(random.Random(seed))
    trace = make_chats_beside_jobs(seed)

    heads: dict[int, list[float]] = {}
    for request in trace.requests:
        for hash_id in request.hash_ids[:1]:
            heads.setdefault(hash_id, []).append(request.arrival_s)
    periods = [
        b - a for times in heads.values() for a, b in pairwise(times) if b - a > 0.9 * JOB_PERIODS_S[0]
    ]

    assert len(mix.periods_s) == len(mix.num_documents) == len(mix.document_tokens)
    assert all(JOB_PERIODS_S[0] <= period_s <= JOB_PERIODS_S[1] for period_s in mix.periods_s)
    for period_s in mix.periods_s:
        assert any(0.94 * period_s < found < 1.06 * period_s for found in periods)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan"), 1e9])
def test_a_time_that_makes_no_sense_is_refused(
    make: Callable[[int, float], Trace], duration_s: float
) -> None:
    with pytest.raises(ConfigError, match="duration_s"):
        make(1, duration_s)


def test_ten_times_the_traffic_has_ten_times_the_chats_and_documents() -> None:
    usual, busy = (draw_jobs(random.Random(3), scale) for scale in (1.0, 10.0))
    assert busy.chats_per_h == pytest.approx(10 * usual.chats_per_h, rel=0.01)
    assert busy.periods_s == usual.periods_s
    assert busy.document_tokens == usual.document_tokens
    assert sum(busy.num_documents) == pytest.approx(10 * sum(usual.num_documents), rel=0.2)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_scale_that_makes_no_sense_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale"):
        make_chats_beside_jobs(1, scale=scale)
