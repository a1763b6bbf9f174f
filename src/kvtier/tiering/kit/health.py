"""What a tier's threads count, and how a backend that is unreachable is left alone and reported."""

import logging
import threading
from collections import Counter
from collections.abc import Callable

from kvtier.errors import TierError


class Counters:
    """Named counts that any thread may raise.

    Mutable are the counts. ``_lock`` guards them.
    """

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def add(self, **amounts: int) -> None:
        """Raise each named count."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def snapshot(self) -> dict[str, float]:
        """Return the counts by name."""
        with self._lock:
            return dict(self._counts)


logger = logging.getLogger(__name__)


class OutageLog:
    """What the threads of a tier have lately met.

    Mutable are the flag and the count of questions. ``_lock`` guards them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_out = False
        self._num_unanswered = 0

    def on_failure(self, error: TierError, *, num_unanswered: int = 0) -> None:
        """Note a call that could not reach the place; the first of an outage is logged.

        Args:
            error: what to log.
            num_unanswered: questions that it was to answer.
        """
        with self._lock:
            self._num_unanswered += num_unanswered
            is_news, self._is_out = not self._is_out, True
        if is_news:
            logger.warning(
                "%s (until it answers its blocks are misses; it is tried again every few seconds)", error
            )

    def on_success(self, tier: str) -> None:
        """The place has answered; the first answer after an outage is logged."""
        if not self._is_out:  # read without the lock: a stale answer costs one line of log at most
            return
        with self._lock:
            is_news, self._is_out = self._is_out, False
        if is_news:
            logger.warning("tier %s can be reached again", tier)

    def drain_unanswered(self) -> int:
        """Return how many questions have failed since the last time."""
        with self._lock:
            num_unanswered, self._num_unanswered = self._num_unanswered, 0
        return num_unanswered


class QuietPeriod:
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
