"""The worker half: starts the transfers of each step and reports their results.

Stores are deferred: those of a step start in the next one, when the tokens of the step that computed them have been
returned, so that copying never delays token generation. A load is reported exactly once on every worker however it
ends, because the engine holds the request's blocks until then.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvtier.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingSpec,
    TransferJobId,
    TransferResult,
    overrides,
)
from kvtier.config import LoadIf
from kvtier.connector.common import (
    AuditReport,
    LostLoadStoreSpec,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
    TransferSample,
)
from kvtier.errors import EngineStateError
from kvtier.log_limit import limit_log_lines
from kvtier.worker.worker import OffloadingWorker

logger = logging.getLogger(__name__)

IDLE_PAUSE_S = 0.0005
"""Seconds that a step without tokens pauses. An engine does such steps only to wait for a load, a promotion or a
store, in a tight loop that keeps the interpreter lock; a copy thread then gets it every few milliseconds only:
measured, a hit in host memory took 0.3 to 0.7 s instead of 0.07 s. Zero brings that back; longer delays the first
token by as much."""


@dataclass(eq=False, slots=True)
class _OpenLoad:
    """A load that this worker has not reported yet.

    Attributes:
        job: what to load, and for which request.
        has_begun: whether a handler has taken it; one that was declined is reported as failed.
        is_void: whether a reset came after it was begun; its bytes must not be used.
    """

    job: TransferJob
    has_begun: bool = True
    is_void: bool = False


class OffloadingConnectorWorker:
    """Carries out what the scheduler half has planned, on one worker. Used from one thread.

    Args:
        spec: builds the handlers.
        pause: waits for that many seconds and lets the threads that copy run.

    Attributes:
        worker: routes transfers to the handlers.
    """

    def __init__(self, spec: OffloadingSpec, pause: Callable[[float], None] = time.sleep) -> None:
        self.worker = OffloadingWorker()
        self._spec = spec
        self._pause = pause
        self._is_timing_wanted = spec.config.settings.load_if is LoadIf.FASTER
        self._is_idle = False
        self._deferred_stores: dict[TransferJobId, TransferJob] = {}
        self._stores: set[TransferJobId] = set()
        self._loads: dict[TransferJobId, _OpenLoad] = {}
        self._failed_loads: dict[str, list[int]] = {}
        self._report = OffloadingWorkerMetadata()

    def register_kv_caches(self, kv_caches: CanonicalKVCaches) -> None:
        """Build the handlers for the engine's KV cache; once, before the first step."""
        for entry in self._spec.get_handlers(kv_caches):
            self.worker.register_handler(*entry)
        identity = self._spec.region_identity()
        if identity is not None:
            self._report.region_identities = (identity,)
        limit_log_lines()

    def unregister_kv_caches(self) -> None:
        """Drop every reference to the KV cache, whose memory the engine will free; stored blocks stay.

        Idempotent. Deferred stores are begun first and ended like those under way. Loads that have not been reported
        are reported as failed, because their bytes are in memory that goes. So is what is submitted before
        ``register_kv_caches`` brings the tensors that replace these.

        Thread: blocks until every copy has ended.

        Raises:
            EngineStateError: the spec cannot let go of tensors; nothing has changed.
        """
        if not overrides(self._spec.detach_kv_caches, OffloadingSpec.detach_kv_caches):
            raise EngineStateError(
                f"{type(self._spec).__name__} cannot let go of the KV cache: do not put this engine to sleep, or "
                "give the spec a detach_kv_caches method"
            )
        self._begin_deferred_stores()
        self.worker.wait(self._stores | self._loads.keys())
        for result in self.worker.get_finished():
            if result.job_id in self._stores:
                self._record(result)
                self._stores.remove(result.job_id)
                self._report.mark_completed(result.job_id, result.success)
        for load in self._loads.values():
            load.has_begun = False
        self._spec.detach_kv_caches()
        self.worker = OffloadingWorker()

    def handle_preemptions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start the stores of the last step, then finish those whose device blocks will be overwritten.

        Call it in every step, before anything writes to a device block.

        Thread: blocks until the stores to flush have ended.
        """
        self._is_idle = metadata.is_idle
        if metadata.measured_step is not None:
            self._report.measured_step = metadata.measured_step
        self._begin_deferred_stores()
        if metadata.jobs_to_flush:
            self.worker.wait(metadata.jobs_to_flush)
        for job_id in metadata.jobs_to_fail or ():
            if job_id in self._loads:
                self._loads[job_id].is_void = True

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start the loads of this step, after ``handle_preemptions`` if the engine has not called it."""
        self.handle_preemptions(metadata)
        if not metadata.load_jobs:
            return
        begun = self.worker.transfer_joined(
            {
                job_id: job.transfer_spec
                for job_id, job in metadata.load_jobs.items()
                if not isinstance(job.transfer_spec.source, LostLoadStoreSpec)
            }
        )
        # A declined load is reported in get_finished like any other: the engine looks nowhere else.
        self._loads.update(
            {job_id: _OpenLoad(job, job_id in begun) for job_id, job in metadata.load_jobs.items()}
        )

    def wait_for_loads(self) -> None:
        """Wait until the started loads have ended; get_finished then reports them.

        For an engine without other work this is faster than polling, which would take the interpreter from the
        threads that copy.

        Thread: blocks.
        """
        self.worker.wait(set(self._loads))

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Prepare the stores of this step, which start in the next one; call it when the step has computed."""
        self._deferred_stores.update(metadata.store_jobs)

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose stores, and those whose load, ended since the last call.

        Args:
            finished_req_ids: requests that ended; a load for one of them is reported all the same.

        Returns:
            No stores, because they hold no device blocks. Each load once, whether it ended well or badly.

        Thread: pauses once in a step without tokens.
        """
        del finished_req_ids
        if self._is_idle:
            self._pause(IDLE_PAUSE_S)
        self._is_idle = False
        # What was not taken belongs to an earlier answer, and take_failed_loads is about the last one alone.
        self._failed_loads = {}
        ended: set[str] = set()
        for job_id in [job_id for job_id, load in self._loads.items() if not load.has_begun]:
            ended.add(self._end_load(job_id, success=False))
        for result in self.worker.get_finished():
            if result.job_id in self._loads:
                self._record(result)
                ended.add(self._end_load(result.job_id, result.success))
            elif result.job_id in self._stores:
                self._record(result)
                self._stores.remove(result.job_id)
                self._report.mark_completed(result.job_id, result.success)
                if result.deviations:
                    self._report.audits += (AuditReport(result.job_id, result.deviations),)
            else:
                logger.error("a handler reported job %d, which is not open: ignored", result.job_id)
        return set(), ended

    def take_failed_loads(self) -> dict[str, list[int]]:
        """Return the device blocks of the failed loads among those that get_finished last returned."""
        failed, self._failed_loads = self._failed_loads, {}
        return failed

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Return this worker's reports since the last call, or None."""
        report, self._report = self._report, OffloadingWorkerMetadata()
        return None if report.is_empty() else report

    def shutdown(self) -> None:
        """End the handlers; deferred stores are dropped. Idempotent."""
        self._deferred_stores = {}
        self.worker.shutdown()

    def _begin_deferred_stores(self) -> None:
        if not self._deferred_stores:
            return
        deferred, self._deferred_stores = self._deferred_stores, {}
        begun = self.worker.transfer_joined({job_id: job.transfer_spec for job_id, job in deferred.items()})
        self._stores |= begun
        for job_id in deferred.keys() - begun:
            self._report.mark_completed(job_id, success=False)

    def _end_load(self, job_id: TransferJobId, success: bool) -> str:
        """Report a load; return its request."""
        load = self._loads.pop(job_id)
        req_id = load.job.req_id
        is_good = success and not load.is_void
        self._report.mark_completed(job_id, is_good)
        if not is_good:
            destination = load.job.transfer_spec.destination
            blocks = destination.block_ids.tolist() if isinstance(destination, BlockIDsLoadStoreSpec) else []
            self._failed_loads[req_id] = blocks
        return req_id

    def _record(self, result: TransferResult) -> None:
        size, time_s, transfer_type = result.transfer_size, result.transfer_time, result.transfer_type
        if result.success and size is not None and time_s is not None and transfer_type is not None:
            is_load = transfer_type.destination == GPULoadStoreSpec.medium()
            self._report.transfers += (TransferSample(is_load, size, time_s),)
            if self._is_timing_wanted and is_load:
                self._report.load_bytes += size
                self._report.load_time_s += time_s
