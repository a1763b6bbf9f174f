"""Promotions of one step start as one job per tier and request, in the order of the lookups."""

from kvtier.base import OffloadKey, ReqContext
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, ArrayRegion
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.transfers import TierTransfers


class Transfers:
    """Transfers of a small primary tier and two tiers behind it."""

    def __init__(self, num_slots: int = 8) -> None:
        self.primary = CPUPrimaryTierOffloadingManager(num_slots, ArrayRegion(num_slots))
        view = self.primary.get_kv_memoryview()
        clock = ManualClock()
        self.near, self.far = (
            GuardedTier(ExampleSecondaryTier(make_config(), view), 2**20, ROW_BYTES, clock) for _ in "ab"
        )
        self.evicted: list[OffloadKey] = []
        self.transfers = TierTransfers(
            self.primary, [self.near, self.far], self.evicted.extend, lambda *_: None, clock
        )

    def plan(self, tier: GuardedTier, req_context: ReqContext, number: int) -> bool:
        """Plan to load one block."""
        return self.transfers.prepare_promotion(tier, key_of(number), req_context, ())


def test_promotions_are_batched_per_tier_and_request() -> None:
    one = Transfers()
    first, second = ReqContext("same name"), ReqContext("same name")
    for tier, context, number in [(one.near, first, 3), (one.near, second, 1), (one.far, first, 2)]:
        assert one.plan(tier, context, number)
    assert one.plan(one.near, first, 4)
    assert one.transfers.num_planned_blocks(one.near) == 3

    assert one.transfers.start_promotions() == []

    jobs = [(job.tier, job.metadata) for job in one.transfers.jobs]
    found = [(tier, job.req_context, list(job.keys), job.block_ids.tolist()) for tier, job in jobs]
    assert found == [
        (one.near, first, [key_of(3), key_of(4)], [0, 3]),
        (one.near, second, [key_of(1)], [1]),
        (one.far, first, [key_of(2)], [2]),
    ]
    assert one.transfers.planned == {}


def test_cancelled_promotions_give_their_slots_back() -> None:
    one = Transfers()
    assert one.plan(one.near, ReqContext("a"), 1)
    assert one.primary.table.slots.num_free == 7
    assert one.transfers.cancel_promotions() == [key_of(1)]
    assert one.primary.table.slots.num_free == 8
    assert not one.transfers.promoting
    assert one.transfers.start_promotions() == []


def test_a_block_that_a_promotion_evicts_is_reported() -> None:
    one = Transfers(num_slots=1)
    context = ReqContext("a")
    assert one.primary.prepare_store([key_of(1)], context) is not None
    one.primary.complete_store([key_of(1)], context)
    assert one.plan(one.near, context, 2)
    assert one.evicted == [key_of(1)]
    assert not one.plan(one.near, context, 3), "the only slot is being written"
