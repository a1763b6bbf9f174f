"""The search finds what trying every mix finds, tries far fewer, and says so when nothing reaches the goal."""

import dataclasses
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.chats import chats, round_robin
from tests.sim.media import DISK, HOST, STORE

from kvtier.errors import ConfigError
from kvtier.planning.evaluator import MixEvaluator, TimedEvaluator, UntimedEvaluator
from kvtier.planning.planner import KEEP_RATIO, Row, Search, list_kinds, make_row, search
from kvtier.planning.prices import GIB, Medium
from kvtier.planning.tier_mix import Goal, Mix, MixOutcome, Share, make_bill
from kvtier.sim.model import EngineModel

BLOCK_BYTES = GIB
CHEAP_DISK = dataclasses.replace(DISK, sold_in_gib=1, usd_per_gib=1.0)
ROWS = (Row(HOST, (1, 2, 4, 8, 16)), Row(CHEAP_DISK, (2, 4, 8, 16, 32)), Row(STORE, (4, 16, 64)))


class CachingEvaluator:
    """Asks another evaluator once for each mix: trying all mixes for several goals asks the same again and again."""

    def __init__(self, evaluator: MixEvaluator) -> None:
        self._evaluator = evaluator
        self._known: dict[Mix, MixOutcome] = {}

    def evaluate(self, mix: Mix, on_request: Callable[[], object] | None = None) -> MixOutcome:
        if mix not in self._known:
            self._known[mix] = self._evaluator.evaluate(mix, on_request)
        return self._known[mix]


@pytest.fixture(scope="module")
def timeless() -> MixEvaluator:
    """Judges by hits, with the production managers."""
    return CachingEvaluator(UntimedEvaluator(chats(), "lru"))


@pytest.fixture(scope="module")
def timed() -> MixEvaluator:
    """Judges by first tokens, with the production connector and managers."""
    engine = EngineModel(
        16, BLOCK_BYTES, num_device_blocks=9, prefill_tokens_per_s=16, decode_tokens_per_s=10
    )
    return CachingEvaluator(TimedEvaluator(chats(), engine, "lru"))


