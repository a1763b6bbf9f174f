"""A plan holds what its parts find, serves the mixes it shows on simulated time, and says what it assumes."""

import dataclasses
import json
from collections.abc import Callable

import pytest
from tests.planning.test_model_shape import GPT_OSS_20B
from tests.sim.chats import chats
from tests.sim.media import DISK, HOST, STORE

from kvtier.cost_model import LinkRate, PrefillRate, break_even_tokens
from kvtier.planning.assumptions import list_assumptions
from kvtier.planning.evaluator import UntimedEvaluator
from kvtier.planning.model_shape import shape_of_bytes, shape_of_config
from kvtier.planning.plan import EXAMPLE_TOKENS, PlanRequest, describe, format_bytes, make_plan
from kvtier.planning.planner import make_row
from kvtier.planning.prices import PriceList
from kvtier.planning.tier_mix import Goal, Mix, Share
from kvtier.sim.model import EngineModel
from kvtier.sim.simulate import simulate
from kvtier.sim.trace import TraceRequest, make_trace

TRACE = chats()
BLOCK_BYTES = 2**30
SHAPE = shape_of_bytes(BLOCK_BYTES // 16)
ENGINE = EngineModel(16, BLOCK_BYTES, num_device_blocks=9, prefill_tokens_per_s=16, decode_tokens_per_s=10)
PRICES = PriceList({one.name: one for one in (HOST, DISK, STORE)}, 3.6, "made up (2026)")
QUESTION = PlanRequest(
    TRACE,
    SHAPE,
    ENGINE,
    PRICES,
    make_row(HOST, TRACE.num_unique_blocks, BLOCK_BYTES),
    tuple(make_row(medium, TRACE.num_unique_blocks, BLOCK_BYTES) for medium in (DISK, STORE)),
)


def test_without_a_goal_a_plan_measures_and_buys_nothing() -> None:
    plan = make_plan(QUESTION)

    assert plan.bytes_per_token == 64 * 2**20
    assert plan.unique_bytes == 59 * BLOCK_BYTES
    assert [one.window_s for one in plan.working_sets] == [60, 300, 900, 3600]
    assert plan.curve[-1].num_blocks == 59
    assert plan.curve[-1].hit_ratio == pytest.approx((255 - 59) / 255)
    assert (plan.search, plan.shown, plan.without, plan.is_reached) == (None, (), None, None)


def test_break_even_lengths_are_those_of_the_cost_model() -> None:
    slow = dataclasses.replace(HOST, name="slow", read_gb_s=0.5, latency_ms=2000, streams=4)
    request = dataclasses.replace(QUESTION, tiers=(make_row(slow, 59, BLOCK_BYTES),))

    host, tier = make_plan(request).break_evens

    token = BLOCK_BYTES // 16
    device = LinkRate(25e9, 0.0)
    assert (host.medium, host.tokens) == ("host", 0)
    assert host.example_s == pytest.approx(EXAMPLE_TOKENS * token / 25e9)
    assert host.example_compute_s == EXAMPLE_TOKENS / 16
    assert tier.tokens is None  # 0.5 GB/s are 7.5 tokens a second, and 16 are computed
    fast = dataclasses.replace(slow, read_gb_s=5, latency_ms=2000, streams=1000)
    request = dataclasses.replace(QUESTION, tiers=(make_row(fast, 59, BLOCK_BYTES),))
    rate = fast.read_rate(BLOCK_BYTES)
    expected = break_even_tokens(token, [rate, device], PrefillRate(1 / 16))
    assert make_plan(request).break_evens[1].tokens == expected
    # After 2 s of waiting each token takes 13.4 + 2.7 ms instead of 62.5.
    assert expected == pytest.approx(2.0 / (1 / 16 - token / 5e9 - token / 25e9), abs=1)


def test_what_is_shown_for_a_goal_of_hits_reaches_it_on_simulated_time() -> None:
    plan = make_plan(dataclasses.replace(QUESTION, goal=Goal(hit_ratio=0.6), num_gpus=2))

    assert plan.is_reached
    assert plan.search is not None
    assert [one.candidate for one in plan.shown] == list(plan.search.best)
    for one in plan.shown:
        served = simulate(TRACE, ENGINE, one.candidate.mix.host_model("lru"))
        assert sum(served.total.hit_tokens.values()) / served.total.num_prompt_tokens >= 0.6
        assert one.timed is one.candidate.outcome
        assert one.timed.first_token == served.total.first_token
        hours = 2 * served.num_saved_tokens / 16 * 730 / TRACE.duration_s
        assert one.saved_gpu_hours_per_month == pytest.approx(hours)
        assert one.saved_usd_per_month == pytest.approx(hours * 3.6)


def test_a_goal_in_seconds_is_searched_for_on_simulated_time() -> None:
    plan = make_plan(dataclasses.replace(QUESTION, goal=Goal(first_token_p90_s=2.5), max_shown=1))

    assert plan.is_reached
    assert plan.without is not None
    assert plan.without.first_token is not None
    assert plan.without.first_token.p90_s > 2.5
    (shown,) = plan.shown
    assert shown.timed is shown.candidate.outcome
    assert shown.timed.first_token is not None
    assert shown.timed.first_token.p90_s <= 2.5


def test_a_goal_out_of_reach_shows_the_closest_mix() -> None:
    plan = make_plan(dataclasses.replace(QUESTION, goal=Goal(hit_ratio=0.95)))

    assert plan.is_reached is False
    assert plan.search is not None
    assert [one.candidate for one in plan.shown] == [plan.search.closest]
    assert plan.shown[0].timed.first_token is not None
    # Of prompts that were seen before the last block is computed nevertheless: less than without time.
    assert 0.6 < plan.shown[0].timed.hit_ratio < (255 - 59) / 255


def test_a_tier_that_cannot_take_what_is_written_to_it_is_not_recommended() -> None:
    tape = dataclasses.replace(STORE, name="tape", read_gb_s=0.01, write_gb_s=0.01, usd_per_gib_month=1e-6)
    hasty = dataclasses.replace(ENGINE, prefill_tokens_per_s=1e5)
    row = make_row(tape, TRACE.num_unique_blocks, BLOCK_BYTES)
    request = dataclasses.replace(QUESTION, engine=hasty, tiers=(row,), goal=Goal(hit_ratio=0.5))

    search = make_plan(request).search

    assert search is not None
    assert [one.mix.kind for one in search.best] == [("host",)]
    best = search.best[0].bill.usd_per_month
    cheap = Mix((Share(HOST, 8), Share(tape, row.num_blocks[-1])))
    assert cheap.capacity_usd_per_month(BLOCK_BYTES) < best / 2
    assert UntimedEvaluator(TRACE, "lru").evaluate(cheap).hit_ratio > 0.7


def test_a_goal_that_the_device_reaches_needs_no_purchase() -> None:
    plan = make_plan(dataclasses.replace(QUESTION, goal=Goal(first_token_p90_s=60)))

    assert plan.is_reached
    assert (plan.search, plan.shown) == (None, ())


def test_equal_questions_have_equal_plans() -> None:
    request = dataclasses.replace(QUESTION, goal=Goal(0.6, 3.0), cache_policy="hazard")

    assert make_plan(request) == make_plan(request)


def test_a_plan_is_written_as_json_without_infinities() -> None:
    still = dataclasses.replace(QUESTION, goal=Goal(hit_ratio=0.6))

    written = json.loads(json.dumps(make_plan(still).to_json(), allow_nan=False))

    assert written["bytes_per_token"] == 64 * 2**20
    assert written["reuse_gaps"]["percentiles_s"].keys() == {"10", "50", "90", "99"}
    assert written["shown"][0]["candidate"]["bill"]["media"][0]["name"] == "host"


def test_the_assumptions_name_prices_rates_windows_and_the_length_of_the_trace() -> None:
    shape = shape_of_config(GPT_OSS_20B)
    request = dataclasses.replace(QUESTION, shape=shape, goal=Goal(hit_ratio=0.6), num_gpus=4)

    said = "\n".join(list_assumptions(request))

    for part in (
        "49,152 bytes (bfloat16)",
        "24,576 bytes grow with the prompt",
        "16 tokens a second",
        "lasts 1,580 s",
        "on 4 GPU(s), at $3.60 an hour each: made up (2026)",
        "drive writes a day",
        "with transfers that take time",
        "store (memory), 2026: made up.",
    ):
        assert part in said
    assert "Saved GPU time" not in "\n".join(list_assumptions(QUESTION))


def test_a_plan_is_told_what_begins() -> None:
    told: list[str] = []
    counted: list[None] = []

    def begin(what: str) -> Callable[[], object]:
        told.append(what)
        return lambda: counted.append(None)

    make_plan(dataclasses.replace(QUESTION, goal=Goal(hit_ratio=0.6), tiers=()), begin)

    assert told[:2] == ["hits against capacity", "without offloading"]
    assert told[-1].startswith("host ")
    # A replay each for the points of the curve, one without offloading, and one for each mix that may reach the goal.
    assert 1 <= len(counted) / len(TRACE.requests) - len(make_plan(QUESTION).curve) - 1 <= len(told) - 2


def test_a_trace_of_one_instant_has_a_plan_but_no_bill() -> None:
    trace = make_trace([TraceRequest(1.0, 32, 1, (1, 2)), TraceRequest(1.0, 32, 1, (1, 2))], 16)
    request = dataclasses.replace(QUESTION, trace=trace)

    assert make_plan(request).curve[-1].hit_ratio == 0.5
    with pytest.raises(ValueError, match="give a trace with a duration"):
        make_plan(dataclasses.replace(request, goal=Goal(hit_ratio=0.5)))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (5, "5 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (100.4 * 2**30, "100 GiB"),
        (11.4 * 2**40, "11.4 TiB"),
        (2**60, "1024.0 PiB"),
    ],
)
def test_sizes_are_short(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_mix_is_named_by_its_media_and_sizes() -> None:
    assert describe(Mix((Share(HOST, 2), Share(DISK, 1536))), 2**30) == "host 2 GiB + disk 1.5 TiB"
    assert describe(Mix(()), 2**30) == "without"
