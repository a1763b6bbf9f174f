"""Blocks that have left a tier, until somebody asks for them."""

from collections import OrderedDict
from collections.abc import Callable, Collection

from kvtier.base import OffloadKey

MAX_UNREPORTED_KEYS = 65_536
"""Keys that wait to be told, about 130 bytes each. More only cost memory when nobody asks; fewer lose some of those
that leave between two steps of an engine."""


class EvictionLog:
    """Keys to be told, the oldest of very many left out. Guarded by whoever has it.

    Args:
        is_wanted: whether anybody will ever ask; asked again each time, since settings come late.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted
        self._unreported: OrderedDict[OffloadKey, None] = OrderedDict()

    def add(self, key: OffloadKey) -> None:
        """Note a block that has just left."""
        if self._is_wanted():
            self._unreported[key] = None
            if len(self._unreported) > MAX_UNREPORTED_KEYS:
                self._unreported.popitem(last=False)

    def clear(self) -> None:
        """Forget what waits to be told."""
        self._unreported = OrderedDict()

    def take(
        self, being_stored: Collection[OffloadKey], is_held: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey]:
        """Return what has left and is not back.

        Args:
            being_stored: blocks whose store has not been reported yet. They wait for a later call: whoever hears of a
                store when it is reported must not hear of the eviction before it.
            is_held: whether a block is there.
        """
        if not self._unreported:
            return []
        told = [key for key in self._unreported if key not in being_stored and not is_held(key)]
        self._unreported = OrderedDict.fromkeys(key for key in self._unreported if key in being_stored)
        return told
