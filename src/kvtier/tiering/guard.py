"""A secondary tier as the manager may use it: behind its breaker, budget and back-off, and never raising.

Every call to a tier but ``check_reachable`` (``tiering/spec.py``) is made here, so that one that raises, hangs or
returns nonsense costs its own hits and nothing else. A call that raises becomes a value, a ``CallFailure``, and counts.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar, TypeVarTuple

from kvtier.base import JobId, OffloadingEvent, OffloadKey, ReqContext, overrides
from kvtier.config import ModelIdentity
from kvtier.cpu.common import EventLog
from kvtier.errors import format_foreign
from kvtier.histogram import LATENCY_BOUNDS_S, Histogram, HistogramSnapshot
from kvtier.misses import SUSPICIONS, Miss
from kvtier.tiering.announcements import Announcements
from kvtier.tiering.base import (
    CascadeMode,
    JobMetadata,
    JobResult,
    PurgeOutcome,
    SecondaryTierManager,
)
from kvtier.tiering.breaker import MAX_WAITING_S, CallFailure, CircuitBreaker, LoadBackoff, Submission
from kvtier.tiering.departures import TierDeparture, TierLosses, being_purged, down, make_departures
from kvtier.tiering.load_times import LoadTimes

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STORE_BUDGET_DIVISOR = 8
"""What a tier's stores in flight hold of the primary, unless set: a larger share would crowd out what requests load."""

MAX_OPEN_LOOKUPS = 65_536
"""Keys remembered per tier that were answered None. A request that waits for one more wakes at its deadline."""

MAX_ASKED_AGAIN, MAX_UNANSWERED = 1024, 32
"""Keys that are looked up again in a step in a tier without ``drain_answered``: in all, and without an answer. Each
takes a microsecond or more. Fewer let answers wait for later steps; more cost each step a millisecond meanwhile."""


