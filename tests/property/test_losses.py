"""Whatever happens, a block that was stored is in host memory, in the tier, or counted as lost to it."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.property.parking_policies import LRU_PARKING

from kvtier.base import OffloadKey, ReqContext
from kvtier.testing.examples import num_examples
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.testing.tier_suite import key_of, make_config
from kvtier.testing.tiering_driver import ROW_BYTES, DeviceStore, TieringDriver
from kvtier.tiering.base import CascadeMode, SecondaryTierManager, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier

NUM_SLOTS = 6
RECOVERY_S = 120.0
"""Longer than any pause of a breaker."""

FAULT_NAMES = (
    "refuse_ratio",
    "fail_ratio",
    "delay_ratio",
    "repeat_ratio",
    "unknown_ratio",
    "lookup_none_ratio",
)


class LossModel(RuleBasedStateMachine):
    """Stores each block once, over one or two tiers that fail, and keeps account of where each is."""

    @initialize(
        first=st.sampled_from(CascadeMode),
        second=st.none() | st.sampled_from(CascadeMode),
        budget_rows=st.sampled_from([1, 3, 100]),
        policy=st.sampled_from(["lru", "arc", LRU_PARKING]),
        seed=st.integers(0, 99),
    )
    def start(
        self, first: CascadeMode, second: CascadeMode | None, budget_rows: int, policy: str, seed: int
    ) -> None:
        """Build a manager over one or two faulty tiers that hold everything they get."""
        modes = [first] if second is None else [first, second]

        def make_tiers(view: memoryview) -> list[SecondaryTierManager]:
            self.tiers: list[FaultyTier] = []
            for position, mode in enumerate(modes):
                own = TierSettings(max_in_flight_store_bytes=budget_rows * ROW_BYTES, cascade=mode)
                inner = ExampleSecondaryTier(make_config(), view, max_blocks=10**6, settings=own)
                self.tiers.append(FaultyTier(inner, Faults(), random.Random(seed + position)))
            return [*self.tiers]

        self.driver = TieringDriver(NUM_SLOTS, make_tiers, cache_policy=policy)
        self.modes = modes
        self.open: list[DeviceStore] = []
        self.stored: list[int] = []
        self.next_number = 0
        self.num_drained = 0.0
        self.has_failed = [False for _ in modes]

    @rule(num_blocks=st.integers(1, 4), success=st.booleans())
    def store(self, num_blocks: int, success: bool) -> None:
        """Store new blocks, if there is room; now and then it fails."""
        self.begin_store(num_blocks)
        if self.open:
            self.end_store(success=success)

    @rule(num_blocks=st.integers(1, 4))
    def begin_store(self, num_blocks: int) -> None:
        """Start a store that ends later."""
        numbers = range(self.next_number, self.next_number + num_blocks)
        store = self.driver.begin_store(numbers, ReqContext("store"))
        if store is not None:
            self.next_number += num_blocks
            self.open.append(store)

    @precondition(lambda self: self.open)
    @rule(success=st.booleans())
    def end_store(self, success: bool) -> None:
        """End the oldest store."""
        store = self.open.pop(0)
        if success:
            self.stored += store.numbers
        self.driver.end_store(store, success=success)

    @rule(tier=st.integers(0, 1), fault=st.sampled_from(FAULT_NAMES), ratio=st.sampled_from([0.0, 0.3, 1.0]))
    def set_fault(self, tier: int, fault: str, ratio: float) -> None:
        """Change how often one fault of one tier happens."""
        if tier < len(self.tiers):
            setattr(self.tiers[tier].faults, fault, ratio)
            self.has_failed[tier] |= ratio > 0

    @rule()
    def repair(self) -> None:
        """Every tier works again."""
        for tier in self.tiers:
            tier.faults = Faults()

    @rule()
    def step(self) -> None:
        """End a step."""
        self.driver.step()

    @rule(seconds=st.sampled_from([1.0, 30.0, RECOVERY_S]))
    def pass_time(self, seconds: float) -> None:
        """Let time go by."""
        self.driver.clock.advance(seconds)

    @precondition(lambda self: self.stored)
    @rule(pick=st.integers(0, 99), length=st.integers(1, 3))
    def serve(self, pick: int, length: int) -> None:
        """Serve a request for blocks that were stored: they come back into host memory, and others leave."""
        numbers = self.stored[pick % len(self.stored) :][:length]
        request = ReqContext("request")
        for _ in range(4):
            num_hits = self.driver.search(numbers, request)
            if num_hits is not None:
                self.driver.load(numbers[:num_hits], request)
                break
            self.driver.step()
        self.driver.manager.request_finished(request)

    @rule()
    def drain(self) -> None:
        """What a drain says is what was lost since the one before."""
        drained = self.driver.manager.drain(10.0)
        assert drained.has_ended
        num_lost = self.count("lost_blocks")
        assert drained.num_lost_blocks == num_lost - self.num_drained
        assert bool(drained) is (drained.num_lost_blocks + drained.num_pending_blocks == 0)
        self.num_drained = num_lost
        if not self.has_open_jobs():
            for position, mode in enumerate(self.modes):
                num_found = len(self.keys_in(position))
                num_waiting = self.of_tier(position, "pending_blocks")
                assert num_found + num_waiting + self.of_tier(position, "lost_blocks") == len(self.stored), (
                    mode
                )

    @rule()
    def find_room(self) -> None:
        """When every tier works again the next store has room, whatever was kept for whom."""
        self.repair()
        while self.open:
            self.end_store(success=True)
        self.driver.clock.advance(RECOVERY_S)
        for _ in range(4 * NUM_SLOTS):
            self.driver.step()
        assert not self.driver.manager.will_have_room()
        self.begin_store(NUM_SLOTS)
        assert self.open, "something stays pinned"
        self.end_store(success=True)

    @invariant()
    def no_block_is_lost_silently(self) -> None:
        """Each block is in host memory, in the tier, or counted."""
        if not hasattr(self, "driver"):
            return
        self.driver.manager.check()
        for position, mode in enumerate(self.modes):
            found = self.keys_in(position)
            keys = [key_of(number) for number in self.stored]
            gone = [key for key in keys if not self.driver.primary.is_ready(key) and key not in found]
            num_lost = self.of_tier(position, "lost_blocks")
            assert len(gone) <= num_lost, f"{len(gone)} blocks are nowhere, {num_lost} are counted: {mode}"
            if mode is CascadeMode.MUST_WRITE and not self.has_failed[position]:
                assert num_lost == 0, "a tier that works has not got a block"

    def keys_in(self, position: int) -> set[OffloadKey]:
        """The blocks in a tier."""
        inner = self.tiers[position].inner
        assert isinstance(inner, ExampleSecondaryTier)
        return set(inner.blocks)

    def of_tier(self, position: int, name: str) -> float:
        """One number of a tier."""
        return self.driver.manager.stats()[f"tier.{position}.faulty.{name}"]

    def count(self, name: str) -> float:
        """One number, of all tiers together."""
        return sum(self.of_tier(position, name) for position in range(len(self.tiers)))

    def has_open_jobs(self) -> bool:
        """Whether a tier still has to report a job."""
        return self.driver.manager.stats()["open_jobs"] > 0


TestLosses = pytest.mark.slow(LossModel.TestCase)
TestLosses.settings = settings(
    max_examples=num_examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
