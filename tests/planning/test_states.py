"""What a plan finds of a model with recurrent states is what the simulator finds, and states take their room."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.chats import chats
from tests.sim.media import DISK, HOST, STORE

from kvtier.planning.capacity_curve import draw_curve
from kvtier.planning.evaluator import (
    NO_TIME,
    ScreeningEvaluator,
    TimedEvaluator,
    UntimedEvaluator,
    replay_chain,
)
from kvtier.planning.model_shape import shape_of_bytes
from kvtier.planning.plan import PlanRequest, make_plan
from kvtier.planning.planner import make_row
from kvtier.planning.prices import PriceList
from kvtier.planning.state_shape import StateLayers
from kvtier.planning.tier_mix import Goal, Mix, Share
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel, KeptStates
from kvtier.sim.simulate import simulate
from kvtier.sim.states import list_pages
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace, TraceRequest, make_trace
from kvtier.testing.examples import num_examples

BLOCK_TOKENS = 16
LAST = KeptStates(interval_tokens=1600)
"""So rare that only the last state of a prompt is kept, as with vLLM's default."""

FAST = LinkSpeed(1e9, 1e9)
ENGINE = EngineModel(BLOCK_TOKENS, 100, 1000, prefill_tokens_per_s=1e4, decode_tokens_per_s=1e4)


def trace_of(*prompts: tuple[int, ...], num_rest_tokens: int = 5) -> Trace:
    """Return requests far apart, each of some blocks and a few tokens more."""
    return make_trace(
        [
            TraceRequest(100.0 * number, BLOCK_TOKENS * len(ids) + num_rest_tokens, 1, ids)
            for number, ids in enumerate(prompts)
        ],
        BLOCK_TOKENS,
    )


def test_a_prefix_counts_up_to_the_last_state_that_is_held() -> None:
    prompts = trace_of((1, 2, 3), (1, 2, 4), (1, 2, 3, 5))

    def hits(states: KeptStates | None, num_blocks: int = 100) -> int:
        return replay_chain(prompts, HostModel(num_blocks), states=states).num_hits

    assert hits(None) == 0 + 2 + 3
    assert hits(KeptStates()) == 0 + 2 + 3
    assert hits(LAST) == 0 + 0 + 3
    assert hits(KeptStates(2 * BLOCK_TOKENS, keeps_last=False)) == 0 + 2 + 2


def test_a_prefix_without_its_state_in_host_memory_is_found_in_a_tier() -> None:
    prompts = trace_of((1, 2), (3, 4), (1, 2))
    tier = TierModel("disk", 100, NO_TIME)

    found = replay_chain(prompts, HostModel(3, tiers=(tier,)), states=LAST)

    assert (found.num_hits, found.num_host_hits) == (2, 0)
    assert found.written_blocks == {"disk": 6}
    assert found.read_blocks == {"disk": 3}


def test_pages_are_blocks_and_the_states_that_are_kept() -> None:
    prompts = trace_of((1, 2, 3), (1, 2, 3, 4))

    assert list_pages(prompts, None) is prompts
    assert list_pages(prompts, KeptStates()).num_unique_blocks == 8
    pages = list_pages(prompts, LAST)
    assert [one.hash_ids for one in pages.requests] == [(1, 2, 3, -4), (1, 2, 3, 4, -5)]
    assert pages.num_unique_blocks == 6


def test_the_curve_has_the_room_that_states_take() -> None:
    prompts = trace_of((1, 2, 3), (1, 2, 3))

    curve = draw_curve(prompts, "lru", (3, 4), states=LAST)

    assert [point.hit_ratio for point in curve] == [0.0, 0.5]
    assert curve[1].writes_per_unique_block == 1.0
    assert draw_curve(prompts, "lru", states=LAST)[-1].num_blocks == 4


prompts_of_blocks = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), min_size=1, max_size=12
)


