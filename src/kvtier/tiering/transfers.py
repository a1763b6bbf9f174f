"""What is in flight between the primary tier and the secondary ones, and what it pins.

It starts nothing and completes nothing; it numbers jobs, remembers which tier has which, and takes each back
exactly once. A result for a job that the tier does not have, or no longer has, is nobody's and is counted.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier.base import BlockIds, JobId, OffloadKey, ReqContext
from kvtier.errors import InvariantError
from kvtier.tiering.base import JobMetadata, JobResult
from kvtier.tiering.cascade import PlannedCascade
from kvtier.tiering.guard import GuardedTier, Submission
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager


@dataclass(slots=True)
class TierJob:
    """A job that has not been reported.

    Attributes:
        metadata: what the tier was given.
        guard: the tier.
        is_stale: True once a reset has forgotten its blocks; only its slots are left to settle.
    """

    metadata: JobMetadata
    guard: GuardedTier
    is_stale: bool = False


class JobTable:
    """The open jobs of every tier, by id."""

    def __init__(self) -> None:
        self._open: dict[JobId, TierJob] = {}
        self._next_id = 0
        self.num_unknown_results = 0

    def open(
        self,
        guard: GuardedTier,
        keys: Iterable[OffloadKey],
        block_ids: Sequence[int] | BlockIds,
        req_context: ReqContext,
        *,
        is_promotion: bool,
    ) -> TierJob:
        """Number a new job and remember it until it is closed."""
        slots = np.asarray(block_ids, dtype=np.int64)
        metadata = JobMetadata(JobId(self._next_id), tuple(keys), slots, is_promotion, req_context)
        self._next_id += 1
        job = TierJob(metadata, guard)
        self._open[metadata.job_id] = job
        return job

    def close(self, job_id: JobId, guard: GuardedTier) -> TierJob | None:
        """Take a job back; None, counted, when ``guard`` has no such job open."""
        job = self._open.get(job_id)
        if job is None or job.guard is not guard:
            self.num_unknown_results += 1
            return None
        return self._open.pop(job_id)

    def of_tier(self, guard: GuardedTier) -> list[TierJob]:
        """Return the open jobs of one tier, oldest first."""
        return [job for job in self._open.values() if job.guard is guard]

    def mark_stale(self) -> None:
        """Note that a reset has forgotten the blocks of every open job."""
        for job in self._open.values():
            job.is_stale = True

    def __iter__(self) -> Iterator[TierJob]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)


@dataclass(slots=True)
class PlannedPromotion:
    """One load to submit.

    Attributes:
        guard: the tier to load from.
        req_context: the request whose lookups found the blocks.
        keys: the blocks, in lookup order.
        block_ids: the slots reserved for them, in the same order.
    """

    guard: GuardedTier
    req_context: ReqContext
    keys: list[OffloadKey] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class WantedPromotions:
    """The wishes of the present step."""

    def __init__(self) -> None:
        self._planned: dict[tuple[GuardedTier, ReqContext], PlannedPromotion] = {}

    def add(self, guard: GuardedTier, req_context: ReqContext, key: OffloadKey, block_id: int) -> None:
        """Wish for ``key`` from ``guard`` into slot ``block_id``."""
        batch = (guard, req_context)
        planned = self._planned.get(batch)
        if planned is None:
            planned = self._planned[batch] = PlannedPromotion(guard, req_context)
        planned.keys.append(key)
        planned.block_ids.append(block_id)

    def num_blocks_of(self, guard: GuardedTier) -> int:
        """Return how many blocks are wished for from one tier."""
        return sum(len(planned.keys) for planned in self._planned.values() if planned.guard is guard)

    def take(self) -> list[PlannedPromotion]:
        """Return the batches, oldest first, and forget them."""
        if not self._planned:  # as in most steps
            return []
        planned, self._planned = list(self._planned.values()), {}
        return planned

    def __len__(self) -> int:
        return sum(len(planned.keys) for planned in self._planned.values())


class TierTransfers:
    """The jobs between the primary tier and the secondary ones.

    Args:
        primary: the primary tier.

    Attributes:
        jobs: what is in flight.
        promoting: keys with a slot reserved for a promotion, submitted or not, and the tier they come from.
        num_failed_promotions: blocks that a tier was to load and did not.
    """

    def __init__(self, primary: CPUPrimaryTierOffloadingManager) -> None:
        self._primary = primary
        self.jobs = JobTable()
        self.promoting: dict[OffloadKey, GuardedTier] = {}
        self.num_failed_promotions = 0

    def reserve(
        self, guard: GuardedTier, key: OffloadKey, req_context: ReqContext, protected: Collection[OffloadKey]
    ) -> int | None:
        """Reserve a slot for a promotion of ``key`` and return it; None when nothing can make room.

        A tier that is being probed is promised to this request: others are not led to wait for it.
        """
        if not self._primary.has_room() or not guard.breaker.allows(req_context):
            return None
        slot = self._primary.reserve_slot(key, protected)
        if slot is not None:
            guard.breaker.begin(req_context)
            self.promoting[key] = guard
        return slot

    def promote(self, planned: PlannedPromotion) -> list[OffloadKey]:
        """Submit a promotion; return the keys that have failed at once."""
        job = self.jobs.open(
            planned.guard, planned.keys, planned.block_ids, planned.req_context, is_promotion=True
        )
        return self._submit(job)

    def cancel(self, planned: PlannedPromotion) -> None:
        """Give back what was reserved for a promotion that has not been submitted."""
        self._end_promoting(planned.keys)
        self._primary.complete_write(planned.keys, planned.req_context, success=False)

    def cascade(self, planned: PlannedCascade, req_context: ReqContext) -> None:
        """Pin the blocks, take their bytes from the tier's budget and submit the store."""
        slots = self._primary.slots_of(self._primary.prepare_read(planned.keys, req_context))
        planned.guard.budget.take(len(planned.keys) * planned.guard.row_bytes)
        job = self.jobs.open(planned.guard, planned.keys, slots, req_context, is_promotion=False)
        self._submit(job)

    def poll(self, guard: GuardedTier) -> list[OffloadKey]:
        """Take a tier's reports; return the keys whose promotion has ended, well or badly."""
        ended: list[OffloadKey] = []
        for result in guard.get_finished():
            job = self.jobs.close(result.job_id, guard)
            if job is not None:
                ended += self._finish(job, result)
        guard.load_times.settle()
        if guard.is_out_of_service:
            ended += self._bury(guard)
        return ended

    def orphan(self) -> None:
        """Right after the primary was reset: from now on the open jobs only settle their slots."""
        for job in self.jobs:
            if not job.is_stale:
                is_write = job.metadata.is_promotion
                self._primary.claim_orphans(job.metadata.block_ids.tolist(), is_write=is_write)
        self.promoting.clear()
        self.jobs.mark_stale()

    def check(self) -> None:
        """Raise InvariantError when a key is being promoted without a write in flight."""
        for key in self.promoting:
            if not self._primary.is_in_flight(key):
                raise InvariantError(f"{key.hex()} is being promoted but no write of it is in flight")

    def record_overdue(self, keys: Collection[OffloadKey], guards: Iterable[GuardedTier]) -> None:
        """Tell each tier that a request passed its deadline waiting for ``keys`` from it."""
        loading = {id(self.promoting[key]) for key in keys if key in self.promoting}
        for guard in guards:
            guard.record_overdue(keys, is_loading=id(guard) in loading)

    def _submit(self, job: TierJob) -> list[OffloadKey]:
        submission = job.guard.submit(job.metadata)
        if submission is Submission.STARTED:
            if job.metadata.is_promotion:
                num_bytes = len(job.metadata.keys) * job.guard.row_bytes
                job.guard.load_times.begin(job.metadata.job_id, num_bytes)
            return []
        self.jobs.close(job.metadata.job_id, job.guard)
        is_declined = submission is Submission.DECLINED
        if is_declined and not job.metadata.is_promotion:
            job.guard.num_declined_cascades += len(job.metadata.keys)
        return self._settle(job, (), is_tried=not is_declined)

    def _finish(self, job: TierJob, result: JobResult) -> list[OffloadKey]:
        keys = job.metadata.keys
        if result.success:
            arrived: Sequence[OffloadKey] = keys
        else:
            successful = result.successful_keys or ()
            arrived = [key for key in keys if key in successful]
        is_whole = len(arrived) == len(keys)
        job.guard.load_times.end(job.metadata.job_id, is_whole=is_whole, took_s=result.took_s)
        is_well = result.success or bool(arrived) or not result.is_fault
        job.guard.breaker.record_end(job.metadata.req_context, is_well=is_well)
        if not job.is_stale:
            on_events(job, arrived, is_fault=result.is_fault)
        return self._settle(job, arrived)

    def _settle(
        self, job: TierJob, arrived: Sequence[OffloadKey], *, is_tried: bool = True
    ) -> list[OffloadKey]:
        """Give back what a job pinned or reserved; return the keys of a promotion.

        Args:
            job: the job, closed.
            arrived: which of its keys arrived, in its order.
            is_tried: whether the tier had a chance; keys that it was never asked for are not left alone.
        """
        metadata = job.metadata
        if not metadata.is_promotion:
            job.guard.budget.give_back(len(metadata.keys) * job.guard.row_bytes)
        if job.is_stale:
            self._primary.settle_orphans(metadata.block_ids.tolist(), is_write=metadata.is_promotion)
        elif metadata.is_promotion:
            return self._settle_promotion(job, arrived, is_tried=is_tried)
        else:
            self._primary.complete_read(metadata.keys, metadata.req_context)
        return []

    def _settle_promotion(
        self, job: TierJob, arrived: Sequence[OffloadKey], *, is_tried: bool
    ) -> list[OffloadKey]:
        """Make ready what arrived and give back the slots of the rest, which is left alone for a while."""
        metadata = job.metadata
        backoff = job.guard.backoff
        self._end_promoting(metadata.keys)
        self._primary.complete_write(arrived, metadata.req_context, success=True)
        job.guard.num_promoted_blocks += len(arrived)
        backoff.record_successes(arrived)
        failed = left_out(metadata.keys, arrived)
        if failed:
            self._primary.complete_write(failed, metadata.req_context, success=False)
            self.num_failed_promotions += len(failed)
        for key in failed if is_tried else ():
            backoff.record_failure(key)
        return list(metadata.keys)

    def _end_promoting(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self.promoting.pop(key, None)

    def _bury(self, guard: GuardedTier) -> list[OffloadKey]:
        """Give back the slots of a tier that is out of service, once it is gone for good."""
        jobs = self.jobs.of_tier(guard)
        if not jobs or not guard.shutdown(0.0):
            return []
        ended: list[OffloadKey] = []
        for job in jobs:
            self.jobs.close(job.metadata.job_id, guard)
            ended += self._settle(job, ())
        return ended


def on_events(job: TierJob, arrived: Sequence[OffloadKey], *, is_fault: bool) -> None:
    """Note what a tier has gained by a store, or turned out to have lost before a load."""
    if not job.metadata.is_promotion:
        job.guard.events.record(arrived, removed=False)
    elif not is_fault:
        job.guard.events.record(left_out(job.metadata.keys, arrived), removed=True)


def left_out(keys: Sequence[OffloadKey], arrived: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Return those of ``keys``, distinct, that are not in ``arrived``, some of them; mostly there are none. Pure."""
    if len(arrived) == len(keys):
        return []
    came = frozenset(arrived)
    return [key for key in keys if key not in came]
