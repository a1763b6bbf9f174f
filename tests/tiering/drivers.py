"""Managers over example tiers, well-behaved or faulty, for the tests of tiering."""

import random

from kvtier.testing.faults import Faults, FaultyTier
from kvtier.testing.tier_suite import make_config
from kvtier.testing.tiering_driver import TieringDriver
from kvtier.tiering.base import TierSettings
from kvtier.tiering.example import ExampleSecondaryTier

ALWAYS = 1.0
ROOMY = TierSettings(max_in_flight_store_bytes=2**30)
"""A budget that never declines, for tests of something else."""


def make_example(view: memoryview, settings: TierSettings = ROOMY) -> ExampleSecondaryTier:
    """A well-behaved tier."""
    tier = ExampleSecondaryTier(make_config(), view)
    tier.settings = settings
    return tier


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
