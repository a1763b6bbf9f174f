"""Wishes of one step come out as one batch per tier and request, in the order of the lookups."""

from kvtier.base import ReqContext
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of, make_config, make_rows
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.transfers import WantedPromotions


def make_guard() -> GuardedTier:
    """A guard around an example tier."""
    return GuardedTier(ExampleSecondaryTier(make_config(), make_rows()), 2**20, 2**12, ManualClock())


def test_wishes_are_batched_per_tier_and_request() -> None:
    wanted, near, far = WantedPromotions(), make_guard(), make_guard()
    first, second = ReqContext("same name"), ReqContext("same name")
    wanted.add(near, first, key_of(3), 30)
    wanted.add(near, second, key_of(1), 10)
    wanted.add(far, first, key_of(2), 20)
    wanted.add(near, first, key_of(4), 40)
    batches = [(plan.guard, plan.req_context, plan.keys, plan.block_ids) for plan in wanted.take()]
    assert batches == [
        (near, first, [key_of(3), key_of(4)], [30, 40]),
        (near, second, [key_of(1)], [10]),
        (far, first, [key_of(2)], [20]),
    ]


def test_taken_wishes_are_forgotten() -> None:
    wanted = WantedPromotions()
    wanted.add(make_guard(), ReqContext("a"), key_of(1), 1)
    assert len(wanted) == 1
    wanted.take()
    assert len(wanted) == 0
    assert wanted.take() == []