@settings(max_examples=num_examples(60), deadline=None)
@given(
    drawn=prompts_of_blocks,
    step=st.sampled_from([None, 1, 2, 3]),
    keeps_last=st.booleans(),
    num_rest_tokens=st.sampled_from([0, 5]),
    num_tier_blocks=st.sampled_from([0, 1000]),
)
def test_planner_and_simulator_find_the_same_prefixes(
    drawn: list[tuple[int, ...]],
    step: int | None,
    keeps_last: bool,
    num_rest_tokens: int,
    num_tier_blocks: int,
) -> None:
    kept = KeptStates(None if step is None else step * BLOCK_TOKENS, keeps_last)
    # Ids of a trace name a block with all before it.
    prompts = [tuple(hash(ids[: end + 1]) % 2**31 for end in range(len(ids))) for ids in drawn]
    trace = trace_of(*prompts, num_rest_tokens=num_rest_tokens)
    tiers = (TierModel("disk", num_tier_blocks, FAST),) if num_tier_blocks else ()
    host = HostModel(1000, speed=FAST, tiers=tiers)

    planned = replay_chain(trace, host, states=kept)
    served = simulate(trace, replace(ENGINE, states=kept, num_device_blocks=24), host)

    assert planned.num_hits * BLOCK_TOKENS == sum(served.total.hit_tokens.values())
    written = next((tier.num_written_blocks for tier in served.tiers if tier.name != "disk"), 0)
    assert planned.num_host_stored == written
    assert planned.num_host_stored == list_pages(trace, kept).num_unique_blocks or kept.keeps_last


STATE_BYTES = 2**30
TRACE = chats()
TIMED = EngineModel(
    16,
    STATE_BYTES,
    num_device_blocks=24,
    prefill_tokens_per_s=16,
    decode_tokens_per_s=10,
    states=KeptStates(),
)
NUM_PAGES = list_pages(TRACE, TIMED.states).num_unique_blocks
SHAPE = replace(shape_of_bytes(2**26), states=StateLayers(1, STATE_BYTES, 16))
QUESTION = PlanRequest(
    TRACE,
    SHAPE,
    TIMED,
    PriceList({one.name: one for one in (HOST, DISK, STORE)}, 3.6, "made up (2026)"),
    make_row(HOST, NUM_PAGES, STATE_BYTES),
    (make_row(DISK, NUM_PAGES, STATE_BYTES),),
)


def test_a_plan_counts_the_bytes_of_states() -> None:
    plan = make_plan(QUESTION)

    assert plan.bytes_per_token == 2**26
    assert plan.unique_bytes == NUM_PAGES * STATE_BYTES
    assert plan.curve[-1].num_blocks == NUM_PAGES > TRACE.num_unique_blocks
    without = make_plan(replace(QUESTION, shape=shape_of_bytes(2**26), engine=replace(TIMED, states=None)))
    assert plan.working_sets[0].peak_blocks > without.working_sets[0].peak_blocks
    one_state_s = STATE_BYTES / 25e9
    assert plan.break_evens[0].example_s == pytest.approx(without.break_evens[0].example_s + one_state_s)


def test_what_is_shown_is_what_the_simulator_finds() -> None:
    plan = make_plan(replace(QUESTION, goal=Goal(hit_ratio=0.4)))

    assert plan.is_reached
    for one in plan.shown:
        served = simulate(TRACE, TIMED, one.candidate.mix.host_model("lru"))
        hits = sum(served.total.hit_tokens.values()) / served.total.num_prompt_tokens
        assert one.timed.hit_ratio == hits >= 0.4


def test_screening_never_rules_out_a_mix_that_reaches_the_goal() -> None:
    timed = TimedEvaluator(TRACE, TIMED, "lru")
    without = timed.evaluate(Mix(())).hit_ratio
    for num_blocks in (4, 16, 64, NUM_PAGES):
        mix = Mix((Share(HOST, num_blocks),))
        reached = timed.evaluate(mix).hit_ratio
        screened = ScreeningEvaluator(timed, reached, without).evaluate(mix)
        assert screened.hit_ratio >= reached
        assert UntimedEvaluator(TRACE, "lru", TIMED.states).evaluate(mix).hit_ratio <= 1
