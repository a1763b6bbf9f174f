"""A secondary tier as the manager may use it: behind its breaker, budget and back-off, and never raising.

It decides nothing about blocks. Every call to a tier goes through here, so that a tier which raises, hangs
or lies costs its own hits and nothing else.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import TypeVar, TypeVarTuple

from kvtier.base import JobId, OffloadingEvent, OffloadKey, ReqContext
from kvtier.cpu.common import EventLog
from kvtier.tiering.base import (
    EvictionReporter,
    JobMetadata,
    JobResult,
    ReachableTier,
    RequestAware,
    SecondaryTierManager,
)
from kvtier.tiering.breaker import MAX_WAITING_S, CircuitBreaker, InFlightBudget, LoadBackoff
from kvtier.tiering.load_times import LoadTimes

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STORE_BUDGET_DIVISOR = 8
"""A tier's stores in flight hold at most an eighth of the primary unless set otherwise, so that the slowest
tier cannot pin it; a larger share would let stores crowd out what requests load."""

MAX_ASKED_KEYS = 65_536
"""Keys remembered per tier whose lookup was answered None. A request that waits for one more is woken by its
deadline alone."""


class Submission(Enum):
    """What became of handing a job to a tier."""

    STARTED = "started"
    DECLINED = "declined"
    FAILED = "failed"


class GuardedTier:
    """One secondary tier and what protects the others from it.

    Args:
        tier: the tier.
        primary_bytes: size of the primary tier, from which the default budget follows.
        row_bytes: bytes of one row; a budget below that would never let anything through.
        clock: seconds, monotonic.

    Attributes:
        is_out_of_service: True once its get_finished has raised; it is not asked for anything any more.
        events: what the tier has gained and lost, as far as its jobs tell; off unless asked for.
        load_times: how fast it loads.
    """

    def __init__(
        self, tier: SecondaryTierManager, primary_bytes: int, row_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.tier = tier
        self.name = tier.get_tier_type()
        self.row_bytes = row_bytes
        limit_bytes = tier.settings.max_in_flight_store_bytes or primary_bytes // STORE_BUDGET_DIVISOR
        self.budget = InFlightBudget(max(limit_bytes, row_bytes))
        self.breaker = CircuitBreaker(clock, probe_timeout_s=tier.settings.job_timeout_s)
        self.backoff = LoadBackoff(clock)
        self.is_out_of_service = False
        self.events = EventLog(self.name, is_enabled=tier.settings.emit_events)
        self.num_declined_cascades = 0
        self.num_refused_by_admission = 0
        self.num_promoted_blocks = 0
        self.num_lookups_left_out = 0
        self.num_overdue_requests = 0
        self.num_probe_blocks = 0
        self.load_times = LoadTimes(clock)
        self.num_errors = 0
        self._clock = clock
        # INVARIANT: oldest first, so that the age of the oldest job is one look.
        self._began_s: dict[JobId, float] = {}
        self._asked: dict[OffloadKey, ReqContext] = {}
        self._has_logged_error = False
        # An isinstance of an abstract class is dear, and the answers never change.
        self._reachable = tier if isinstance(tier, ReachableTier) else None
        self._aware = tier if isinstance(tier, RequestAware) else None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Ask the tier; False without asking while it is left out or the key's last load failed."""
        if self.is_out_of_service or not self.breaker.allows(req_context) or self.backoff.is_paused(key):
            self.num_lookups_left_out += 1
            return False
        answer = self._ask(key, req_context)
        if answer is None:
            # A question is a probe too: otherwise everybody who asks waits for a place that still hangs.
            self.breaker.begin(req_context)
            if len(self._asked) < MAX_ASKED_KEYS:
                self._asked[key] = req_context
        return answer

    def submit(self, job: JobMetadata) -> Submission:
        """Hand a job to the tier, unless it is left out by now."""
        if self.is_out_of_service or not self.breaker.begin(job.req_context):
            return Submission.DECLINED
        submit = self.tier.submit_load if job.is_promotion else self.tier.submit_store
        num_errors = self.num_errors
        self._call("submit", submit, job, fallback=None)
        if self.num_errors > num_errors:
            self.breaker.record_failure(job.req_context)
            return Submission.FAILED
        self._began_s[job.job_id] = self._clock()
        return Submission.STARTED

    def get_finished(self) -> list[JobResult]:
        """Return the tier's reports; a raise puts it out of service. Trips the breaker on a stale queue."""
        if self.is_out_of_service:
            return []
        results = self._call("get_finished", take_results, self.tier, fallback=None)
        self.is_out_of_service = results is None
        for result in results or ():
            self._began_s.pop(result.job_id, None)
        if self._reachable is not None:
            for _ in range(self._call("drain_unanswered", self._reachable.drain_unanswered, fallback=0)):
                self.breaker.record_silence()
        if self._began_s and self._is_stale():
            self.breaker.trip()
        return results or []

    def record_overdue(self, keys: Collection[OffloadKey], *, is_loading: bool) -> None:
        """Count a request that passed its deadline waiting for this tier: for a load, or for an answer.

        Without it a tier that hangs would cost every request its whole deadline.
        """
        if is_loading or any(key in self._asked for key in keys):
            self.num_overdue_requests += 1
            self.breaker.record_silence()

    def drain_answered(self, is_awaited: Callable[[OffloadKey], bool]) -> Collection[OffloadKey]:
        """Return the keys whose pending lookup has an answer now.

        A tier that does not keep track is asked once more for each key, which is cheaper than waking every
        request that waits for one of them.

        Args:
            is_awaited: whether anybody still waits for a key; such a tier is not asked for the others again.
        """
        if self.is_out_of_service:
            answered: Collection[OffloadKey] | None = list(self._asked)
        else:
            answered = self._call("drain_answered", drain_answered_keys, self.tier, fallback=None)
        if not answered and not self._asked:
            return ()
        if answered is None:
            self._asked = {key: context for key, context in self._asked.items() if is_awaited(key)}
            still_asked = self._asked.items()
            answered = [key for key, context in still_asked if self._ask(key, context) is not None]
        asked = self._asked
        for owner in {asked.pop(key, None) for key in answered}:  # a request has asked for many keys
            self.breaker.end_question(owner)
        return answered

    def take_events(self) -> list[OffloadingEvent]:
        """Return what the tier has gained and lost since the last call; nothing unless its settings ask for it."""
        if self.tier.settings.emit_events and isinstance(self.tier, EvictionReporter):
            reporter = self.tier
            none: list[OffloadKey] = []
            evicted = self._call("drain_evicted", lambda: list(reporter.drain_evicted()), fallback=none)
            self.events.record(evicted, removed=True)
        return self.events.take()

    def end_step(self) -> None:
        """Let the tier start what this step's lookups asked for."""
        if not self.is_out_of_service:
            self._call("end_step", self.tier.end_step, fallback=None)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Tell the tier what is in use."""
        if not self.is_out_of_service:
            self._call("touch", self.tier.touch, keys, req_context, fallback=None)

    def request_finished(self, req_context: ReqContext) -> None:
        """Tell the tier that a request is gone."""
        if not self.is_out_of_service:
            self._call("request_finished", self.tier.request_finished, req_context, fallback=None)

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Tell a tier that wants to know of a request that has arrived."""
        tier = self._aware
        if tier is not None and not self.is_out_of_service:
            self._call("note_request", tier.note_request, chains, req_context, fallback=None)

    def reset(self, epoch: bytes) -> None:
        """Move the tier to another epoch; one that cannot is out of service, or it would serve old bytes."""
        self.backoff.clear()
        self._asked.clear()
        num_errors = self.num_errors
        self._call("reset", self.tier.reset, epoch, fallback=None)
        self.is_out_of_service |= self.num_errors > num_errors

    def drain(self, timeout_s: float) -> bool:
        """Wait for the tier's jobs; one that is out of service has nothing to wait for."""
        return self.is_out_of_service or self._call("drain", self.tier.drain, timeout_s, fallback=False)

    def shutdown(self, timeout_s: float) -> bool:
        """End the tier; False when one of its threads may still touch the primary's rows."""
        return self._call("shutdown", lambda: bool(self.tier.shutdown(timeout_s)), fallback=False)

    def stats(self) -> dict[str, float]:
        """Return the tier's own numbers and those of its guard."""
        none: dict[str, float] = {}
        own = self._call(
            "stats", lambda: {name: float(v) for name, v in self.tier.stats().items()}, fallback=none
        )
        rate = self.load_times.rate
        return own | {
            "declined_cascades": float(self.num_declined_cascades),
            "refused_by_admission": float(self.num_refused_by_admission),
            "promoted_blocks": float(self.num_promoted_blocks),
            "lookups_left_out": float(self.num_lookups_left_out),
            "overdue_requests": float(self.num_overdue_requests),
            "probe_blocks": float(self.num_probe_blocks),
            "load_bytes_per_s": rate.bytes_per_s if rate is not None else 0.0,
            "load_latency_s": rate.latency_s if rate is not None else 0.0,
            "errors": float(self.num_errors),
            "breaker_openings": float(self.breaker.num_openings),
            "in_flight_store_bytes": float(self.budget.used_bytes),
            "out_of_service": float(self.is_out_of_service),
        }

    def _ask(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        try:
            answer = self.tier.lookup(key, req_context)
            return answer if answer is None else bool(answer)
        except Exception as error:  # noqa: BLE001 - a foreign tier may raise anything; it costs its own hits
            self._note_error("lookup", error)
            self.breaker.record_failure(req_context)
            return False

    def _is_stale(self) -> bool:
        """Return whether, of some job, work waits for too long or outlives even the tier's own time-out."""
        oldest_s = next(iter(self._began_s.values()))
        age_s = self._clock() - oldest_s
        if age_s > self.tier.settings.job_timeout_s:
            return True
        # Nothing waits for longer than the oldest job is old, and a tier walks its queue to answer.
        if age_s <= MAX_WAITING_S:
            return False
        return self._call("waiting_s", lambda: float(self.tier.waiting_s()), fallback=0.0) > MAX_WAITING_S

    def _call(self, name: str, call: Callable[[*Ts], T], *args: *Ts, fallback: T) -> T:
        """Return what the tier answers, or ``fallback`` when it raises, whatever it raises."""
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - a foreign tier may raise anything; it costs its own hits
            self._note_error(name, error)
            return fallback

    def _note_error(self, name: str, error: Exception) -> None:
        """Count what a call has raised; the first is logged with its traceback, more would fill the log."""
        self.num_errors += 1
        if not self._has_logged_error:
            message = "tier %r failed in %s; further errors are only counted"
            logger.error(message, self.name, name, exc_info=error)
            self._has_logged_error = True

    def __repr__(self) -> str:
        state = "out of service" if self.is_out_of_service else self.breaker.state.value
        return f"GuardedTier({self.name}: {state}, {self.budget.used_bytes} B of stores in flight)"


def drain_answered_keys(tier: SecondaryTierManager) -> list[OffloadKey] | None:
    """Return what a tier says of its answers, as a list.

    Raises:
        TypeError: it is no collection.
    """
    answered = tier.drain_answered()
    return None if answered is None else list(answered)


def take_results(tier: SecondaryTierManager) -> list[JobResult]:
    """Return a tier's reports; raises as ``as_result``, or TypeError when it gives nothing to go through."""
    return [as_result(result) for result in tier.get_finished()]


def as_result(result: JobResult) -> JobResult:
    """Return a tier's report with the types that it should have. Pure.

    What a report says of single keys counts for more than what it says of the whole: in doubt, a miss.

    Raises:
        TypeError, ValueError, AttributeError: it is no report at all.
    """
    keys = None if result.successful_keys is None else frozenset(result.successful_keys)
    told_s = getattr(result, "took_s", None)  # a tier written before it could be told gives none
    took_s = None if told_s is None else max(0.0, float(told_s))
    is_success = result.success is True and keys is None
    return JobResult(JobId(int(result.job_id)), is_success, keys, bool(result.is_fault), took_s)
