"""What the storm checks beside bytes: jobs reported once, no lie to a router, no error that only a thread has seen."""

import logging
from collections.abc import Iterable, Mapping

from tests.storm.place import StormPlace

from kvtier.base import (
    JobId,
    OffloadKey,
    ReqContext,
    get_offload_tenant,
)
from kvtier.testing.wrapped_tier import WrappedTier
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager

ROUNDING_S = 1e-3
"""What ages may differ by that are computed in another order, or read from the times of files."""


class BrokenLawError(AssertionError):
    """A law that does not hold."""


class WatchedTier(WrappedTier):
    """Passes everything on, and counts jobs: each is reported once, and with keys that it has.

    Blocks that it loads are no older than its time to live, and none is found of a tenant without a key.

    Args:
        inner: the tier.
        place: where its blocks are.
        keyless: numbers of the tenants that have no key, where it encrypts.

    Attributes:
        open_jobs: jobs that have not been reported.
        place: where its blocks are.
        broken_laws: what was seen and must not be; the manager would take an exception for a fault of the tier.
    """

    def __init__(
        self, inner: SecondaryTierManager, place: StormPlace, keyless: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(inner)
        self.get_tier_type = inner.get_tier_type  # type: ignore[method-assign]  # events and counters name the inner tier
        self.locality = inner.locality  # type: ignore[misc]  # what a class says of itself
        self.open_jobs: dict[JobId, JobMetadata] = {}
        self.place = place
        self.broken_laws: list[str] = []
        self._keyless = keyless
        self._begun_s: dict[JobId, float] = {}
        self._may_lie = "repeat_ratio" in place.fault_names

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        answer = super().lookup(key, req_context)
        if answer and get_offload_tenant(key) in self._keyless:
            self.broken_laws.append("a block is found of a tenant that has no key")
        return answer

    def submit_store(self, job: JobMetadata) -> None:
        super().submit_store(job)
        self._open(job)

    def submit_load(self, job: JobMetadata) -> None:
        super().submit_load(job)
        self._open(job)
        self._begun_s[job.job_id] = self.place.weather.clock()

    def get_finished(self) -> Iterable[JobResult]:
        results = list(super().get_finished())
        for result in results:
            job = self.open_jobs.pop(result.job_id, None)
            if job is None:
                if not self._may_lie:
                    self.broken_laws.append(f"job {result.job_id} was reported twice, or never submitted")
            elif not set(result.successful_keys or ()) <= set(job.keys):
                self.broken_laws.append(f"job {result.job_id} was reported with keys of others")
            elif job.is_promotion:
                self._check_ages(job, result)
            else:
                self._note_stored(job)
        return results

    def on_ring_changed(self) -> None:
        """Expect no more that tenants have no key."""
        self._keyless = frozenset()

    def on_killed(self) -> None:
        """What a dead process was storing may be there or not."""
        for job in self.open_jobs.values():
            if not job.is_promotion:
                self._note_stored(job)

    def _note_stored(self, job: JobMetadata) -> None:
        self.place.stored_s.update(dict.fromkeys(job.keys, self.place.weather.clock()))

    def _check_ages(self, job: JobMetadata, result: JobResult) -> None:
        """Fail when a block was loaded that was over before its load began."""
        begun_s, ttl_s = self._begun_s.pop(job.job_id), self.place.ttl_s
        if ttl_s is None:
            return
        for key in job.keys if result.success else result.successful_keys or ():
            stored_s = self.place.stored_s.get(key)
            if stored_s is not None and begun_s - stored_s >= ttl_s + ROUNDING_S:
                self.broken_laws.append(f"{self.get_tier_type()} has served a block beyond its time to live")

    def _open(self, job: JobMetadata) -> None:
        if job.job_id in self.open_jobs:
            self.broken_laws.append(f"job {job.job_id} was submitted twice")
        self.open_jobs[job.job_id] = job


class ThreadErrors(logging.Handler):
    """Keeps the errors that the top of a thread has caught: no fault that the storm makes may get there."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record that has an exception."""
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def require_bounded(stats: Mapping[str, float], num_requests: int, num_slots: int) -> None:
    """Fail when something that requests and jobs leave behind grows beyond what they can need."""
    limits = {"waiting_requests": num_requests, "open_jobs": 64 + 8 * num_slots}
    for name, limit in limits.items():
        if stats[name] > limit:
            raise BrokenLawError(f"{name} is {stats[name]:g}, {limit} can be needed")


def require_at_rest(stats: Mapping[str, float]) -> None:
    """Fail when something still counts as under way although nothing is."""
    gauges = (
        "waiting_requests",
        "open_jobs",
        "connector.open_jobs",
        "connector.fenced_jobs",
        "connector.requests",
    )
    for name, value in stats.items():
        if value and (name in gauges or name.endswith(".in_flight_store_bytes")):
            raise BrokenLawError(f"{name} is {value:g} when nothing is under way")
