"""Simulated time: a clock that moves from one event to the next.

It sleeps never and knows nothing of what happens. Events of one instant run in the order in which they were planned, so
that a simulation gives the same result each time.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from kvtier.errors import InvariantError


class Timeline:
    """The time now, and what is planned for later. Call it to read it, as any clock of kvtier's."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._planned: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def __call__(self) -> float:
        """Return the time now, in seconds from the start."""
        return self._now_s

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        """Plan ``action`` for ``when_s``.

        Raises:
            InvariantError: that is in the past.
        """
        if when_s < self._now_s:
            raise InvariantError(f"an event is planned for {when_s} s at {self._now_s} s: time runs forward")
        heappush(self._planned, (when_s, next(self._numbers), action))

    @property
    def next_s(self) -> float | None:
        """When the next event is planned, None when nothing is."""
        return self._planned[0][0] if self._planned else None

    def advance_to(self, when_s: float) -> None:
        """Move to ``when_s`` and run what is planned until then, each event at its own time."""
        planned = self._planned
        while planned and planned[0][0] <= when_s:
            self._now_s, _, action = heappop(planned)
            action()
        self._now_s = max(self._now_s, when_s)
