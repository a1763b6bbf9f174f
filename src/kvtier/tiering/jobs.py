"""What is in flight between the primary tier and the secondary ones, and what it pins.

It starts nothing and completes nothing; it numbers jobs, remembers which tier has which, and takes each back
exactly once. A result for a job that the tier does not have, or no longer has, is nobody's and is counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.base import BlockIds, JobId, OffloadKey, ReqContext
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.guard import TierGuard


@dataclass(slots=True)
class OpenJob:
    """A job that has not been reported.

    Attributes:
        metadata: what the tier was given.
        guard: the tier.
        is_stale: True once a reset has forgotten its blocks; only its slots are left to settle.
    """

    metadata: JobMetadata
    guard: TierGuard
    is_stale: bool = False


class JobTable:
    """The open jobs of every tier, by id."""

    def __init__(self) -> None:
        self._open: dict[JobId, OpenJob] = {}
        self._next_id = 0
        self.num_unknown_results = 0

    def open(
        self,
        guard: TierGuard,
        keys: Iterable[OffloadKey],
        block_ids: Sequence[int] | BlockIds,
        req_context: ReqContext,
        *,
        is_promotion: bool,
    ) -> OpenJob:
        """Number a new job and remember it until it is closed."""
        slots = np.asarray(block_ids, dtype=np.int64)
        metadata = JobMetadata(JobId(self._next_id), tuple(keys), slots, is_promotion, req_context)
        self._next_id += 1
        job = OpenJob(metadata, guard)
        self._open[metadata.job_id] = job
        return job

    def close(self, job_id: JobId, guard: TierGuard) -> OpenJob | None:
        """Take a job back; None, counted, when ``guard`` has no such job open."""
        job = self._open.get(job_id)
        if job is None or job.guard is not guard:
            self.num_unknown_results += 1
            return None
        return self._open.pop(job_id)

    def of_tier(self, guard: TierGuard) -> list[OpenJob]:
        """Return the open jobs of one tier, oldest first."""
        return [job for job in self._open.values() if job.guard is guard]

    def mark_stale(self) -> None:
        """Note that a reset has forgotten the blocks of every open job."""
        for job in self._open.values():
            job.is_stale = True

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)