class MonotoneEvaluator:
    """Knows hits by a table of weights: more of anything is never worse."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.num_evaluated = 0

    def evaluate(self, mix: Mix, on_request: Callable[[], object] | None = None) -> MixOutcome:
        self.num_evaluated += 1
        held = sum(self.weights[share.medium.name] * share.num_blocks for share in mix.shares)
        moved = dict.fromkeys(("host", "disk", "store"), 10)
        return MixOutcome(held / (held + 20), moved, moved)


def find(goal: Goal, evaluator: MixEvaluator, max_tiers: int = 2) -> Search:
    kinds = list_kinds(ROWS[0], ROWS[1:], max_tiers)
    return search(kinds, goal, evaluator, block_bytes=BLOCK_BYTES, duration_s=1e6)


def try_all(goal: Goal, evaluator: MixEvaluator, max_tiers: int = 2) -> dict[tuple[str, ...], float]:
    """Return the least that a mix of each kind costs which reaches the goal and would not without its tiers."""
    least: dict[tuple[str, ...], float] = {}
    for rows in list_kinds(ROWS[0], ROWS[1:], max_tiers):
        for numbers in product(*(row.num_blocks for row in rows)):
            mix = Mix(tuple(Share(row.medium, number) for row, number in zip(rows, numbers, strict=True)))
            outcome = evaluator.evaluate(mix)
            is_enough_alone = len(rows) > 1 and goal.is_reached(evaluator.evaluate(Mix(mix.shares[:1])))
            if goal.is_reached(outcome) and not is_enough_alone:
                usd = make_bill(mix, outcome, block_bytes=BLOCK_BYTES, duration_s=1e6).usd_per_month
                least[mix.kind] = min(usd, least.get(mix.kind, usd))
    return least


def check_equal(found: Search, least: dict[tuple[str, ...], float]) -> None:
    limit = KEEP_RATIO * min(least.values(), default=0.0)
    kept = {kind: usd for kind, usd in least.items() if usd <= limit}
    assert {one.mix.kind: one.bill.usd_per_month for one in found.best} == pytest.approx(kept)
    assert least.keys() - kept.keys() <= set(found.too_expensive)
    assert not set(found.insufficient) & least.keys()
    usd = [one.bill.usd_per_month for one in found.best]
    assert usd == sorted(usd)


@given(
    st.floats(0.01, 0.99),
    st.fixed_dictionaries({name: st.floats(0.0, 4.0) for name in ("host", "disk", "store")}),
)
def test_the_cheapest_of_each_kind_is_what_trying_all_finds(
    hit_ratio: float, weights: dict[str, float]
) -> None:
    goal, evaluator = Goal(hit_ratio=hit_ratio), MonotoneEvaluator(weights)

    found = find(goal, evaluator)

    assert found.num_tried == evaluator.num_evaluated <= found.num_mixes == 5 + 25 + 15 + 75
    assert found.num_tried <= 5 + 10 + 8 + 3 * 10 + 4
    check_equal(found, try_all(goal, evaluator))


@pytest.mark.parametrize("hit_ratio", [0.05, 0.2, 0.4, 0.6, 0.75])
def test_so_it_is_on_a_trace_with_the_production_managers(timeless: MixEvaluator, hit_ratio: float) -> None:
    goal = Goal(hit_ratio=hit_ratio)

    found = find(goal, timeless)

    check_equal(found, try_all(goal, timeless))
    assert found.best
    assert found.closest is None


@pytest.mark.parametrize("p90_s", [0.9, 1.5, 2.5, 4.0])
def test_and_for_a_goal_in_seconds_on_simulated_time(timed: MixEvaluator, p90_s: float) -> None:
    goal = Goal(first_token_p90_s=p90_s)

    found = find(goal, timed, max_tiers=1)

    least = try_all(goal, timed, max_tiers=1)
    check_equal(found, least)
    assert bool(found.best) == (p90_s > 1)


@pytest.mark.parametrize("hit_ratio", [0.1, 0.4, 0.66])
def test_where_more_memory_finds_less_what_is_shown_still_reaches_the_goal(hit_ratio: float) -> None:
    goal, evaluator = Goal(hit_ratio=hit_ratio), UntimedEvaluator(round_robin(), "lru")

    found = find(goal, evaluator)

    assert found.best
    assert all(goal.is_reached(evaluator.evaluate(one.mix)) for one in found.best)


def test_it_tries_few_of_many_mixes() -> None:
    found = find(Goal(hit_ratio=0.5), MonotoneEvaluator({"host": 1, "disk": 1, "store": 1}))

    assert found.num_tried < found.num_mixes / 3


def test_when_nothing_reaches_the_goal_the_closest_mix_is_named() -> None:
    found = find(Goal(hit_ratio=0.99), MonotoneEvaluator({"host": 1, "disk": 1, "store": 0}), max_tiers=1)

    assert found.best == ()
    assert set(found.insufficient) == {("host",), ("host", "disk"), ("host", "store")}
    assert found.closest is not None
    assert found.closest.mix.kind == ("host", "disk")
    assert found.closest.outcome.hit_ratio == pytest.approx(48 / 68)


def test_equal_questions_have_equal_answers() -> None:
    def answer() -> Search:
        return find(Goal(hit_ratio=0.4), UntimedEvaluator(chats(), "hazard"), max_tiers=1)

    assert answer() == answer()


def test_each_mix_is_told_before_it_is_tried(timeless: MixEvaluator) -> None:
    told: list[Mix] = []
    kinds = list_kinds(ROWS[0], ROWS[1:], 1)

    found = search(
        kinds,
        Goal(hit_ratio=0.3),
        timeless,
        block_bytes=BLOCK_BYTES,
        duration_s=1e6,
        on_mix=told.append,
    )

    assert len(told) == len(set(told)) == found.num_tried


def test_faster_tiers_stand_in_front() -> None:
    fast = dataclasses.replace(STORE, name="fast", latency_ms=0.01)
    slow = dataclasses.replace(STORE, name="slow", latency_ms=100)
    rows = [Row(slow, (1,)), Row(fast, (1,)), Row(CHEAP_DISK, (1,))]

    kinds = [tuple(row.medium.name for row in kind) for kind in list_kinds(ROWS[0], rows, 2)]

    assert kinds == [
        ("host",),
        ("host", "fast"),
        ("host", "disk"),
        ("host", "slow"),
        ("host", "fast", "disk"),
        ("host", "fast", "slow"),
        ("host", "disk", "slow"),
    ]


def test_capacities_are_what_is_sold_and_end_where_all_blocks_fit() -> None:
    def row(medium: Medium, max_bytes: int | None = None) -> tuple[int, ...]:
        return make_row(medium, 100, GIB, max_bytes).num_blocks

    assert row(HOST) == (2, 4, 8, 16, 32, 64, 100)
    assert row(DISK) == (8, 16, 32, 64, 104)
    assert row(DISK, max_bytes=40 * GIB) == (8, 16, 32)
    assert row(dataclasses.replace(DISK, max_gib=20)) == (8, 16)
    # Less than is worth trying on its own account is still all that the machine has room for.
    big = dataclasses.replace(HOST, sold_in_gib=1)
    assert make_row(big, 1000, GIB, 5 * GIB + 1).num_blocks == (5,)
    assert make_row(dataclasses.replace(HOST, sold_in_gib=2), 1000, GIB, 5 * GIB).num_blocks == (4,)
    with pytest.raises(ConfigError, match="capacity of disk=1073741824: must be at least 8589934592 bytes"):
        row(DISK, max_bytes=GIB)