class GuardedTier:
    """One secondary tier and what protects the others from it.

    Args:
        tier: the tier.
        primary_bytes: size of the primary tier, from which the default budget follows.
        row_bytes: bytes of one row; a budget below that would never let anything through.
        clock: seconds, monotonic.
        measures_loads: whether to measure how fast the tier loads.
        event_name: what events call the tier, unique within the engine; None: its type.

    Attributes:
        is_out_of_service: True once its get_finished or its reset has raised, or it has none; it gets no work any more.
        reports_jobs: whether its get_finished is called: not after a raise.
        is_purging: whether its blocks are being purged; no lookup or store of a block reaches it meanwhile.
        open_lookups: keys whose lookup was answered None and has no answer yet, each with the last request that looked.
        dropped: blocks whose bytes were wrong; they are not looked up any more.
        was_active: whether jobs or lookups of the tier were open before the last poll.
        is_learning: whether note_request has an effect.
        uses_touch, uses_end_step, uses_requests: whether touch, end_step and request_finished have one.
        departed: the blocks that it lost, refused or failed to deliver.
        losses: the blocks that it was to get and never will.
        announcements: which of its blocks routers know; None unless its settings ask for events.
        load_times: how fast it loads; None unless it is measured.
        max_in_flight_store_bytes: bytes of primary slots that its unfinished stores may hold.
        in_flight_store_bytes: what they hold; the owner of the jobs adds and subtracts.
    """

    def __init__(
        self,
        tier: SecondaryTierManager,
        primary_bytes: int,
        row_bytes: int,
        clock: Callable[[], float],
        *,
        measures_loads: bool = False,
        event_name: str | None = None,
    ) -> None:
        self.tier = tier
        self.name = tier.get_tier_type()
        self.row_bytes = row_bytes
        limit_bytes = tier.settings.max_in_flight_store_bytes or primary_bytes // STORE_BUDGET_DIVISOR
        self.max_in_flight_store_bytes = max(limit_bytes, row_bytes)
        self.in_flight_store_bytes = 0
        self.breaker = CircuitBreaker(clock, trial_timeout_s=tier.settings.job_timeout_s)
        self.backoff = LoadBackoff(clock)
        self.load_times = LoadTimes(clock) if measures_loads else None
        self.is_out_of_service = False
        self.reports_jobs = True
        self.is_purging = False
        self.open_lookups: OrderedDict[OffloadKey, ReqContext] = OrderedDict()
        self.dropped: set[OffloadKey] = set()
        self.was_active = True  # the first poll takes what the tier has counted since its start
        self.departed = make_departures(self.name, tier.capacity_blocks, clock)
        self.announcements: Announcements | None = None
        if tier.settings.emit_events:
            log = EventLog(self.name, tier=event_name or self.name, locality=tier.locality)
            self.announcements = Announcements(log)
        is_kept_for = tier.settings.cascade is CascadeMode.MUST_WRITE
        self.losses = TierLosses(self.name, self.departed, is_kept_for=is_kept_for)
        self.num_refused_by_admission = 0
        self.num_promoted_blocks = 0
        self.num_lookups_left_out = 0
        self.num_overdue_requests = 0
        self.num_probe_blocks = 0
        self.num_lookups = 0
        self.num_found = 0
        self.num_failed_promotion_jobs = 0
        self.num_failed_cascade_jobs = 0
        self.promotion_latency = Histogram(LATENCY_BOUNDS_S)
        self.num_errors = 0
        self._clock = clock
        self._has_logged_error = False
        self.is_learning = overrides(tier.note_request, SecondaryTierManager.note_request)
        self.uses_touch = overrides(tier.touch, SecondaryTierManager.touch)
        self.uses_end_step = overrides(tier.end_step, SecondaryTierManager.end_step)
        self.uses_requests = overrides(tier.request_finished, SecondaryTierManager.request_finished)
        self._reports_evictions = overrides(tier.drain_evicted, SecondaryTierManager.drain_evicted)
        self._can_drop = overrides(tier.drop, SecondaryTierManager.drop)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Look ``key`` up; False, without a call, while the tier is left out or the key's last load failed."""
        breaker, backoff = self.breaker, self.backoff
        if (
            self.is_out_of_service
            or self.is_purging
            or key in self.dropped
            or not (breaker.is_closed or breaker.allows(req_context))
            or (key in backoff.pauses and backoff.is_paused(key))
        ):
            self.num_lookups_left_out += 1
            return False
        try:
            answer = self.tier.lookup(key, req_context)
            if answer is not None:
                self.num_lookups += 1
                self.num_found += bool(answer)
                if not answer and self.announcements is not None:
                    self.announcements.on_missed(key)
                return bool(answer)
        except Exception as error:  # noqa: BLE001 - a foreign tier may raise anything; it costs its own hits
            self._count_failure(CallFailure("lookup", error))
            breaker.record_failure(req_context)
            return False
        if not breaker.is_closed:
            # A lookup is a trial too: otherwise every request would wait for a backend that still hangs.
            breaker.begin(req_context)
        if len(self.open_lookups) < MAX_OPEN_LOOKUPS:
            self.open_lookups[key] = req_context
        return None

    def num_storable_rows(self) -> int:
        """Return how many blocks more the tier's unfinished stores may hold; 0 where it can get none. Pure."""
        if self.is_out_of_service or self.is_purging:
            return 0
        return max(0, self.max_in_flight_store_bytes - self.in_flight_store_bytes) // self.row_bytes

    def submit(self, job: JobMetadata) -> Submission:
        """Submit a job to the tier, unless it is left out by now."""
        breaker = self.breaker
        if self.is_out_of_service or not (breaker.is_closed or breaker.begin(job.req_context)):
            return Submission.DECLINED
        submit = self.tier.submit_load if job.is_promotion else self.tier.submit_store
        if isinstance(self._call("submit", submit, job), CallFailure):
            breaker.record_failure(job.req_context)
            return Submission.FAILED
        return Submission.STARTED

    def get_finished(self) -> list[JobResult]:
        """Return the tier's reports; a raise puts it out of service."""
        if not self.reports_jobs:
            return []
        try:
            results = [as_result(result) for result in self.tier.get_finished()]
        except Exception as error:  # noqa: BLE001 - a foreign tier may raise anything; it costs its own hits
            self._count_failure(CallFailure("get_finished", error))
            self.is_out_of_service, self.reports_jobs = True, False
            results = []
        num_unanswered = self._call("drain_unanswered", self.tier.drain_unanswered)
        for _ in range(num_unanswered if isinstance(num_unanswered, int) else 0):
            self.breaker.record_no_response()
        return results

    def check_age(self, oldest_s: float) -> None:
        """Trip the breaker when work waits for too long or outlives even the tier's own time-out.

        Args:
            oldest_s: the clock's reading when the oldest open job began.
        """
        age_s = self._clock() - oldest_s
        # No job waits longer than the oldest job is old, and a tier walks its queue to answer.
        if age_s <= min(MAX_WAITING_S, self.tier.settings.job_timeout_s) or self.is_out_of_service:
            return
        is_overdue = age_s > self.tier.settings.job_timeout_s
        if not is_overdue:
            waiting_s = self._call("waiting_s", lambda: float(self.tier.waiting_s()))
            is_overdue = not isinstance(waiting_s, CallFailure) and waiting_s > MAX_WAITING_S
        if is_overdue:
            self.breaker.trip()

    def record_overdue(self, keys: Collection[OffloadKey], *, is_loading: bool) -> None:
        """Count a request that passed its deadline waiting for this tier: for a load, or for an answer.

        Without it a tier that hangs would cost every request its whole deadline.
        """
        if is_loading or any(key in self.open_lookups for key in keys):
            self.num_overdue_requests += 1
            self.breaker.record_no_response()

    def count_ended(self, job: JobMetadata, result: JobResult, started_s: float) -> None:
        """Count a reported job that failed in part or whole, and how long a promotion took."""
        if not job.is_promotion:
            self.num_failed_cascade_jobs += not result.success
            return
        self.num_failed_promotion_jobs += not result.success
        self.promotion_latency.observe(self._clock() - started_s if result.took_s is None else result.took_s)

    def drain_answered(self, is_awaited: Callable[[OffloadKey], bool]) -> Collection[OffloadKey]:
        """Return the keys whose pending lookup has an answer now.

        A tier that does not keep track is called again for some of them, in turn: that is cheaper than waking every
        request that waits, and a step's cost does not grow with the requests that do.

        Args:
            is_awaited: whether a request still waits for a key; such a tier is not called for the others again.
        """
        if not self.open_lookups:
            return ()
        if self.is_out_of_service:
            answered: Collection[OffloadKey] | None = list(self.open_lookups)
        else:
            outcome = self._call("drain_answered", as_list, self.tier.drain_answered)
            answered = None if isinstance(outcome, CallFailure) else outcome
        if answered is None:
            answered = self._ask_again(is_awaited)
        pending = self.open_lookups
        for owner in {pending.pop(key, None) for key in answered}:  # a request has looked for many keys
            self.breaker.end_lookup(owner)
        return answered

    def take_events(self) -> list[OffloadingEvent]:
        """Return which blocks can be loaded from the tier, or no longer, since the last call.

        Nothing unless its settings ask for it. A tier that raises when it should report its evictions, or remembers
        only some of them, may have evicted anything.
        """
        announcements = self.announcements
        if announcements is None:
            return []
        if self._reports_evictions:
            evicted = self._call("drain_evicted", as_list, self.tier.drain_evicted)
            announcements.on_evicted(None if isinstance(evicted, CallFailure) else evicted)
        if self._call("drain_emptied", self.tier.drain_emptied) is True:
            announcements.on_evicted(None)
        if self.is_out_of_service or self.is_purging or not self.breaker.is_closed:
            announcements.hide(forgets=not self._reports_evictions)
        else:
            announcements.show()
        return announcements.take_events()

    def end_step(self) -> None:
        """Let the tier start what this step's lookups need."""
        if not self.is_out_of_service:
            self._call("end_step", self.tier.end_step)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark ``keys`` as recently used in the tier."""
        if not self.is_out_of_service:
            self._call("touch", self.tier.touch, keys, req_context)

    def request_finished(self, req_context: ReqContext) -> None:
        """Let the tier forget a request."""
        if not self.is_out_of_service:
            self._call("request_finished", self.tier.request_finished, req_context)

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Let a tier that learns from requests learn that one has arrived."""
        if not self.is_out_of_service:
            self._call("note_request", self.tier.note_request, chains, req_context)

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        """Return why the tier lacks ``key``, or why it could not be looked up; None when nothing is known."""
        if self.is_out_of_service:
            return down(self.name, "out of service")
        if self.is_purging:
            return being_purged(self.name)
        if not self.breaker.is_closed:
            return down(self.name, "circuit breaker open")
        found = self._call("explain", self.tier.explain, key, req_context, behind)
        known = found if isinstance(found, Miss) else None
        if known is not None and known.cause not in SUSPICIONS:
            return known
        return self.departed.explain(key) or known

    def reset(self, epoch: bytes, model: ModelIdentity | None = None) -> None:
        """Move the tier to another epoch or model; one that cannot is out of service, or it would serve old bytes."""
        for memory in (self.backoff, self.dropped, self.departed, self.open_lookups, self.announcements):
            if memory is not None:
                memory.clear()
        if self.is_out_of_service:
            return
        move = partial(self.tier.reset, epoch) if model is None else partial(self.tier.switch_model, model)
        outcome = self._call("reset", move)
        # Its jobs in flight go on: their slots are free when it has reported them.
        self.is_out_of_service = outcome is False or isinstance(outcome, CallFailure)
        if outcome is False:
            logger.warning(
                "tier %r has no reset: it is left out until the engine restarts, or it would serve old blocks",
                self.name,
            )

    def begin_purge(self, tenant: int | None = None) -> PurgeOutcome | None:
        """Make the tier drop every block, or a tenant's; return how that ended, if it has by now or cannot begin."""
        if self.is_out_of_service:
            return PurgeOutcome(0, error="it is out of service: restart the engine")
        begun = self._call("purge", lambda: as_outcome(self.tier.purge(tenant)))
        if isinstance(begun, CallFailure):
            return self._end_purge(PurgeOutcome(0, error=str(begun.error)))
        is_refused = begun is not None and begun.error and not begun.num_blocks
        return begun if begun is None or is_refused else self._end_purge(begun)

    def poll_purge(self) -> PurgeOutcome | int:
        """Return how the purge of the tier ended, or how many blocks it has removed so far."""
        found = self._call("poll_purge", lambda: as_progress(self.tier.poll_purge()))
        if isinstance(found, CallFailure):
            found = PurgeOutcome(0, error=str(found.error))
        return self._end_purge(found) if isinstance(found, PurgeOutcome) else found

    def _end_purge(self, outcome: PurgeOutcome) -> PurgeOutcome:
        self.departed.add(outcome.keys, TierDeparture.PURGED)
        if self.announcements is not None:
            # What a tier does not name may have been any of its blocks.
            is_named = not outcome.error and len(outcome.keys) == outcome.num_blocks
            self.announcements.on_evicted(outcome.keys if is_named else None)
        return outcome

    def drop(self, keys: Collection[OffloadKey]) -> bool:
        """Look ``keys`` up no more, and make the tier delete them; False when it cannot, or raises.

        Also a tier that deletes them is not trusted with them again: a copy may be on its way, or another engine's.
        """
        new = [key for key in keys if key not in self.dropped]
        self.dropped.update(new)
        if self.announcements is not None:
            self.announcements.on_evicted(new)
        if not self._can_drop or self.is_out_of_service:
            return False
        return not new or not isinstance(self._call("drop", self.tier.drop, new), CallFailure)

    def drain(self, timeout_s: float) -> bool:
        """Wait for the tier's jobs; one that is out of service has nothing to wait for."""
        return self.is_out_of_service or self._call("drain", self.tier.drain, timeout_s) is True

    def shutdown(self, timeout_s: float) -> bool:
        """End the tier; False when one of its threads may still touch the primary's rows."""
        return self._call("shutdown", lambda: bool(self.tier.shutdown(timeout_s))) is True

    def stats(self) -> dict[str, float]:
        """Return the tier's own numbers and those of its guard."""
        own = self._call("stats", lambda: {name: float(v) for name, v in self.tier.stats().items()})
        known = {} if self.load_times is None else self.load_times.stats()
        if self.tier.capacity_blocks is not None:
            known["capacity_blocks"] = float(self.tier.capacity_blocks)
        return (
            known
            | ({} if isinstance(own, CallFailure) else own)
            | {
                "lookups": float(self.num_lookups),
                "found": float(self.num_found),
                "failed_promotion_jobs": float(self.num_failed_promotion_jobs),
                "failed_cascade_jobs": float(self.num_failed_cascade_jobs),
                "declined_cascades": float(self.losses.num_by_reason[TierDeparture.DECLINED]),
                "lost_blocks": float(self.losses.num_blocks),
                "refused_by_admission": float(self.num_refused_by_admission),
                "promoted_blocks": float(self.num_promoted_blocks),
                "lookups_left_out": float(self.num_lookups_left_out),
                "overdue_requests": float(self.num_overdue_requests),
                "probe_blocks": float(self.num_probe_blocks),
                "errors": float(self.num_errors),
                "breaker_openings": float(self.breaker.num_openings),
                "breaker_open": float(not self.breaker.is_closed),
                "in_flight_store_bytes": float(self.in_flight_store_bytes),
                "max_in_flight_store_bytes": float(self.max_in_flight_store_bytes),
                "out_of_service": float(self.is_out_of_service),
            }
        )

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return the tier's own histograms and those of its guard."""
        own = self._call("histograms", lambda: dict(self.tier.histograms()))
        return ({} if isinstance(own, CallFailure) else own) | {
            "promotion_s": self.promotion_latency.snapshot()
        }

    def _ask_again(self, is_awaited: Callable[[OffloadKey], bool]) -> list[OffloadKey]:
        """Look up again what was looked up longest ago, while answers come; return what has one."""
        pending, answered, num_unanswered = self.open_lookups, [], 0
        for key in list(islice(pending, MAX_ASKED_AGAIN)):
            if not is_awaited(key):
                del pending[key]
            elif self._has_answer(key, pending[key]):
                answered.append(key)
            else:
                pending.move_to_end(key)
                num_unanswered += 1
                if num_unanswered == MAX_UNANSWERED:
                    break
        return answered

    def _has_answer(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Look ``key`` up once more; a raise is an answer: the block is absent."""
        answer = self._call("lookup", self.tier.lookup, key, req_context)
        if isinstance(answer, CallFailure):
            self.breaker.record_failure(req_context)
        elif answer is not None and not answer and self.announcements is not None:
            self.announcements.on_missed(key)
        return answer is not None

    def _call(self, name: str, call: Callable[[*Ts], T], *args: *Ts) -> T | CallFailure:
        """Return what the tier returns, or the failure when it raises, whatever it raises."""
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - a foreign tier may raise anything; it costs its own hits
            return self._count_failure(CallFailure(name, error))

    def _count_failure(self, failure: CallFailure) -> CallFailure:
        """Count a failure; the first is logged with its traceback and no text of its own, more would fill the log."""
        self.num_errors += 1
        if not self._has_logged_error:
            message = "tier %r failed in %s; further errors are only counted\n%s"
            logger.error(message, self.name, failure.call, format_foreign(failure.error))
            self._has_logged_error = True
        return failure

    def __repr__(self) -> str:
        state = "out of service" if self.is_out_of_service else self.breaker.state.value
        return f"GuardedTier({self.name}: {state}, {self.in_flight_store_bytes} B of stores in flight)"


def as_list(drain: Callable[[], Collection[OffloadKey] | None]) -> list[OffloadKey] | None:
    """Return the keys that a tier's method reports, as a list.

    Raises:
        TypeError: it is no collection.
    """
    keys = drain()
    return None if keys is None else list(keys)


def as_outcome(outcome: PurgeOutcome | None) -> PurgeOutcome | None:
    """Return how a tier says its purge has ended, with the types that it should have; None while it goes on. Pure.

    Raises:
        TypeError, ValueError, AttributeError: it is no outcome.
    """
    if outcome is None:
        return None
    return PurgeOutcome(int(outcome.num_blocks), list(outcome.keys), str(outcome.error))


def as_progress(found: PurgeOutcome | int) -> PurgeOutcome | int:
    """Return what a tier says of a purge under way, with the types that it should have; likewise."""
    if isinstance(found, int):
        return int(found)
    outcome = as_outcome(found)
    if outcome is None:
        raise TypeError("poll_purge returned None: a number of blocks while it goes on, then a PurgeOutcome")
    return outcome


def as_result(result: JobResult) -> JobResult:
    """Return a tier's report with the types that it should have. Pure.

    What a report states of single keys overrides what it states of the whole: in doubt, a miss.

    Raises:
        TypeError, ValueError, AttributeError: it is no report at all.
    """
    keys = None if result.successful_keys is None else frozenset(result.successful_keys)
    reported_s = getattr(result, "took_s", None)  # a tier written before the field existed has none
    took_s = None if reported_s is None else max(0.0, float(reported_s))
    is_success = result.success is True and keys is None
    return JobResult(JobId(int(result.job_id)), is_success, keys, bool(result.is_fault), took_s)
