"""The state of a tier's backend: whether it answers, and how long it is left alone.

A backend that does not answer is left alone for a while, because each call to it fails only after a time-out. An
outage is logged once when it begins and once when it ends. Lookups that got no answer are counted for the manager's
circuit breaker.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvtier.errors import TierError

logger = logging.getLogger(__name__)

MAX_REASONS = 64
SAID_S = 600.0
"""Reasons for failing blobs that are remembered, and seconds until the log repeats one. Shorter fills the log where a
server refuses every value; longer hides that it still does."""


class OutageLog:
    """One line in the log for an outage that every block meets, and one for its end.

    Mutable are the kinds of calls that fail now and whether there are any. ``_lock`` guards them.

    Args:
        where: the tier and its place, with which lines begin.

    Attributes:
        is_out: whether any kind fails now; readable without the lock, since a stale answer costs a line of log. Without
            an outage no caller reports a success.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        self.is_out = False

    def on_failure(self, kind: str, text: str) -> None:
        """Log ``text`` unless another call has failed since everything worked; ``kind`` has to succeed first."""
        with self._lock:
            is_first = not self._failing
            self._failing.add(kind)
            self.is_out = True
        if is_first:
            logger.warning(
                "%s: %s (said once until that has ended; what fails meanwhile are misses)",
                self._where,
                text,
            )

    def on_success(self, kind: str) -> None:
        """Record that calls of ``kind`` work; log it when that ends an outage."""
        with self._lock:
            was_failing = kind in self._failing
            self._failing.discard(kind)
            self.is_out = bool(self._failing)
            has_ended = was_failing and not self._failing
        if has_ended:
            logger.warning("%s works again", self._where)


class FailureLog:
    """One line for each reason for which blobs fail, repeated after ten minutes at the earliest.

    Mutable are the reasons, each with the time of its line. ``_lock`` guards them.

    Args:
        tier: type of the tier.
        clock: seconds, monotonic.
    """

    def __init__(self, tier: str, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._clock = clock
        self._lock = threading.Lock()
        self._said_s: OrderedDict[str, float] = OrderedDict()

    def on_failure(self, verb: str, name: str, num_bytes: int, words: str) -> None:
        """Log that a blob was not stored or loaded, with its size and the server's words, unless that was said."""
        reason, now_s = f"{verb} {words}", self._clock()
        with self._lock:
            said_s = self._said_s.get(reason)
            if said_s is not None and now_s - said_s < SAID_S:
                return
            self._said_s[reason] = now_s
            self._said_s.move_to_end(reason)
            if len(self._said_s) > MAX_REASONS:
                self._said_s.popitem(last=False)
        logger.warning(
            "tier %s: %s of %d bytes was not %s: %s (others that fail for this reason are counted only)",
            self._tier,
            name,
            num_bytes,
            verb,
            words,
        )


class BackendHealth:
    """Whether a backend answers, until when it is left alone, and how many lookups it did not answer.

    Mutable are the outage, the pause and the count. ``_lock`` guards the outage and the count; the pause is one tuple,
    each write of which is whole, and the last write counts.

    Args:
        tier: the tier's type, for errors.
        clock: seconds, monotonic.
        pause_s: how long a pause lasts; 0 never pauses. A longer one loses blocks after the backend came back; a
            shorter one makes a queue of jobs wait for several time-outs.
        name: what the log calls the backend; "" for the tier's type.

    Attributes:
        is_out: whether the last call failed; readable without the lock, since a stale answer costs a line of log.
        num_unanswered: lookups that got no answer since the last drain; readable likewise, since the next poll drains
            what this one misses.
    """

    def __init__(
        self, tier: str, clock: Callable[[], float], *, pause_s: float = 0.0, name: str = ""
    ) -> None:
        self._tier = tier
        self._clock = clock
        self._pause_s = pause_s
        self._name = name or tier
        self._lock = threading.Lock()
        self.num_unanswered = 0
        self._pause: tuple[float, str] | None = None
        self.is_out = False

    def on_failure(self, error: TierError, *, num_unanswered: int = 0) -> None:
        """Record a call that could not reach the backend; log the first one of an outage.

        Args:
            error: what to log.
            num_unanswered: lookups that the call was to answer.
        """
        with self._lock:
            self.num_unanswered += num_unanswered
            is_first, self.is_out = not self.is_out, True
        if is_first:
            logger.warning(
                "%s (until it answers its blocks are misses; it is tried again every few seconds)", error
            )

    def on_success(self) -> None:
        """Record an answer; log the first one after an outage."""
        if not self.is_out:
            return
        with self._lock:
            was_out, self.is_out = self.is_out, False
        if was_out:
            logger.warning("tier %s can be reached again", self._name)

    def drain_unanswered(self) -> int:
        """Return how many lookups got no answer since the last call."""
        with self._lock:
            num_unanswered, self.num_unanswered = self.num_unanswered, 0
        return num_unanswered

    def begin_pause(self, reason: str) -> None:
        """Leave the backend alone for ``pause_s`` from now on; ``reason`` is the error of calls until then."""
        self._pause = self._clock() + self._pause_s, reason

    @property
    def is_paused(self) -> bool:
        """Whether the backend is left alone now."""
        pause = self._pause
        return pause is not None and self._clock() < pause[0]

    def require_no_pause(self) -> None:
        """Return at once unless the backend is left alone now.

        Raises:
            TierError: it is; the message has the reason.
        """
        pause = self._pause
        if pause is not None and self._clock() < pause[0]:
            raise TierError(self._tier, pause[1])
