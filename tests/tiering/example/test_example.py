"""The example tier keeps the contract, evicts its oldest and refuses nonsense."""

from pathlib import Path

import pytest

from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError
from kvtier.testing.tier_suite import TierDriver, TierSuite, key_of, make_config, make_rows
from kvtier.tiering.example import ExampleSecondaryTier


class TestExampleTier(TierSuite):
    """The contract, with jobs that end at once."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> ExampleSecondaryTier:
        return ExampleSecondaryTier(config, rows)


class TestAsynchronousExampleTier(TierSuite):
    """The contract, with jobs that end one poll later."""

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> ExampleSecondaryTier:
        return ExampleSecondaryTier(config, rows, simulate_async=True)


def test_a_full_tier_evicts_its_oldest() -> None:
    rows = make_rows()
    tier = ExampleSecondaryTier(make_config(), rows, max_blocks=2)
    driver = TierDriver(tier, rows)
    driver.store([1, 2])
    driver.load([1])
    driver.store([3])
    assert list(tier.blocks) == [key_of(1), key_of(3)]
    assert tier.get_num_blocks() == 2


def test_a_touch_makes_the_first_key_the_most_recent() -> None:
    rows = make_rows()
    tier = ExampleSecondaryTier(make_config(), rows)
    driver = TierDriver(tier, rows)
    driver.store([1, 2, 3])
    tier.touch([key_of(1), key_of(2)], driver.request)
    assert list(tier.blocks) == [key_of(3), key_of(2), key_of(1)]


def test_a_tier_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_blocks=0"):
        ExampleSecondaryTier(make_config(), make_rows(), max_blocks=0)
