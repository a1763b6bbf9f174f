"""Leaves a place alone for a moment after it did not answer, so that those who queue for it do not wait one by one.

It decides nothing about who may ask: a tier's breaker does that, from what it hears of failures.
"""

from collections.abc import Callable

from kvtier.errors import TierError


class Pause:
    """Until when a place is left alone, and why.

    Mutable is one pair of both; each write of it is whole, the last one counts.

    Args:
        tier: the tier's type, for the error.
        clock: seconds, monotonic.
        pause_s: how long it lasts. Longer loses blocks after the place came back; shorter makes a queue of jobs wait
            for several time-outs.
    """

    def __init__(self, tier: str, clock: Callable[[], float], pause_s: float) -> None:
        self._tier = tier
        self._clock = clock
        self._pause_s = pause_s
        self._until_s_and_why: tuple[float, str] | None = None

    def begin(self, why: str) -> None:
        """Leave the place alone from now on; ``why`` is what those who come meanwhile are told."""
        self._until_s_and_why = self._clock() + self._pause_s, why

    def require_over(self) -> None:
        """Do nothing once the pause is over.

        Raises:
            TierError: it is not, and why it was begun.
        """
        if self._until_s_and_why is None:
            return
        until_s, why = self._until_s_and_why
        if self._clock() < until_s:
            raise TierError(self._tier, why)
