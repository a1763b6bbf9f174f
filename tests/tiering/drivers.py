"""Managers over example tiers, well-behaved or faulty, for the tests of tiering."""

import random
from collections.abc import Collection, Iterable

from kvtier.base import OffloadKey, ReqContext
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.testing.tier_suite import make_config
from kvtier.testing.tiering_driver import ArrayRegion, TieringDriver
from kvtier.tiering.base import JobResult, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier

ALWAYS = 1.0
ROOMY = TierSettings(max_in_flight_store_bytes=2**30)
"""A budget that never declines, for tests of something else."""


def make_example(view: memoryview, settings: TierSettings = ROOMY) -> ExampleSecondaryTier:
    """A well-behaved tier."""
    return ExampleSecondaryTier(make_config(), view, settings=settings)


def make_faulty(view: memoryview, settings: TierSettings = ROOMY) -> FaultyTier:
    """A tier that fails when told to."""
    return FaultyTier(make_example(view, settings), Faults(), random.Random(1))


def make_driver(num_blocks: int = 4, num_tiers: int = 1, *, lookup_deadline_s: float = 5.0) -> TieringDriver:
    """A manager over example tiers."""
    return TieringDriver(
        num_blocks,
        lambda view: [make_example(view) for _ in range(num_tiers)],
        lookup_deadline_s=lookup_deadline_s,
    )


def make_faulty_driver(
    num_blocks: int = 4, settings: TierSettings = ROOMY
) -> tuple[TieringDriver, FaultyTier]:
    """A manager over a tier that fails when told to."""
    driver = TieringDriver(num_blocks, lambda view: [make_faulty(view, settings)])
    (tier,) = driver.tiers
    assert isinstance(tier, FaultyTier)
    return driver, tier


def example_of(driver: TieringDriver, position: int = 0) -> ExampleSecondaryTier:
    """The example tier at a position."""
    tier = driver.tiers[position]
    assert isinstance(tier, ExampleSecondaryTier)
    return tier


class NotingTier(ExampleSecondaryTier):
    """Notes in which order it is told what, and whether the memory was still there."""

    def __init__(self, view: memoryview, notes: list[str]) -> None:
        super().__init__(make_config(), view, settings=ROOMY)
        self.notes = notes
        self.answered: list[OffloadKey] = []
        self.is_asking = False
        self.is_gone = True
        self.region: ArrayRegion | None = None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return None if self.is_asking else super().lookup(key, req_context)

    def get_finished(self) -> Iterable[JobResult]:
        self.notes.append("poll")
        return super().get_finished()

    def drain_answered(self) -> Collection[OffloadKey] | None:
        answered, self.answered = self.answered, []
        return answered

    def end_step(self) -> None:
        self.notes.append("end_step")

    def request_finished(self, req_context: ReqContext) -> None:
        self.notes.append(f"finished {req_context.req_id}")

    def drain(self, timeout_s: float) -> bool:
        self.notes.append("drain")
        return super().drain(timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        has_memory = self.region is not None and not self.region.is_cleaned
        self.notes.append(f"shutdown with memory {has_memory}")
        super().shutdown(timeout_s)
        return self.is_gone


def make_noting_driver() -> tuple[TieringDriver, NotingTier]:
    """A manager over a tier that notes what it is told."""
    driver = TieringDriver(4, lambda view: [NotingTier(view, [])])
    (tier,) = driver.tiers
    assert isinstance(tier, NotingTier)
    tier.region = driver.region
    return driver, tier
