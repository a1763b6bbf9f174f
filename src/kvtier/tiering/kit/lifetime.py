"""How long a block in a tier lives: from its store, whatever its use, by the wall clock of those who look.

The time of the store stands beside the block and survives restarts, so a wall clock that is set may lie between. A
block from the future is over, except for the small differences that clocks of several machines have: set back, a clock
makes some blocks misses, and none of them immortal.
"""

from dataclasses import dataclass

from kvtier.settings import setting, ttl

MAX_SKEW_S = 300.0
"""Seconds by which a block may lie in the future. More lets a clock that was set back keep blocks for longer; less
loses blocks that another machine, whose clock is ahead, has just written."""

TTL = setting(
    ttl,
    "blocks do not expire; a number makes a block a miss this long after its store, for [retention]"
    "(tenants.md#how-long-blocks-live)",
    unit="seconds",
    default_text="none",
)
"""The setting of tiers that keep the time of a block's store."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Whether blocks are over.

    Attributes:
        ttl_s: seconds that a block lives.
    """

    ttl_s: float

    def is_over(self, stored_s: float, now_s: float) -> bool:
        """Return whether a block stored at ``stored_s`` is over at ``now_s``, both seconds since 1970. Pure.

        So a block lives at most twice its time when the clock is set back, and never longer than MAX_SKEW_S beyond it.
        """
        return not -min(self.ttl_s, MAX_SKEW_S) <= now_s - stored_s < self.ttl_s


def make_lifetime(ttl_s: float | None) -> Lifetime | None:
    """Return the lifetime of a tier's blocks; None where they have none. Pure."""
    return None if ttl_s is None else Lifetime(ttl_s)
