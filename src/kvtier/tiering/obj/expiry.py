"""When objects are over: by the time at which the store says that they were written last, which no read changes."""

from collections.abc import Callable
from datetime import datetime

from kvtier.tiering.kit.lifetime import Lifetime

MIN_PASS_S = 60.0
MAX_PASS_S = 3600.0
"""Bounds of the pause between two passes that delete what is over, an eighth of the time to live within them. A pass
lists every object, which costs requests; lookups and loads need none."""

PASSES_PER_LIFETIME = 8


class ObjectExpiry:
    """Whether objects are over. Immutable, so any thread may use it.

    Args:
        lifetime: how long blocks live.
        wall_clock: seconds since 1970; the store's own clock may differ by some minutes.

    Attributes:
        pass_s: seconds between two passes.
    """

    def __init__(self, lifetime: Lifetime, wall_clock: Callable[[], float]) -> None:
        self._lifetime = lifetime
        self._wall_clock = wall_clock
        self.pass_s = min(MAX_PASS_S, max(MIN_PASS_S, lifetime.ttl_s / PASSES_PER_LIFETIME))

    def is_over(self, modified: datetime) -> bool:
        """Return whether an object that was written then is over."""
        return self._lifetime.is_over(modified.timestamp(), self._wall_clock())
