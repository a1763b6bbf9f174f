"""The jobs that vLLM's stock manager has submitted to one tier, each reported exactly once.

vLLM's manager raises on an unexpected report, and keeps all blocks of a job pinned until its report. So every job is
recorded here at its submission. It is closed by the tier's first report, by a failed submission, or when a tier that is
out of service has ended.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from vllm.v1.kv_offload.base import ReqContext as StockReqContext
from vllm.v1.kv_offload.tiering.base import JobResult as StockJobResult
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtier.base import BlockIds, JobId, OffloadKey, ReqContext
from kvtier.errors import TierError
from kvtier.hints.envelope import add_envelope
from kvtier.tiering.base import JobMetadata, JobResult
from kvtier.tiering.breaker import Submission
from kvtier.tiering.departures import TierDeparture
from kvtier.tiering.guard import GuardedTier

logger = logging.getLogger(__name__)

DRAIN_PAUSE_S = 30.0
"""Seconds between two log lines while a reset waits for a tier. The wait has no timeout: the rows are reused
afterwards, and a transfer that is still running would write into them."""


@dataclass(frozen=True, slots=True)
class StockJob:
    """A job that has not been reported to vLLM.

    Attributes:
        metadata: the job as submitted to the tier; of a store that did not fit, only the leading blocks.
        num_pinned_blocks: how many blocks vLLM keeps pinned until the report.
        start_s: when it was submitted.
    """

    metadata: JobMetadata
    num_pinned_blocks: int
    start_s: float


class StockJobs:
    """The open jobs of one tier, and the reports that vLLM has not read yet.

    Args:
        guard: the tier.
        clock: seconds, monotonic.
    """

    def __init__(self, guard: GuardedTier, clock: Callable[[], float]) -> None:
        self._guard = guard
        self._clock = clock
        self._open: dict[JobId, StockJob] = {}
        self._reports: list[StockJobResult] = []

    def submit_store(self, job: TransferJob, *, is_wanted: bool) -> None:
        """Submit as many leading blocks as the tier's budget has room for; decline the others.

        Args:
            job: vLLM's job.
            is_wanted: False declines all blocks.
        """
        guard = self._guard
        context = kvtier_context(job.req_context)
        keys = tuple(job.keys)
        is_usable = is_wanted and guard.breaker.allows(context)
        num_fitting = min(len(keys), guard.num_storable_rows()) if is_usable else 0
        guard.losses.add(keys[num_fitting:], TierDeparture.DECLINED)
        if num_fitting == 0:
            self._reports.append(StockJobResult(job.job_id, success=not keys))
            return
        # vLLM keeps all blocks of a job pinned until its end, so all of them count against the budget.
        guard.in_flight_store_bytes += len(keys) * guard.row_bytes
        self._submit(job, keys[:num_fitting], len(keys))

    def submit_load(self, job: TransferJob) -> None:
        """Submit the job to the tier; the job fails if the tier is out of service by now."""
        keys = tuple(job.keys)
        self._submit(job, keys, len(keys))

    def drain_reports(self) -> list[StockJobResult]:
        """Return the jobs that have ended since the last call, each once, even if the tier reports a job twice."""
        self._collect()
        reports, self._reports = self._reports, []
        return reports

    def drain(self) -> None:
        """Block until every job has ended.

        Raises:
            TierError: the tier has no work left and has not reported every job.
        """
        tier = self._guard.tier
        self._collect()
        while self._open:
            is_idle = tier.drain(DRAIN_PAUSE_S)
            self._collect()
            if self._open and is_idle:
                lost = f"lost {len(self._open)} jobs and may still touch their rows: restart the engine"
                raise TierError(self._guard.name, lost)
            if self._open:
                logger.warning("tier %r: a reset waits for %d transfers", self._guard.name, len(self._open))

    def _submit(self, job: TransferJob, keys: tuple[OffloadKey, ...], num_pinned_blocks: int) -> None:
        context = kvtier_context(job.req_context)
        block_ids = slots_of(job)[: len(keys)]
        metadata = JobMetadata(JobId(job.job_id), keys, block_ids, job.is_promotion, context)
        opened = StockJob(metadata, num_pinned_blocks, self._clock())
        self._open[metadata.job_id] = opened
        submission = self._guard.submit(metadata)
        if submission is not Submission.STARTED:
            self._end(opened, frozenset(), is_tried=submission is Submission.FAILED)

    def _collect(self) -> None:
        """Process the tier's reports; the jobs of a tier that is out of service fail once its threads have ended."""
        for result in self._guard.get_finished():
            job = self._open.get(result.job_id)
            if job is not None:
                self._finish(job, result)
        if self._open:
            self._guard.check_age(next(iter(self._open.values())).start_s)
        if self._guard.is_out_of_service and self._open and self._guard.shutdown(0.0):
            for job in list(self._open.values()):
                self._end(job, frozenset())

    def _finish(self, job: StockJob, result: JobResult) -> None:
        keys = frozenset(job.metadata.keys)
        succeeded = keys if result.success else (result.successful_keys or frozenset()) & keys
        if result.success or succeeded or not result.is_fault:
            self._guard.breaker.record_success(job.metadata.req_context)
        else:
            self._guard.breaker.record_failure(job.metadata.req_context)
        self._end(job, succeeded)

    def _end(self, job: StockJob, succeeded: frozenset[OffloadKey], *, is_tried: bool = True) -> None:
        """Close a job and queue its report.

        Args:
            job: an open job.
            succeeded: which of its keys succeeded.
            is_tried: whether the tier tried the job; otherwise its keys get no backoff.
        """
        metadata = job.metadata
        del self._open[metadata.job_id]
        if metadata.is_promotion:
            self._record_loads(metadata.keys, succeeded, is_tried=is_tried)
        else:
            self._guard.in_flight_store_bytes -= job.num_pinned_blocks * self._guard.row_bytes
        is_whole = len(metadata.keys) == job.num_pinned_blocks and succeeded.issuperset(metadata.keys)
        partial = tuple(succeeded) if metadata.is_promotion and succeeded and not is_whole else None
        self._reports.append(StockJobResult(metadata.job_id, is_whole, partial, self._clock() - job.start_s))

    def _record_loads(
        self, keys: Iterable[OffloadKey], succeeded: frozenset[OffloadKey], *, is_tried: bool
    ) -> None:
        """Start a backoff for blocks that failed, because vLLM would load them again in the next step."""
        backoff = self._guard.backoff
        self._guard.num_promoted_blocks += len(succeeded)
        backoff.record_successes(succeeded)
        for key in keys if is_tried else ():
            if key not in succeeded:
                backoff.record_failure(key)


def kvtier_context(req_context: StockReqContext) -> ReqContext:
    """Return kvtier's context of a vLLM request, the same object in every call and for every tier."""
    context: ReqContext | None = req_context.get_state(ReqContext)
    if context is None:
        params = add_envelope(req_context.kv_transfer_params, getattr(req_context, "kv_hints", None))
        context = ReqContext(req_context.req_id, params)
        req_context.set_state(context)
    return context


def slots_of(job: TransferJob) -> BlockIds:
    """Return a job's slots; vLLM calls them chunks from 0.30 on, and blocks before. Pure."""
    slots = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return np.asarray(slots, dtype=np.int64)
