"""The values that the two halves of the connector exchange, and the events they publish.

The scheduler half sends one OffloadingConnectorMetadata a step to every worker. Each worker returns an
OffloadingWorkerMetadata, and the engine sums these. The values cross process boundaries, so they are plain data.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvtier.base import (
    LoadStoreSpec,
    Locality,
    OffloadingEvent,
    TransferJobId,
    TransferSpec,
    get_offload_block_hash,
    get_offload_group_idx,
)


class ConnectorRole(Enum):
    """Which half of the connector a process runs."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class StopReason(Enum):
    """Why a request's answer ended, as recorded traces write it."""

    UNKNOWN = 0
    TOOL_USE = 1
    END_TURN = 2


class TransferSample(NamedTuple):
    """A copy between device and host memory that has ended well.

    Attributes:
        is_load: whether it went to the device.
        num_bytes: bytes moved.
        time_s: seconds of the copy itself.
    """

    is_load: bool
    num_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One transfer on behalf of one request.

    Attributes:
        req_id: the request.
        transfer_spec: where from and where to.
    """

    req_id: str
    transfer_spec: TransferSpec


class AuditReport(NamedTuple):
    """What one worker found when it compared blocks with what is held.

    Attributes:
        job_id: the job, which that worker has ended well.
        deviations: of each block, in the order of the job's keys: 0 for equal bytes, at most 1 within the tolerance.
    """

    job_id: TransferJobId
    deviations: tuple[float, ...]


class LostLoadStoreSpec(LoadStoreSpec):
    """The source of a load whose blocks were evicted before it could pin them.

    The engine already waits for that load, and only workers can end it: each reports it as failed.
    """

    @staticmethod
    def medium() -> str:
        return "LOST"


@dataclass(slots=True)
class OffloadingConnectorMetadata:
    """The work of every worker in one step. It defines no length and no truth value, so it is never "empty".

    The scheduler half and its features fill it; workers only read it.

    Attributes:
        load_jobs: to begin before the forward pass.
        store_jobs: to begin in the step after; their blocks are computed by this step or before.
        jobs_to_flush: stores to finish before anything writes to a device block in this step.
        jobs_to_fail: begun loads that a reset made void; workers report them as failed.
        is_idle: whether the step computes no token.
        measured_step: the number under which workers report the step, so that its time is known; None: not measured.
    """

    load_jobs: dict[TransferJobId, TransferJob]
    store_jobs: dict[TransferJobId, TransferJob]
    jobs_to_flush: set[TransferJobId] | None = None
    jobs_to_fail: set[TransferJobId] | None = None
    is_idle: bool = False
    measured_step: int | None = None


@dataclass(slots=True)
class OffloadingWorkerMetadata:
    """The workers' reports of one step.

    Attributes:
        completed_jobs: how many workers have ended each job, well or badly.
        failed_jobs: the jobs that failed on at least one of them.
        region_identities: identity of the region of each worker that reports for the first time.
        load_bytes: bytes of loads that ended, all workers together.
        load_time_s: seconds that copying them took; workers copy at the same time, so it is the longest of them.
        measured_step: number of the step that this reports; None when its time is not measured.
        transfers: the copies that ended well, each of a job in ``completed_jobs``.
        audits: the comparisons that ended well, likewise.
    """

    completed_jobs: dict[TransferJobId, int] = field(default_factory=dict)
    failed_jobs: frozenset[TransferJobId] = frozenset()
    region_identities: tuple[tuple[int, int], ...] = ()
    load_bytes: int = 0
    load_time_s: float = 0.0
    measured_step: int | None = None
    # Left out of comparisons: two reports of the same jobs are equal however long these took.
    transfers: tuple[TransferSample, ...] = field(default=(), compare=False)
    audits: tuple[AuditReport, ...] = ()

    def mark_completed(self, job_id: TransferJobId, success: bool = True) -> None:
        """Count that one worker has ended ``job_id``."""
        self.completed_jobs[job_id] = self.completed_jobs.get(job_id, 0) + 1
        if not success:
            self.failed_jobs |= {job_id}

    def aggregate(self, other: "OffloadingWorkerMetadata") -> "OffloadingWorkerMetadata":
        """Return the report of the workers behind both; changes neither."""
        completed_jobs = dict(self.completed_jobs)
        for job_id, num_workers in other.completed_jobs.items():
            completed_jobs[job_id] = completed_jobs.get(job_id, 0) + num_workers
        return OffloadingWorkerMetadata(
            completed_jobs,
            self.failed_jobs | other.failed_jobs,
            self.region_identities + other.region_identities,
            self.load_bytes + other.load_bytes,
            max(self.load_time_s, other.load_time_s),
            other.measured_step if self.measured_step is None else self.measured_step,
            self.transfers + other.transfers,
            self.audits + other.audits,
        )

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        is_measured = self.measured_step is not None
        return not (self.completed_jobs or self.region_identities or is_measured)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one KV group that the engine can load from a medium from now on.

    Attributes:
        block_hashes: their content hashes.
        medium: where: "CPU", or the type of a secondary tier.
        block_size: tokens in a block; 0, because the device cache's own events report sizes.
        group_idx: the KV group.
        tier: which secondary tier, unique within the engine; None for host memory.
        locality: where the medium is as seen from the engine; None when that is not known.
    """

    block_hashes: tuple[bytes, ...]
    medium: str
    block_size: int = 0
    group_idx: int = 0
    tier: str | None = None
    locality: Locality | None = Locality.LOCAL


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks of one KV group that the engine can no longer load from a medium.

    Attributes:
        block_hashes: their content hashes.
        medium: where: "CPU", or the type of a secondary tier.
        group_idx: the KV group.
        tier: which secondary tier, unique within the engine; None for host memory.
        locality: where the medium is as seen from the engine; None when that is not known.
    """

    block_hashes: tuple[bytes, ...]
    medium: str
    group_idx: int = 0
    tier: str | None = None
    locality: Locality | None = Locality.LOCAL


def make_block_events(event: OffloadingEvent) -> list[BlockStored | BlockRemoved]:
    """Return a manager's event for each KV group in it, with keys replaced by content hashes. Pure."""
    by_group: dict[int, list[bytes]] = {}
    for key in event.keys:
        by_group.setdefault(get_offload_group_idx(key), []).append(get_offload_block_hash(key))
    return [
        BlockRemoved(tuple(hashes), event.medium, group, event.tier, event.locality)
        if event.removed
        else BlockStored(tuple(hashes), event.medium, 0, group, event.tier, event.locality)
        for group, hashes in by_group.items()
    ]
