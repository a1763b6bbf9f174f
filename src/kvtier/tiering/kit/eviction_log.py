"""Blocks that a tier has evicted and not reported yet.

Guarantees that a block's stored event precedes its removed event: a block whose store has not been reported waits. A
tier makes one only when ``emit_events`` is on.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

from kvtier.base import OffloadKey

MAX_UNREPORTED_KEYS = 65_536
"""Keys that wait for a report, about 130 bytes each. More only cost memory when no report is made. With fewer,
evictions between two steps are forgotten, and then all blocks of the tier are withdrawn from routers."""


class EvictionLog:
    """Evicted keys in their order, up to a limit; its owner's lock guards it."""

    def __init__(self) -> None:
        self._unreported: OrderedDict[OffloadKey, None] = OrderedDict()
        self._has_forgotten = False

    def add(self, key: OffloadKey) -> None:
        """Record a block that has just been evicted."""
        self._unreported[key] = None
        if len(self._unreported) > MAX_UNREPORTED_KEYS:
            self._unreported.popitem(last=False)
            self._has_forgotten = True

    def clear(self) -> None:
        """Drop what has not been reported."""
        self._unreported.clear()
        self._has_forgotten = False

    def take(
        self, being_stored: Collection[OffloadKey], is_held: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey] | None:
        """Return the blocks that were evicted and are not back, and drop them; None when there were too many.

        Args:
            being_stored: blocks whose store has not been reported yet; they stay for a later call.
            is_held: whether a block is in the tier now.
        """
        if self._has_forgotten:
            self.clear()
            return None
        if not self._unreported:
            return []
        taken = [key for key in self._unreported if key not in being_stored and not is_held(key)]
        self._unreported = OrderedDict.fromkeys(key for key in self._unreported if key in being_stored)
        return taken
