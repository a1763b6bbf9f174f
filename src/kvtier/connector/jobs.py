"""What is in flight between the device and the primary tier: one record for each transfer job.

The scheduler half opens a job when it plans the transfer, and closes it when every worker has reported it. A store
holds no device block: the engine may free the block and give it to another request. So a store fences the blocks it
reads. Before anything writes to one of them, ``take_fenced`` names the store, and the workers finish it first.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from kvtier.base import OffloadKey, TransferJobId
from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.connector.request_state import RequestState

logger = logging.getLogger(__name__)


class JobKind(Enum):
    """The direction of a job."""

    LOAD = "load"
    STORE = "store"
    AUDIT = "audit"
    """It compares device blocks with host memory, and is counted and fenced as a store is."""


@dataclass(eq=False, slots=True)
class OpenTransfer:
    """A job that at least one worker has not reported yet.

    Attributes:
        job_id: its number.
        kind: which way it moves bytes.
        state: the request that it is for; the request itself may have ended.
        keys: what the manager has prepared for it.
        num_reports_missing: workers that have not reported it.
        fenced_blocks: device blocks that it reads and that nothing may write to yet.
        has_failed: whether a worker reported a failure, or a reset made it void.
        is_void: whether a reset came after it was begun.
    """

    job_id: TransferJobId
    kind: JobKind
    state: RequestState
    keys: list[OffloadKey]
    num_reports_missing: int
    fenced_blocks: list[int]
    has_failed: bool = False
    is_void: bool = False


class TransferJobs:
    """The open jobs of the scheduler half. Used from one thread.

    Device blocks are distinguished by number only. Engines whose groups have separate pools would at worst finish a
    store too early, never too late.

    Args:
        num_workers: workers that report each job.

    Attributes:
        by_id: the open jobs.
        num_stores: how many of them are stores or audits.
        loading: for each key that is being loaded the load.
        loading_requests: for each name of a request how many loads are open that workers will report under it.
        fenced: for each fenced device block the stores that read it.
        void_keys: keys of open jobs that a reset made void. They are not stored again before those jobs end: a job's
            end reaches the manager by key, so the manager could not distinguish the old transfer from the new.
    """

    def __init__(self, num_workers: int) -> None:
        self.by_id: dict[TransferJobId, OpenTransfer] = {}
        self.num_stores = 0
        self.loading: dict[OffloadKey, TransferJobId] = {}
        self.loading_requests: dict[str, int] = {}
        # Tuples that all blocks of a store share, because two stores rarely read one block.
        self.fenced: dict[int, tuple[TransferJobId, ...]] = {}
        self.void_keys: set[OffloadKey] = set()
        self._num_workers = num_workers
        self._num_jobs = 0

    @property
    def num_fenced_stores(self) -> int:
        """How many stores fence a device block."""
        return sum(bool(job.fenced_blocks) for job in self.by_id.values())

    def open_load(self, state: RequestState, keys: list[OffloadKey]) -> TransferJobId:
        """Add a load and return its number."""
        job_id = TransferJobId(self._num_jobs)
        self._num_jobs += 1
        self.by_id[job_id] = OpenTransfer(job_id, JobKind.LOAD, state, keys, self._num_workers, [])
        self.loading.update(dict.fromkeys(keys, job_id))
        req_id = state.context.req_id
        self.loading_requests[req_id] = self.loading_requests.get(req_id, 0) + 1
        return job_id

    def open_store(
        self,
        state: RequestState,
        keys: list[OffloadKey],
        device_blocks: list[int],
        kind: JobKind = JobKind.STORE,
    ) -> TransferJobId:
        """Add a store, or another job that reads ``device_blocks``, fence these, and return its number."""
        job_id = TransferJobId(self._num_jobs)
        self._num_jobs += 1
        self.by_id[job_id] = OpenTransfer(job_id, kind, state, keys, self._num_workers, device_blocks)
        self.num_stores += 1
        alone, fenced = (job_id,), self.fenced
        for block_id in device_blocks:
            others = fenced.get(block_id)
            fenced[block_id] = alone if others is None else (*others, job_id)
        return job_id

    def count(self, report: OffloadingWorkerMetadata) -> list[OpenTransfer]:
        """Count the workers' reports; return the jobs that have ended with them, oldest first.

        Effects:
            Ended jobs are closed: their fences are lifted, and their keys are neither loading nor void any more.
        """
        ended: list[OpenTransfer] = []
        # Oldest first: managers settle what a reset orphaned in the order of submission.
        for job_id in sorted(report.completed_jobs):
            job = self.by_id.get(job_id)
            if job is None:
                logger.error("job %d was reported but is not open: the report is ignored", job_id)
                continue
            job.num_reports_missing -= report.completed_jobs[job_id]
            job.has_failed |= job_id in report.failed_jobs
            if job.num_reports_missing > 0:
                continue
            ended.append(job)
            del self.by_id[job_id]
            if job.kind is JobKind.LOAD:
                self._end_load(job.state.context.req_id)
            else:
                self.num_stores -= 1
            if job.fenced_blocks:
                self._lift_fence(job)
            if job.is_void:
                self.void_keys.difference_update(job.keys)
            elif job.kind is JobKind.LOAD:
                for key in job.keys:
                    self.loading.pop(key, None)
        return ended

    def stats(self) -> dict[str, float]:
        """Return how many jobs are open, and how many stores fence device blocks, by dotted name. Thread: any."""
        return {
            "connector.open_jobs": float(len(self.by_id)),
            "connector.fenced_jobs": float(self.num_fenced_stores),
        }

    def find_load_of(self, keys: Iterable[OffloadKey]) -> TransferJobId | None:
        """Return an open load that reads one of ``keys``, or None."""
        loading = self.loading
        return next((loading[key] for key in keys if key in loading), None)

    def take_fenced(self, block_ids: Collection[int]) -> set[TransferJobId]:
        """Return the stores that read any of ``block_ids``, and lift their fences.

        The caller makes every worker finish them in this step, so a second answer would make them wait twice.
        """
        job_ids = {job_id for block_id in self.fenced.keys() & block_ids for job_id in self.fenced[block_id]}
        # Each worker handles metadata in order, so once a flush is sent nothing later can overtake it.
        for job_id in job_ids:
            self._lift_fence(self.by_id[job_id])
        return job_ids

    def void_all(self) -> set[TransferJobId]:
        """Make every open job void, as a reset does, and return the loads among them."""
        for job in self.by_id.values():
            job.is_void = job.has_failed = True
            self.void_keys.update(job.keys)
        self.loading.clear()
        return {job.job_id for job in self.by_id.values() if job.kind is JobKind.LOAD}

    def _end_load(self, req_id: str) -> None:
        num_open = self.loading_requests.pop(req_id) - 1
        if num_open:
            self.loading_requests[req_id] = num_open

    def _lift_fence(self, job: OpenTransfer) -> None:
        for block_id in job.fenced_blocks:
            readers = self.fenced.pop(block_id)
            if len(readers) > 1:
                self.fenced[block_id] = tuple(other for other in readers if other != job.job_id)
        job.fenced_blocks = []
