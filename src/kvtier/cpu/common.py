"""What the primary tier shares with its neighbours: the place of a transfer, and the log of events."""

from collections import deque
from collections.abc import Sequence

from kvtier.base import BlockIDsLoadStoreSpec, OffloadingEvent, OffloadKey


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier, in the order of the keys they belong to."""

    @staticmethod
    def medium() -> str:
        return "CPU"


MAX_UNTAKEN_KEYS = 262_144
"""Keys in events that were not taken yet, about 20 MB. Fewer lose events of a reader that takes them once a
minute at two thousand stores and evictions a second; more only cost memory."""


class EventLog:
    """Events since they were last taken, oldest first.

    Args:
        medium: what the events say of where the blocks are.
        max_untaken_keys: keys in events that were not taken yet; the newest event is kept whatever its size.

    Attributes:
        num_dropped: events that were dropped because they were not taken in time.
    """

    def __init__(self, medium: str, *, max_untaken_keys: int = MAX_UNTAKEN_KEYS) -> None:
        self._medium = medium
        self._max_untaken_keys = max_untaken_keys
        self._events: deque[OffloadingEvent] = deque()
        self._num_keys = 0
        self.num_dropped = 0

    def record(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        """Append one event about ``keys``; none of them is no event."""
        if not keys:
            return
        self._events.append(OffloadingEvent(list(keys), self._medium, removed))
        self._num_keys += len(keys)
        while self._num_keys > self._max_untaken_keys and len(self._events) > 1:
            self._num_keys -= len(self._events.popleft().keys)
            self.num_dropped += 1

    def take(self) -> list[OffloadingEvent]:
        """Return the waiting events and forget them."""
        taken = list(self._events)
        self._events.clear()
        self._num_keys = 0
        return taken
