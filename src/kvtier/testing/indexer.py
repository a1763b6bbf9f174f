"""A model of a router's index: what one engine can load, made from its events alone.

Tests compare it with what the engine really holds. It believes every event at once and asks for nothing.
"""

from collections.abc import Iterable

from kvtier.base import OffloadingEvent, OffloadKey


class BlockIndexer:
    """What a router believes that one engine can load.

    Attributes:
        num_repeated: announcements of blocks that were announced already.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, str | None], set[OffloadKey]] = {}
        self.num_repeated = 0

    def apply(self, events: Iterable[OffloadingEvent]) -> None:
        """Believe ``events``, in their order."""
        for event in events:
            held = self._held.setdefault((event.medium, event.tier), set())
            if event.removed:
                held.difference_update(event.keys)
            else:
                self.num_repeated += len(held.intersection(event.keys))
                held.update(event.keys)

    def held_in(self, medium: str, tier: str | None = None) -> frozenset[OffloadKey]:
        """Return the blocks that a medium is believed to hold."""
        return frozenset(self._held.get((medium, tier), ()))

    def forget(self) -> None:
        """Forget the engine: it has died without a word, and its successor begins with nothing."""
        self._held.clear()

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))
