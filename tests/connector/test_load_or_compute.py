"""Of a prefix that was found as much is loaded as makes the first token come soonest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connector.load_or_compute import (
    PromptCosts,
    first_token_s,
    list_unwanted,
    others_s,
    plan_load_cut,
)
from kvtier.cost_model import LinkRate, PrefillRate
from kvtier.locations import BlockPlace, TierLoad

HOST = BlockPlace()
DISK, STORE = BlockPlace(0), BlockPlace(1)
COMING = BlockPlace(0, is_coming=True)
COSTS = PromptCosts(first_token=0, end_token=100, block_tokens=10, block_bytes=1000, prefill=PrefillRate(0.1))
"""Ten blocks of a second each to compute, and nothing to copy."""


def tier(block_s: float, latency_s: float = 0.0, queue_s: float = 0.0) -> TierLoad:
    """Return a tier that takes so long for a block."""
    return TierLoad("tier", 1, LinkRate(1 / block_s, latency_s), queue_s)


FAST, SLOW = tier(0.1), tier(3.0)
UNKNOWN = TierLoad("tier", 1)


@pytest.mark.parametrize(
    ("places", "tiers", "expected"),
    [
        ([], [], 0),
        ([HOST] * 4, [], 4),
        ([DISK] * 4, [FAST], 4),
        ([DISK] * 4, [SLOW], 0),
        ([DISK] * 4, [UNKNOWN], 4),
        ([HOST, HOST, DISK, DISK], [SLOW], 2),
        ([DISK, DISK, STORE, STORE], [FAST, SLOW], 2),
        ([STORE, DISK], [FAST, SLOW], 0),
        ([STORE, DISK, DISK], [FAST, SLOW], 3),
        ([STORE, *[DISK] * 4], [FAST, SLOW], 5),
        ([DISK, HOST, HOST, HOST], [SLOW], 4),
        ([DISK, HOST], [SLOW], 0),
        ([DISK] * 4, [tier(0.1, latency_s=10.0)], 0),
        ([DISK] * 4, [tier(0.1, latency_s=3.0)], 4),
        ([DISK] * 4, [tier(0.1, queue_s=10.0)], 0),
        ([COMING] * 4, [tier(0.1, queue_s=2.0)], 4),
        ([COMING] * 4, [tier(0.1, queue_s=9.0)], 0),
    ],
)
def test_the_cut_is_where_loading_more_would_take_longer(
    places: list[BlockPlace], tiers: list[TierLoad], expected: int
) -> None:
    assert plan_load_cut(places, tiers, COSTS) == expected


def test_two_tiers_load_at_the_same_time() -> None:
    costs = replace(COSTS, end_token=60)
    places = [DISK, DISK, STORE, STORE]

    assert plan_load_cut(places, [tier(0.9), tier(0.9)], costs) == 4
    assert plan_load_cut([DISK, DISK, DISK, DISK], [tier(1.1)], costs) == 0


def test_a_load_costs_half_while_the_engine_computes_other_prompts() -> None:
    busy = replace(COSTS, queue_s=12.0)

    assert plan_load_cut([DISK] * 4, [tier(1.5)], COSTS) == 0
    assert plan_load_cut([DISK] * 4, [tier(1.5)], busy) == 4
    assert plan_load_cut([DISK] * 4, [tier(2.1)], replace(COSTS, queue_s=1000.0)) == 0


def test_what_is_computed_keeps_the_engine_from_others_and_what_is_loaded_the_tier() -> None:
    slow = tier(1.4)
    crowded = replace(slow, num_queued=4)
    behind = replace(COSTS, num_queued=2)

    assert plan_load_cut([DISK] * 4, [slow], COSTS) == 0
    assert plan_load_cut([DISK] * 4, [slow], behind) == 4
    assert plan_load_cut([DISK] * 4, [crowded], behind) == 0
    assert others_s(1, {0: 2.0}, [crowded], behind) == pytest.approx((4 * 2.8 + 2 * 9.0) / 2)


def test_what_would_not_come_before_the_deadline_is_not_begun() -> None:
    costs = replace(COSTS, deadline_s=0.35)

    assert plan_load_cut([DISK] * 6, [FAST], costs) == 3


def test_even_host_memory_loses_to_a_device_that_computes_faster_than_it_copies() -> None:
    costs = replace(COSTS, to_device=LinkRate(500.0))

    assert plan_load_cut([HOST] * 4, [], costs) == 0
    assert plan_load_cut([HOST] * 4, [], replace(COSTS, to_device=LinkRate(5000.0))) == 4


def test_tokens_far_into_a_prompt_are_worth_more() -> None:
    rate = PrefillRate(0.1, 0.001)
    near, far = replace(COSTS, prefill=rate), replace(COSTS, prefill=rate, first_token=2000, end_token=2100)

    assert plan_load_cut([DISK] * 4, [SLOW], near) == 0
    assert plan_load_cut([DISK] * 4, [SLOW], far) == 4


def test_a_row_of_each_group_comes_up() -> None:
    assert plan_load_cut([DISK] * 4, [tier(0.6)], COSTS) == 4
    assert plan_load_cut([DISK] * 4, [tier(0.6)], replace(COSTS, rows_per_block=2.0)) == 0


def test_a_prefix_that_enters_a_block_in_the_middle_computes_from_block_borders_on() -> None:
    costs = replace(COSTS, first_token=15)

    assert first_token_s(0, 0.0, costs) == pytest.approx(8.5)
    assert first_token_s(1, 0.0, costs) == pytest.approx(8.0)


def test_blocks_of_tiers_of_which_nothing_is_loaded_are_there_to_measure_them() -> None:
    places = [HOST, DISK, STORE, STORE, DISK, HOST, BlockPlace(2, is_coming=True)]

    assert list_unwanted(places, 2) == {1: [2, 3]}
    assert list_unwanted(places, 1) == {0: [1, 4], 1: [2, 3]}
    assert list_unwanted(places, 7) == {}


TIMES = st.floats(0.001, 100)
TIERS = st.lists(
    st.builds(tier, TIMES, TIMES, st.just(0.0) | TIMES) | st.just(UNKNOWN), min_size=3, max_size=3
)
PLACES = st.lists(
    st.builds(BlockPlace, st.none() | st.integers(0, 2))
    | st.builds(BlockPlace, st.integers(0, 2), st.just(True)),
    max_size=10,
)


@given(PLACES, TIERS, st.just(0.0) | TIMES, st.integers(0, 5), st.integers(0, 5))
def test_no_other_cut_costs_less(
    places: list[BlockPlace], tiers: list[TierLoad], queue_s: float, num_before: int, num_loading: int
) -> None:
    costs = replace(COSTS, queue_s=queue_s, num_queued=num_before)
    tiers = [replace(one, num_queued=num_loading) for one in tiers]

    def cost_of(num_blocks: int) -> float:
        """Count it again from the start."""
        taken = places[:num_blocks]
        used = {place.tier for place in taken if place.tier is not None}
        rows = {one: float(sum(place == BlockPlace(one) for place in taken)) for one in used}
        promote_s = max((tiers[one].time_s(rows[one]) for one in used), default=0.0)
        return first_token_s(num_blocks, promote_s, costs) + others_s(num_blocks, rows, tiers, costs)

    found = plan_load_cut(places, tiers, costs)

    assert cost_of(found) == pytest.approx(min(cost_of(number) for number in range(len(places) + 1)))


@given(PLACES, TIERS)
def test_what_is_chosen_is_never_slower_than_computing_everything(
    places: list[BlockPlace], tiers: list[TierLoad]
) -> None:
    found = plan_load_cut(places, tiers, COSTS)
    used = {place.tier for place in places[:found] if place.tier is not None}
    promote_s = max(
        (tiers[one].time_s(sum(p == BlockPlace(one) for p in places[:found])) for one in used), default=0.0
    )

    assert first_token_s(found, promote_s, COSTS) <= first_token_s(0, 0.0, COSTS)
