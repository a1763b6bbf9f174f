"""The roles of the example tier, which keeps everything in memory of its own and refuses what it cannot do."""

from typing import ClassVar

from tests.tiering.roles.every_role import EveryRole

from kvtier.tiering.example import ExampleSecondaryTier

ALONE = "its blocks are in memory of its own process"


class TestExample(EveryRole):
    """With jobs that end at once."""

    tier_class = ExampleSecondaryTier
    lacks: ClassVar = {
        "raw": ALONE,
        "sharing": ALONE,
        "siblings": ALONE,
        "emptied": ALONE,
        "encryption": "nothing outside can read what it keeps",
        "quotas": "its policy orders the blocks of all tenants",
        "expiry": "it is for reading, and blocks end with the process",
    }
    small: ClassVar = {"max_blocks": 4}

    def own_settings(self) -> dict[str, object]:
        return {}


class TestAsynchronousExample(TestExample):
    """With jobs that the next poll carries out."""

    def own_settings(self) -> dict[str, object]:
        return {"simulate_async": True}
