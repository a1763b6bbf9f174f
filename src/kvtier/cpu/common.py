"""What the primary tier shares with its neighbours: the place of a transfer, and the log of events."""

from collections.abc import Sequence

from kvtier.base import BlockIDsLoadStoreSpec, Locality, OffloadingEvent, OffloadKey


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the primary tier, in the order of the keys they belong to."""

    @staticmethod
    def medium() -> str:
        return "CPU"


class AuditLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots whose bytes device blocks are compared with: a transfer there writes nothing."""

    @staticmethod
    def medium() -> str:
        return "AUDIT"


MAX_UNTAKEN_KEYS = 262_144
"""Keys in events that were not taken yet, about 20 MB, before they are merged. Fewer merge more often for a reader that
takes them once a minute at two thousand stores and evictions a second; more only cost memory."""


class EventLog:
    """Events since they were last taken, oldest first; none is ever lost.

    When too many wait they are merged into what they amount to. A block that came and went meanwhile is left out, since
    no reader knows it, so the merged log names at most the blocks held at the last taking and those held now.
    vLLM's event that says "all blocks cleared" would be shorter, but it also clears what the device holds.

    Args:
        medium: what the events say of where the blocks are.
        max_untaken_keys: keys in events that were not taken yet, before they are merged.
        tier: which secondary tier; None for host memory.
        locality: where the medium is; None when that is not known.
        is_on: whether anything is recorded.

    Attributes:
        events: those that were not taken yet, oldest first.
        num_merges: how often events were merged because they were not taken in time.
    """

    def __init__(
        self,
        medium: str,
        *,
        max_untaken_keys: int = MAX_UNTAKEN_KEYS,
        tier: str | None = None,
        locality: Locality | None = Locality.LOCAL,
        is_on: bool = True,
    ) -> None:
        self.is_on = is_on
        self._medium = medium
        self._tier = tier
        self._locality = locality
        self._max_untaken_keys = self._limit = max_untaken_keys
        self.events: list[OffloadingEvent] = []
        self._num_keys = 0
        self.num_merges = 0

    def record(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        """Append one event about ``keys``; none of them is no event."""
        if not keys or not self.is_on:
            return
        self._append(list(keys), removed=removed)
        if self._num_keys > self._limit and len(self.events) > 1:
            self._merge()

    def take(self) -> list[OffloadingEvent]:
        """Return the waiting events and forget them."""
        taken, self.events = self.events, []
        self._num_keys = 0
        self._limit = self._max_untaken_keys
        return taken

    def _append(self, keys: list[OffloadKey], *, removed: bool) -> None:
        self.events.append(OffloadingEvent(keys, self._medium, removed, self._tier, self._locality))
        self._num_keys += len(keys)

    def _merge(self) -> None:
        """Replace the events by at most two: what was held before and is gone, and what is held now."""
        first: dict[OffloadKey, bool] = {}
        last: dict[OffloadKey, bool] = {}
        for event in self.events:
            for key in event.keys:
                first.setdefault(key, event.removed)
                last[key] = event.removed
        self.events, self._num_keys = [], 0
        for removed in (True, False):
            keys = [key for key in last if last[key] is removed and (first[key] or not removed)]
            if keys:
                self._append(keys, removed=removed)
        self.num_merges += 1
        # What is merged cannot become less: the next merge comes when as much again has been recorded.
        self._limit = max(self._max_untaken_keys, 2 * self._num_keys)
