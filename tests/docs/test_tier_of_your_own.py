"""The tier that docs/extend/tier.md shows in full keeps the contract of every secondary tier."""

from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.tier_suite import TierSuite
from kvtier.tiering.base import SecondaryTierManager
from scripts.check_docs import python_blocks

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "tier.md"


@pytest.fixture(scope="module")
def names_of_page() -> dict[str, Any]:  # Any: whatever the page defines
    """Return what the page's block with the tier defines."""
    (block,) = [block for block in python_blocks(PAGE) if "(SecondaryTierManager):" in block.code]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block.code, f"{PAGE.name}:{block.line}", "exec"), names)  # noqa: S102 - our own docs
    return names


class TestTierOfThePage(TierSuite):
    """The contract."""

    @pytest.fixture(autouse=True)
    def _use_page(self, names_of_page: dict[str, Any]) -> None:
        self.tier_class = names_of_page["DictTier"]

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        tier = self.tier_class(config, rows)
        assert isinstance(tier, SecondaryTierManager)
        return tier

    def damage(self, tier: SecondaryTierManager, key: OffloadKey) -> bool:
        return False  # a dictionary of this process
