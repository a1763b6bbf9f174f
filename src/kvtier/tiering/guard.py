"""A secondary tier as the manager may use it: behind its breaker, budget and back-off, and never raising.

It decides nothing about blocks. Every call to a tier goes through here, so that a tier which raises, hangs
or lies costs its own hits and nothing else.
"""

import logging
from collections.abc import Callable, Collection
from typing import TypeVar

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvtier.tiering.breaker import MAX_WAITING_S, CircuitBreaker, InFlightBudget, LoadBackoff

logger = logging.getLogger(__name__)

T = TypeVar("T")

PRIMARY_SHARE = 8
"""A tier's stores in flight hold at most this fraction (one eighth) of the primary unless set otherwise, so
that the slowest tier cannot pin it; a larger share would let stores crowd out what requests load."""


class TierGuard:
    """One secondary tier and what protects the others from it.

    Args:
        tier: the tier.
        primary_bytes: size of the primary tier, from which the default budget follows.
        row_bytes: bytes of one row; a budget below that would never let anything through.
        clock: seconds, monotonic.

    Attributes:
        is_out_of_service: True once its get_finished has raised; it is not asked for anything any more.
    """

    def __init__(
        self, tier: SecondaryTierManager, primary_bytes: int, row_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.tier = tier
        self.name = tier.get_tier_type()
        self.row_bytes = row_bytes
        limit_bytes = tier.settings.max_in_flight_store_bytes or primary_bytes // PRIMARY_SHARE
        self.budget = InFlightBudget(max(limit_bytes, row_bytes))
        self.breaker = CircuitBreaker(clock)
        self.backoff = LoadBackoff(clock)
        self.is_out_of_service = False
        self.num_declined_cascades = 0
        self.num_promoted_blocks = 0
        self.num_errors = 0
        self._asked: set[OffloadKey] = set()
        self._has_logged_error = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Ask the tier; False without asking while it is left out or the key's last load failed."""
        if self.is_out_of_service or not self.breaker.allows() or self.backoff.is_paused(key):
            return False
        no: bool | None = False
        answer = self._call("lookup", lambda: self.tier.lookup(key, req_context), no)
        if answer is None:
            self._asked.add(key)
        return answer

    def submit(self, job: JobMetadata) -> bool:
        """Hand a job to the tier; False when it did not start it."""
        if self.is_out_of_service or not self.breaker.begin():
            return False
        submit = self.tier.submit_load if job.is_promotion else self.tier.submit_store
        num_errors = self.num_errors
        self._call("submit", lambda: submit(job), None)
        if self.num_errors > num_errors:
            self.breaker.record_failure()
        return self.num_errors == num_errors

    def get_finished(self) -> list[JobResult]:
        """Return the tier's reports; a raise puts it out of service. Trips the breaker on a stale queue."""
        if self.is_out_of_service:
            return []
        if self._call("waiting_s", self.tier.waiting_s, 0.0) > MAX_WAITING_S:
            self.breaker.trip()
        results = self._call("get_finished", lambda: list(self.tier.get_finished()), None)
        self.is_out_of_service = results is None
        return results or []

    def take_answered(self) -> Collection[OffloadKey]:
        """Return the keys whose pending lookup may have an answer now: each of them if nobody can tell."""
        is_silent = self.is_out_of_service
        answered = None if is_silent else self._call("take_answered", self.tier.take_answered, None)
        if answered is None:
            answered, self._asked = self._asked, set()
        else:
            self._asked.difference_update(answered)
        return answered

    def end_step(self) -> None:
        """Let the tier start what this step's lookups asked for."""
        if not self.is_out_of_service:
            self._call("end_step", self.tier.end_step, None)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Tell the tier what is in use."""
        if not self.is_out_of_service:
            self._call("touch", lambda: self.tier.touch(keys, req_context), None)

    def request_finished(self, req_context: ReqContext) -> None:
        """Tell the tier that a request is gone."""
        if not self.is_out_of_service:
            self._call("request_finished", lambda: self.tier.request_finished(req_context), None)

    def reset(self, epoch: bytes) -> None:
        """Move the tier to another epoch; one that cannot is out of service, or it would serve old bytes."""
        self.backoff.clear()
        self._asked.clear()
        num_errors = self.num_errors
        self._call("reset", lambda: self.tier.reset(epoch), None)
        self.is_out_of_service |= self.num_errors > num_errors

    def drain(self, timeout_s: float) -> bool:
        """Wait for the tier's jobs; one that is out of service has nothing to wait for."""
        return self.is_out_of_service or self._call(
            "drain", lambda: self.tier.drain(timeout_s), fallback=False
        )

    def shutdown(self, timeout_s: float) -> bool:
        """End the tier; False when one of its threads may still touch the primary's rows."""
        return self._call("shutdown", lambda: self.tier.shutdown(timeout_s), fallback=False)

    def stats(self) -> dict[str, float]:
        """Return the tier's own numbers and those of its guard."""
        return self.tier.stats() | {
            "declined_cascades": self.num_declined_cascades,
            "promoted_blocks": self.num_promoted_blocks,
            "errors": self.num_errors,
            "breaker_openings": self.breaker.num_openings,
            "in_flight_store_bytes": self.budget.used_bytes,
            "out_of_service": float(self.is_out_of_service),
        }

    def _call(self, name: str, call: Callable[[], T], fallback: T) -> T:
        """Return what the tier answers, or ``fallback`` when it raises, whatever it raises."""
        try:
            return call()
        except Exception:  # tier boundary: a foreign tier may raise anything and costs its own hits only
            self.num_errors += 1
            # One line with its traceback: a tier that raises on each lookup must not fill the log.
            if not self._has_logged_error:
                logger.exception("tier %r failed in %s; further errors are only counted", self.name, name)
                self._has_logged_error = True
            return fallback

    def __repr__(self) -> str:
        state = "out of service" if self.is_out_of_service else self.breaker.state.value
        return f"TierGuard({self.name}: {state}, {self.budget.used_bytes} B of stores in flight)"
