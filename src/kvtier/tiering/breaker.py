"""Limits of what a failing or overloaded tier can cost: a circuit breaker, a byte budget, a back-off per key.

The breaker is closed (all work may start), open (none may, for a pause) or half-open (one owner's work may, the
probe). Failures in a row open it, the probe's success closes it, the probe's failure opens it again.

Source: the breaker is the pattern of M. Nygard, "Release It!", 2007, chapter 5.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.tiering.base import FAILURES_TO_OPEN

OPEN_S = 5.0
"""Seconds a tier is left out before one probe. Shorter probes a dead server more often; longer misses its
hits after it came back."""

PROBE_TIMEOUT_S = 30.0
"""Seconds after which a probe without an outcome makes room for the next: as long as a job may take by default.
Without it a lost probe would leave a tier out for ever."""

MAX_WAITING_S = 10.0
"""Seconds that the oldest job may wait unattended before the tier counts as overloaded. A disk behind by more
than this no longer beats computing; much less would open on one large batch."""

BACKOFF_S = 1.0
"""Seconds a key is left alone after its first failed load; doubles with each further failure."""

MAX_BACKOFF_S = 60.0
"""Upper end of the doubling: a block that came back is found again after a minute at the latest."""

MAX_BACKOFF_KEYS = 4096
"""Keys remembered per tier; the oldest is forgotten first and is then tried once more."""


class BreakerState(Enum):
    """What a circuit breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after consecutive failures, lets one probe through after a pause, closes when it succeeds.

    Work is identified by its owner, any object: while the breaker is not closed only the probe's outcome counts,
    so that late reports of older work neither close it nor let a second probe through.

    Args:
        clock: seconds, monotonic.
        failures_to_open: consecutive failures that open it.
        open_s: pause before the probe.
        probe_timeout_s: seconds after which a probe without an outcome counts as failed.

    Attributes:
        is_closed: whether all work may start; callers read it before they call ``allows`` or ``begin``.
        num_openings: how often it has opened.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        failures_to_open: int = FAILURES_TO_OPEN,
        open_s: float = OPEN_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._probe_timeout_s = probe_timeout_s
        self._num_failures = 0
        self.is_closed = True
        self._opened_s = 0.0
        self._probe: object | None = None
        self._probe_began_s = 0.0
        self.num_openings = 0

    @property
    def state(self) -> BreakerState:
        """What it lets through now."""
        if self.is_closed:
            return BreakerState.CLOSED
        is_paused = self._clock() - self._opened_s < self._open_s
        return BreakerState.OPEN if is_paused else BreakerState.HALF_OPEN

    def allows(self, owner: object) -> bool:
        """Return whether work of ``owner`` may start; changes nothing."""
        if self.is_closed:
            return True
        if self.state is BreakerState.OPEN:
            return False
        is_lapsed = self._clock() - self._probe_began_s >= self._probe_timeout_s
        return self._probe is None or self._probe is owner or is_lapsed

    def begin(self, owner: object) -> bool:
        """Try to start work; when half-open, the first owner's work becomes the probe."""
        if not self.allows(owner):
            return False
        if not self.is_closed and self._probe is not owner:
            self._probe = owner
            self._probe_began_s = self._clock()
        return True

    def record_success(self, owner: object) -> None:
        """Record that work has succeeded; the probe's success closes the breaker."""
        if self.is_closed or self._probe is owner:
            self._num_failures = 0
            self.is_closed = True
            self._probe = None

    def record_failure(self, owner: object) -> None:
        """Record that work has failed; enough failures in a row, or the probe's, open the breaker."""
        if self.is_closed:
            self._num_failures += 1
            if self._num_failures >= self._failures_to_open:
                self.trip()
        elif self._probe is not None and self._probe is owner:
            self.trip()

    def record_silence(self) -> None:
        """Record that some work got no answer; while half-open it counts as the probe's failure."""
        if self.state is not BreakerState.OPEN:
            self.record_failure(self._probe)

    def end_lookup(self, owner: object) -> None:
        """Record that a lookup was answered: if it was the probe, another probe may follow at once."""
        if self._probe is owner:
            self._probe = None

    def trip(self) -> None:
        """Open now, or stay open for another pause."""
        if self.state is not BreakerState.OPEN:
            self.num_openings += 1
        self.is_closed = False
        self._opened_s = self._clock()
        self._probe = None

    def __repr__(self) -> str:
        return f"CircuitBreaker({self.state.value}, failures={self._num_failures})"


class InFlightBudget:
    """Bytes of primary slots that a tier's unfinished stores may hold.

    Args:
        limit_bytes: the most that may be in flight at once.

    Attributes:
        used_bytes: bytes in flight; the owner of the jobs adds and subtracts.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def room_for(self, size_bytes: int) -> int:
        """Return how many pieces of ``size_bytes`` still fit. Pure."""
        return max(0, self.limit_bytes - self.used_bytes) // size_bytes


class Pause(NamedTuple):
    """How long a key is left alone.

    Attributes:
        until_s: the clock's reading at its end.
        length_s: its length, from which the next follows.
    """

    until_s: float
    length_s: float


class LoadBackoff:
    """Keys whose load failed, each left alone for a pause that doubles with every failure.

    Without it a block that a tier claims to have and cannot deliver would be loaded again in every step.

    Args:
        clock: seconds, monotonic.

    Attributes:
        pauses: the pause of each such key, whether it has passed or not; mostly empty.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.pauses: OrderedDict[OffloadKey, Pause] = OrderedDict()

    def record_failure(self, key: OffloadKey) -> None:
        """Leave ``key`` alone for twice as long as last time."""
        last = self.pauses.pop(key, None)
        length_s = BACKOFF_S if last is None else min(2 * last.length_s, MAX_BACKOFF_S)
        self.pauses[key] = Pause(self._clock() + length_s, length_s)
        if len(self.pauses) > MAX_BACKOFF_KEYS:
            self.pauses.popitem(last=False)

    def record_successes(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the failures of each of ``keys``."""
        if self.pauses:
            for key in keys:
                self.pauses.pop(key, None)

    def is_paused(self, key: OffloadKey) -> bool:
        """Return whether ``key`` is still to be left alone."""
        pause = self.pauses.get(key)
        return pause is not None and self._clock() < pause.until_s

    def clear(self) -> None:
        """Forget every failure."""
        self.pauses.clear()

    def __len__(self) -> int:
        return len(self.pauses)
