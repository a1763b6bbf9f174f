"""Where the bytes of a transfer are in the primary tier."""

from collections import deque
from collections.abc import Sequence

from kvtier.base import BlockIDsLoadStoreSpec, OffloadingEvent, OffloadKey


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier, in the order of the keys they belong to."""

    @staticmethod
    def medium() -> str:
        return "CPU"


MAX_PENDING_KEYS = 262_144
"""Keys in events that nobody has taken, about 20 MB. Fewer lose events of a reader that takes them once a
minute at two thousand stores and evictions a second; more only cost memory."""


class EventLog:
    """Events since they were last taken, oldest first.

    Args:
        medium: what the events say of where the blocks are.
        is_enabled: False records nothing.
        max_pending_keys: keys in waiting events; the newest event is kept whatever its size.

    Attributes:
        num_dropped: events that were dropped because nobody took them.
    """

    def __init__(
        self, medium: str, *, is_enabled: bool = True, max_pending_keys: int = MAX_PENDING_KEYS
    ) -> None:
        self._medium = medium
        self._is_enabled = is_enabled
        self._max_pending_keys = max_pending_keys
        self._events: deque[OffloadingEvent] = deque()
        self._num_keys = 0
        self.num_dropped = 0

    def record(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        """Append one event about ``keys``; none of them is no event."""
        if not keys or not self._is_enabled:
            return
        self._events.append(OffloadingEvent(list(keys), self._medium, removed))
        self._num_keys += len(keys)
        while self._num_keys > self._max_pending_keys and len(self._events) > 1:
            self._num_keys -= len(self._events.popleft().keys)
            self.num_dropped += 1

    def take(self) -> list[OffloadingEvent]:
        """Return the waiting events and forget them."""
        taken = list(self._events)
        self._events.clear()
        self._num_keys = 0
        return taken
