"""Limits of what a failing or overloaded tier can cost: a circuit breaker, and a back-off for each key.

The breaker is closed (all work may start), open (none may, for a pause) or half-open (one owner's work may, the
trial). Failures in a row open it, the trial's success closes it, the trial's failure opens it again.

Source: the breaker is the pattern of M. Nygard, "Release It!", 2007, chapter 5.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvtier.base import OffloadKey
from kvtier.tiering.base import FAILURES_TO_OPEN

OPEN_S = 5.0
"""Seconds a tier is left out before one trial. Shorter tries a dead server more often; longer misses its
hits after it came back."""

TRIAL_TIMEOUT_S = 30.0
"""Seconds after which a trial without an outcome makes room for the next: as long as a job may take by default.
Without it a lost trial would leave a tier out for ever."""

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


class Submission(Enum):
    """Result of submitting a job to a tier."""

    STARTED = "started"
    DECLINED = "declined"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A call to a tier that raised.

    Attributes:
        call: the method.
        error: what it raised.
    """

    call: str
    error: Exception


class CircuitBreaker:
    """Opens after consecutive failures, lets one trial through after a pause, closes when it succeeds.

    Work is identified by its owner, any object: while the breaker is not closed only the trial's outcome counts,
    so that late reports of older work neither close it nor let a second trial through.

    Args:
        clock: seconds, monotonic.
        failures_to_open: consecutive failures that open it.
        open_s: pause before the trial.
        trial_timeout_s: seconds after which a trial without an outcome counts as failed.

    Attributes:
        is_closed: whether all work may start; callers read it before they call ``allows`` or ``begin``.
        has_failures: whether something has failed since the last success that counted; a success changes nothing
            without, and callers read it before they record one.
        num_openings: how often it has opened.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        failures_to_open: int = FAILURES_TO_OPEN,
        open_s: float = OPEN_S,
        trial_timeout_s: float = TRIAL_TIMEOUT_S,
    ) -> None:
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._trial_timeout_s = trial_timeout_s
        self._num_failures = 0
        self.has_failures = False
        self.is_closed = True
        self._opened_s = 0.0
        self._trial_owner: object | None = None
        self._trial_began_s = 0.0
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
        is_lapsed = self._clock() - self._trial_began_s >= self._trial_timeout_s
        return self._trial_owner is None or self._trial_owner is owner or is_lapsed

    def begin(self, owner: object) -> bool:
        """Try to start work; when half-open, the first owner's work becomes the trial."""
        if not self.allows(owner):
            return False
        if not self.is_closed and self._trial_owner is not owner:
            self._trial_owner = owner
            self._trial_began_s = self._clock()
        return True

    def record_success(self, owner: object) -> None:
        """Record that work has succeeded; the trial's success closes the breaker."""
        if self.is_closed or self._trial_owner is owner:
            self._num_failures = 0
            self.has_failures = False
            self.is_closed = True
            self._trial_owner = None

    def record_failure(self, owner: object) -> None:
        """Record that work has failed; enough failures in a row, or the trial's, open the breaker."""
        self.has_failures = True
        if self.is_closed:
            self._num_failures += 1
            if self._num_failures >= self._failures_to_open:
                self.trip()
        elif self._trial_owner is not None and self._trial_owner is owner:
            self.trip()

    def record_no_response(self) -> None:
        """Record that some work got no answer; while half-open it counts as the trial's failure."""
        if self.state is not BreakerState.OPEN:
            self.record_failure(self._trial_owner)

    def end_lookup(self, owner: object) -> None:
        """Record that a lookup was answered: if it was the trial, another trial may follow at once."""
        if self._trial_owner is owner:
            self._trial_owner = None

    def trip(self) -> None:
        """Open now, or stay open for another pause."""
        if self.state is not BreakerState.OPEN:
            self.num_openings += 1
        self.is_closed, self.has_failures = False, True
        self._opened_s = self._clock()
        self._trial_owner = None

    def __repr__(self) -> str:
        return f"CircuitBreaker({self.state.value}, failures={self._num_failures})"


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
