"""A finished store goes to each usable tier as far as its budget reaches, head first."""

from kvtier.base import ReqContext
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of, make_config, make_rows
from kvtier.tiering.base import TierSettings
from kvtier.tiering.cascade import plan_cascades
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.guard import TierGuard

ROW_BYTES = 4096
REQUEST = ReqContext("a")
KEYS = [key_of(number) for number in range(4)]


def make_guard(max_in_flight_rows: int) -> TierGuard:
    """A tier whose stores may hold that many rows."""
    tier = ExampleSecondaryTier(make_config(), make_rows())
    tier.settings = TierSettings(max_in_flight_store_bytes=max_in_flight_rows * ROW_BYTES)
    return TierGuard(tier, 2**20, ROW_BYTES, ManualClock())


def test_each_tier_gets_what_fits_its_own_budget() -> None:
    plans = plan_cascades(KEYS, [make_guard(10), make_guard(3)], REQUEST)
    assert [(len(plan.keys), plan.num_declined) for plan in plans] == [(4, 0), (3, 1)]
    assert plans[1].keys == tuple(KEYS[:3])


def test_a_tier_that_is_left_out_declines_everything() -> None:
    broken, gone = make_guard(10), make_guard(10)
    broken.breaker.trip()
    gone.is_out_of_service = True
    plans = plan_cascades(KEYS, [broken, gone], REQUEST)
    assert [(plan.keys, plan.num_declined) for plan in plans] == [((), 4), ((), 4)]


def test_planning_takes_nothing_from_the_budget() -> None:
    guard = make_guard(2)
    plan_cascades(KEYS, [guard], REQUEST)
    plan_cascades(KEYS, [guard], REQUEST)
    assert guard.budget.used_bytes == 0


def test_a_budget_below_one_row_still_lets_one_through() -> None:
    tier = ExampleSecondaryTier(make_config(), make_rows())
    guard = TierGuard(tier, primary_bytes=ROW_BYTES, row_bytes=ROW_BYTES, clock=ManualClock())
    assert [len(plan.keys) for plan in plan_cascades(KEYS, [guard], REQUEST)] == [1]
