"""Loading is a straight line, computing a convex one, and the break-even length is where they cross."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cost_model import LinkRate, PrefillRate, break_even_tokens, compute_s, load_s
from kvtier.errors import ConfigError

RATES = st.floats(1e-6, 1e12)
LATENCIES = st.floats(0, 1e3)
LINKS = st.lists(st.builds(LinkRate, RATES, LATENCIES), min_size=1, max_size=3)
PREFILLS = st.builds(PrefillRate, st.floats(1e-9, 1e3), st.just(0.0) | st.floats(1e-12, 1.0))
LENGTHS = st.integers(1, 10**6)


@pytest.mark.parametrize(
    ("num_bytes", "links", "expected_s"),
    [
        (0, [LinkRate(100.0, 3.0)], 0.0),
        (100, [], 0.0),
        (100, [LinkRate(100.0)], 1.0),
        (100, [LinkRate(100.0, 3.0)], 4.0),
        (100, [LinkRate(100.0, 3.0), LinkRate(200.0, 0.5)], 5.0),
    ],
)
def test_a_load_takes_each_link_s_latency_once_and_its_bytes_once(
    num_bytes: int, links: list[LinkRate], expected_s: float
) -> None:
    assert load_s(num_bytes, links) == expected_s


@pytest.mark.parametrize(
    ("first_token", "end_token", "rate", "expected_s"),
    [
        (0, 0, PrefillRate(1.0, 1.0), 0.0),
        (5, 3, PrefillRate(1.0, 1.0), 0.0),
        (0, 10, PrefillRate(0.5), 5.0),
        (90, 100, PrefillRate(0.5), 5.0),
        (0, 3, PrefillRate(0.0, 1.0), 1 + 2 + 3),
        (2, 4, PrefillRate(0.0, 1.0), 3 + 4),
        (2, 4, PrefillRate(10.0, 1.0), 20 + 3 + 4),
    ],
)
def test_a_token_costs_its_own_time_and_that_of_each_token_it_attends_to(
    first_token: int, end_token: int, rate: PrefillRate, expected_s: float
) -> None:
    assert compute_s(first_token, end_token, rate) == expected_s


@pytest.mark.parametrize(
    ("links", "rate", "expected"),
    [
        ([LinkRate(200.0)], PrefillRate(1.0), 0),
        ([LinkRate(50.0)], PrefillRate(1.0), None),
        ([LinkRate(100.0)], PrefillRate(1.0), None),
        ([LinkRate(200.0, 10.0)], PrefillRate(1.0), 20),
        ([LinkRate(400.0, 5.0), LinkRate(400.0, 5.0)], PrefillRate(1.0), 20),
        ([LinkRate(400.0), LinkRate(400 / 3)], PrefillRate(1.0), None),
        ([LinkRate(10.0)], PrefillRate(1.0, 1.0), 17),
        ([], PrefillRate(1.0), 0),
    ],
)
def test_longer_prefixes_than_the_break_even_length_are_loaded_faster(
    links: list[LinkRate], rate: PrefillRate, expected: int | None
) -> None:
    assert break_even_tokens(100, links, rate) == expected


def test_far_into_a_prompt_tokens_cost_more_and_loading_pays_earlier() -> None:
    links, rate = [LinkRate(10.0)], PrefillRate(1.0, 1.0)

    assert break_even_tokens(100, links, rate, first_token=8) == 1
    assert break_even_tokens(100, links, rate, first_token=9) == 0


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="bytes_per_s"):
        LinkRate(value)
    with pytest.raises(ConfigError, match="bytes_per_token"):
        break_even_tokens(value, [], PrefillRate(1.0))


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="latency_s"):
        LinkRate(1.0, value)
    with pytest.raises(ConfigError, match="attended_token_s"):
        PrefillRate(1.0, value)


def test_computing_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_s"):
        PrefillRate(0.0, 0.0)


def test_a_position_before_the_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="first_token"):
        break_even_tokens(1.0, [], PrefillRate(1.0), first_token=-1)


@given(LINKS, LENGTHS, LENGTHS)
def test_more_bytes_never_take_less_time(links: list[LinkRate], one: int, other: int) -> None:
    assert load_s(min(one, other), links) <= load_s(max(one, other), links)


@given(PREFILLS, st.lists(st.integers(0, 10**6), min_size=3, max_size=3).map(sorted))
def test_computing_in_two_parts_takes_as_long_as_at_once(rate: PrefillRate, cuts: list[int]) -> None:
    first, middle, end = cuts

    parts_s = compute_s(first, middle, rate) + compute_s(middle, end, rate)

    assert parts_s == pytest.approx(compute_s(first, end, rate))


@given(LINKS, PREFILLS, st.floats(1e-3, 1e9), st.integers(0, 10**5), LENGTHS)
def test_the_break_even_length_has_both_sides(
    links: list[LinkRate], rate: PrefillRate, bytes_per_token: float, first_token: int, num_tokens: int
) -> None:
    found = break_even_tokens(bytes_per_token, links, rate, first_token=first_token)

    loading_s = load_s(num_tokens * bytes_per_token, links)
    computing_s = compute_s(first_token, first_token + num_tokens, rate)
    if found is None or num_tokens <= found:
        assert loading_s >= computing_s * (1 - 1e-9)
    else:
        assert loading_s <= computing_s * (1 + 1e-9)


@given(LINKS, PREFILLS, st.floats(1.1, 100.0))
def test_a_faster_link_never_needs_a_longer_prefix(
    links: list[LinkRate], rate: PrefillRate, factor: float
) -> None:
    faster = [replace(link, bytes_per_s=link.bytes_per_s * factor) for link in links]

    before, after = break_even_tokens(1000, links, rate), break_even_tokens(1000, faster, rate)

    assert before is None or (after is not None and after <= before)
