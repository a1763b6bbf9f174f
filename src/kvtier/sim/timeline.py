"""Simulated time: a clock that advances from one event to the next.

Events of one instant run in the order in which they were scheduled, so a simulation gives the same result each time.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from kvtier.errors import InvariantError


class Timeline:
    """The time now and the scheduled events. Call it to read the time, like any clock of kvtier's."""

    def __init__(self) -> None:
        self._now_s = 0.0
        # By time, then by order of scheduling. A number without an action was cancelled: removing it costs a pass.
        self._times: list[tuple[float, int]] = []
        self._actions: dict[int, Callable[[], object]] = {}
        self._numbers = count()

    def __call__(self) -> float:
        """Return the time now, in seconds from the start."""
        return self._now_s

    def at(self, when_s: float, action: Callable[[], object]) -> int:
        """Schedule ``action`` for ``when_s`` and return its number, for ``cancel``.

        Raises:
            InvariantError: ``when_s`` is in the past.
        """
        if when_s < self._now_s:
            raise InvariantError(
                f"an event is scheduled for {when_s} s at {self._now_s} s: time cannot run backwards"
            )
        number = next(self._numbers)
        self._actions[number] = action
        heappush(self._times, (when_s, number))
        return number

    def cancel(self, number: int) -> None:
        """Cancel an event; one that has run or was cancelled before is ignored."""
        self._actions.pop(number, None)

    @property
    def next_s(self) -> float | None:
        """Time of the next event, None without one."""
        while self._times and self._times[0][1] not in self._actions:
            heappop(self._times)
        return self._times[0][0] if self._times else None

    def advance_to(self, when_s: float) -> None:
        """Advance to ``when_s`` and run the events until then, each at its own time."""
        times, actions = self._times, self._actions
        while times and times[0][0] <= when_s:
            time_s, number = heappop(times)
            action = actions.pop(number, None)
            if action is not None:
                self._now_s = time_s
                action()
        self._now_s = max(self._now_s, when_s)
