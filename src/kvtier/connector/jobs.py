"""Device blocks that an unfinished store still reads.

It waits for nobody. A store holds no device block: the engine may free the block and give it to another
request. Whoever is about to write to it asks here, and the worker finishes those stores first.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from kvtier.base import OffloadKey, TransferJobId
from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.connector.request_state import RequestState


class BlockFences:
    """Which unfinished stores read which device blocks.

    Blocks are told apart by number alone. Engines whose groups have separate pools would at worst finish a
    store too early, never too late.
    """

    def __init__(self) -> None:
        # A tuple that all blocks of a store share, for it is rare that two stores read one block.
        self._jobs_by_block: dict[int, tuple[TransferJobId, ...]] = {}
        self._blocks_by_job: dict[TransferJobId, list[int]] = {}

    def add(self, job_id: TransferJobId, block_ids: list[int]) -> None:
        """Fence ``block_ids`` until the store ``job_id`` is removed."""
        self._blocks_by_job[job_id] = block_ids
        alone, jobs_by_block = (job_id,), self._jobs_by_block
        for block_id in block_ids:
            others = jobs_by_block.get(block_id)
            jobs_by_block[block_id] = alone if others is None else (*others, job_id)

    def remove(self, job_id: TransferJobId) -> None:
        """Lift the fence of a store; one that has none is ignored."""
        for block_id in self._blocks_by_job.pop(job_id, ()):
            jobs = self._jobs_by_block.pop(block_id)
            if len(jobs) > 1:
                self._jobs_by_block[block_id] = tuple(other for other in jobs if other != job_id)

    def take(self, block_ids: Collection[int]) -> set[TransferJobId]:
        """Return the stores that read any of ``block_ids``, and lift their fences.

        The caller makes every worker finish them in this step, so asking a second time would wait twice.
        """
        jobs_by_block = self._jobs_by_block
        if not jobs_by_block or not block_ids:
            return set()
        fenced = jobs_by_block.keys() & block_ids
        job_ids = {job_id for block_id in fenced for job_id in jobs_by_block[block_id]}
        # Each worker handles metadata in order, so once a flush is sent nothing later can overtake it.
        for job_id in job_ids:
            self.remove(job_id)
        return job_ids

    def __len__(self) -> int:
        return len(self._blocks_by_job)


logger = logging.getLogger(__name__)


class JobKind(Enum):
    """Which way a job moves bytes."""

    LOAD = "load"
    STORE = "store"


@dataclass(eq=False, slots=True)
class OpenTransfer:
    """A job that not every worker has reported yet.

    Attributes:
        job_id: its number.
        kind: which way it moves bytes.
        state: the request on whose behalf; the request itself may have ended.
        keys: what the manager has prepared for it.
        num_reports_missing: workers that have not reported it.
        has_failed: whether a worker reported a failure, or a reset made it void.
        is_void: whether a reset came after it was begun.
    """

    job_id: TransferJobId
    kind: JobKind
    state: RequestState
    keys: list[OffloadKey]
    num_reports_missing: int
    has_failed: bool = False
    is_void: bool = False


class TransferJobs:
    """The open jobs of the scheduler half.

    Args:
        num_workers: workers that report each job.

    Attributes:
        num_stores: how many of them are stores.
        loading: for each key that is being loaded the load.
        void_keys: keys of open jobs that a reset made void. They are not stored again before those jobs end:
            the manager is told of an end by key, and could not tell the old transfer from the new.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._open: dict[TransferJobId, OpenTransfer] = {}
        self._num_jobs = 0
        self.num_stores = 0
        self.loading: dict[OffloadKey, TransferJobId] = {}
        self.void_keys: set[OffloadKey] = set()

    @property
    def num_loads(self) -> int:
        """How many of them are loads."""
        return len(self._open) - self.num_stores

    def open(self, kind: JobKind, state: RequestState, keys: list[OffloadKey]) -> TransferJobId:
        """Add a job and return its number."""
        job_id = TransferJobId(self._num_jobs)
        self._num_jobs += 1
        self._open[job_id] = OpenTransfer(job_id, kind, state, keys, self._num_workers)
        self.num_stores += kind is JobKind.STORE
        if kind is JobKind.LOAD:
            self.loading.update(dict.fromkeys(keys, job_id))
        return job_id

    def count(self, report: OffloadingWorkerMetadata) -> list[OpenTransfer]:
        """Count what workers reported and return the jobs that ended by it, oldest first."""
        ended: list[OpenTransfer] = []
        # Oldest first: managers settle what a reset orphaned in the order of submission.
        for job_id in sorted(report.completed_jobs):
            job = self._open.get(job_id)
            if job is None:
                logger.error("job %d was reported but is not open: the report is ignored", job_id)
                continue
            job.num_reports_missing -= report.completed_jobs[job_id]
            job.has_failed |= job_id in report.failed_jobs
            if job.num_reports_missing <= 0:
                ended.append(self._close(job))
        return ended

    def find_load_of(self, keys: Iterable[OffloadKey]) -> TransferJobId | None:
        """Return a load under way that reads one of ``keys``, or None; while nothing loads, none is looked at."""
        if not self.loading:
            return None
        return next((self.loading[key] for key in keys if key in self.loading), None)

    def void_all(self) -> set[TransferJobId]:
        """Make every open job void, as a reset does, and return the loads among them."""
        for job in self._open.values():
            job.is_void = job.has_failed = True
            self.void_keys.update(job.keys)
        self.loading.clear()
        return {job.job_id for job in self._open.values() if job.kind is JobKind.LOAD}

    def _close(self, job: OpenTransfer) -> OpenTransfer:
        del self._open[job.job_id]
        self.num_stores -= job.kind is JobKind.STORE
        if job.is_void:
            self.void_keys.difference_update(job.keys)
        elif job.kind is JobKind.LOAD:
            for key in job.keys:
                self.loading.pop(key, None)
        return job

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._open

    def __len__(self) -> int:
        return len(self._open)
