"""Why a block that the tiering manager was asked for is missing.

Each tier has a memory of what it lost, refused or failed to deliver. The manager asks in one order, the most certain
first: what is on its way, what this request could not get, a tier that is down, what a tier remembers, what host memory
remembers, and a sibling namespace last.
"""

from collections.abc import Callable
from enum import IntEnum
from types import MappingProxyType

from kvtier.departed import DepartedBlocks
from kvtier.misses import Miss, MissCause, NotStored, not_stored

DEFAULT_REMEMBERED_BLOCKS = 65_536
"""Blocks remembered of a tier that cannot say how many it holds, one megabyte."""

MAX_NO_ROOM = 4096
"""Requests remembered for which host memory had no room. An engine ends its requests; beyond it none is added."""


class TierDeparture(IntEnum):
    """Why a block is not in a tier, as the orchestrator learns it; positions in the kinds of ``make_departures``."""

    EVICTED = 0
    DECLINED = 1
    ADMISSION = 2
    REUSE_FILTER = 3
    JOB_FAILED = 4
    NO_ROOM = 5
    LOAD_FAILED = 6
    PURGED = 7


def make_departures(tier: str, capacity_blocks: int | None, clock: Callable[[], float]) -> DepartedBlocks:
    """Return an empty memory of the blocks of one tier.

    Args:
        tier: its type.
        capacity_blocks: the most blocks that it can hold; None when it cannot say.
        clock: seconds, monotonic.
    """
    kinds = (
        Miss(MissCause.EVICTED, tier),
        not_stored(NotStored.DECLINED, tier),
        not_stored(NotStored.ADMISSION, tier),
        not_stored(NotStored.REUSE_FILTER, tier),
        not_stored(NotStored.JOB_FAILED, tier),
        not_stored(NotStored.NO_ROOM, tier),
        Miss(MissCause.LOAD_FAILED, tier),
        Miss(MissCause.PURGED, tier),
    )
    return DepartedBlocks(capacity_blocks or DEFAULT_REMEMBERED_BLOCKS, clock, kinds)


def down(tier: str, reason: str) -> Miss:
    """Return the miss of a block that a tier might hold which cannot be used now. Pure."""
    return Miss(MissCause.TIER_DOWN, tier, MappingProxyType({"reason": reason}))


def being_purged(tier: str) -> Miss:
    """Return the miss of a block of a tier that is just being purged. Pure."""
    return Miss(MissCause.PURGED, tier, MappingProxyType({"reason": "a purge is under way"}))
