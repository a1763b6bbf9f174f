"""Says once that a place cannot be reached, and once that it can be again.

It delays and refuses nothing; the manager's circuit breaker does. It keeps the log readable: a server that is away
fails hundreds of calls a second, for one reason.
"""

import logging
import threading

from kvtier.errors import TierError

logger = logging.getLogger(__name__)


class OutageLog:
    """What the threads of a tier have lately met.

    Mutable are the flag and the count of questions. ``_lock`` guards them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_out = False
        self._num_unanswered = 0

    def note_failure(self, error: TierError, *, num_unanswered: int = 0) -> None:
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

    def note_success(self, tier: str) -> None:
        """The place has answered; the first answer after an outage is logged."""
        if not self._is_out:  # read without the lock: a stale answer costs one line of log at most
            return
        with self._lock:
            is_news, self._is_out = self._is_out, False
        if is_news:
            logger.warning("tier %s can be reached again", tier)

    def take_unanswered(self) -> int:
        """Return how many questions have failed since the last time."""
        with self._lock:
            num_unanswered, self._num_unanswered = self._num_unanswered, 0
        return num_unanswered
