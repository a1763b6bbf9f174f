"""What is in flight between the primary tier and the secondary ones, and what it pins.

A promotion is prepared (its slot is reserved and its write in flight), started at the end of the step as one job for
each tier and request, and ends with the tier's report. A cascade is pinned and started at once. Each job has one
record, ``TierJob``, from its submit to its report; a reset makes the record stale, and then only its slots
are released. A report of a job that the tier does not have, or no longer has, is counted and ignored.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.errors import InvariantError
from kvtier.tiering.announcements import Announcements
from kvtier.tiering.base import JobMetadata, JobResult
from kvtier.tiering.breaker import Submission
from kvtier.tiering.cascade import PlannedCascade
from kvtier.tiering.departures import TierDeparture
from kvtier.tiering.guard import GuardedTier


@dataclass(eq=False, slots=True)
class TierJob:
    """A job that has not been reported.

    Attributes:
        metadata: what the tier was given; its request owns the job.
        tier: the tier.
        num_bytes: bytes of its rows.
        started_s: the clock's reading when it was submitted.
        is_stale: True once a reset has forgotten its blocks.
    """

    metadata: JobMetadata
    tier: GuardedTier
    num_bytes: int
    started_s: float
    is_stale: bool = False


class TierJobs:
    """The open jobs of every tier.

    Args:
        tiers: those that may have jobs.

    Attributes:
        of_tier: the open jobs of each tier by id. INVARIANT: oldest first, so that the oldest is one look.
        num_unknown_results: reports of jobs that were not open.
    """

    def __init__(self, tiers: Iterable[GuardedTier]) -> None:
        self.of_tier: dict[GuardedTier, dict[JobId, TierJob]] = {tier: {} for tier in tiers}
        self._next_id = 0
        self.num_unknown_results = 0

    def open(
        self,
        tier: GuardedTier,
        keys: Iterable[OffloadKey],
        block_ids: Sequence[int],
        req_context: ReqContext,
        *,
        is_promotion: bool,
        now_s: float,
    ) -> TierJob:
        """Number a new job and remember it until it is closed."""
        slots = np.asarray(block_ids, dtype=np.int64)
        metadata = JobMetadata(JobId(self._next_id), tuple(keys), slots, is_promotion, req_context)
        self._next_id += 1
        job = TierJob(metadata, tier, len(slots) * tier.row_bytes, now_s)
        self.of_tier[tier][metadata.job_id] = job
        return job

    def close(self, job_id: JobId, tier: GuardedTier) -> TierJob | None:
        """Take a job back; None, counted, when ``tier`` has no such job open."""
        job = self.of_tier[tier].pop(job_id, None)
        if job is None:
            self.num_unknown_results += 1
        return job

    def mark_stale(self) -> None:
        """Record that a reset has forgotten the blocks of every open job."""
        for job in self:
            job.is_stale = True

    def __iter__(self) -> Iterator[TierJob]:
        return (job for jobs in self.of_tier.values() for job in jobs.values())

    def __len__(self) -> int:
        return sum(map(len, self.of_tier.values()))


@dataclass(slots=True)
class PlannedPromotion:
    """One promotion to submit.

    Attributes:
        tier: the tier to load from.
        req_context: the request whose lookups found the blocks.
        keys: the blocks, in lookup order.
        block_ids: the slots reserved for them, in the same order.
    """

    tier: GuardedTier
    req_context: ReqContext
    keys: list[OffloadKey] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class EndedPromotions(NamedTuple):
    """Blocks whose promotion has ended.

    Attributes:
        arrived: those that are ready now.
        failed: those that are absent.
    """

    arrived: list[OffloadKey]
    failed: list[OffloadKey]


class TierTransfers:
    """The jobs between the primary tier and the secondary ones.

    Args:
        primary: the primary tier.
        tiers: the secondary ones.
        on_evicted: called with blocks that a promotion has evicted from the primary.
        on_unwritten: called with a tier, blocks that it was given and has not got, and why; they are still pinned.
        clock: seconds, monotonic.

    Attributes:
        jobs: what is in flight.
        planned: the promotions of the present step, by tier and request, oldest first.
        promoting: keys with a slot reserved for a promotion, submitted or not, and the tier they come from.
        num_failed_promotions: blocks that a tier was to load and did not.
        num_without_room: blocks that were found in a tier and for which host memory had no slot.
    """

    def __init__(
        self,
        primary: CPUPrimaryTierOffloadingManager,
        tiers: Iterable[GuardedTier],
        on_evicted: Callable[[Collection[OffloadKey]], None],
        on_unwritten: Callable[[GuardedTier, Sequence[OffloadKey], TierDeparture], None],
        clock: Callable[[], float],
    ) -> None:
        self._manager = primary
        self._table = primary.table
        self._on_evicted = on_evicted
        self._on_unwritten = on_unwritten
        self._clock = clock
        self.jobs = TierJobs(tiers)
        self.planned: dict[tuple[GuardedTier, ReqContext], PlannedPromotion] = {}
        self.promoting: dict[OffloadKey, GuardedTier] = {}
        self.num_failed_promotions = 0
        self.num_without_room = 0

    def prepare_promotion(
        self, tier: GuardedTier, key: OffloadKey, req_context: ReqContext, protected: Collection[OffloadKey]
    ) -> bool:
        """Reserve a slot for ``key`` and plan its load; False when nothing can make room.

        A tier that is being tried again is reserved for this request: lookups of others do not find its blocks.
        """
        table, breaker = self._table, tier.breaker
        if not (table.slots.num_free or table.num_evictable):
            self.num_without_room += 1
            return False
        if not (breaker.is_closed or breaker.allows(req_context)):
            return False
        if not table.slots.num_free:
            evicted = self._manager.evict(1, (), protected, new=(key,))
            if evicted is None:
                self.num_without_room += 1
                return False
            self._on_evicted(evicted)
        slot = table.assign_one(key)
        if not breaker.is_closed:
            breaker.begin(req_context)
        self.promoting[key] = tier
        batch = (tier, req_context)
        planned = self.planned.get(batch)
        if planned is None:
            planned = self.planned[batch] = PlannedPromotion(tier, req_context)
        planned.keys.append(key)
        planned.block_ids.append(slot)
        return True

    def num_planned_blocks(self, tier: GuardedTier) -> int:
        """Return how many blocks this step has planned to load from one tier."""
        return sum(len(planned.keys) for planned in self.planned.values() if planned.tier is tier)

    def start_promotions(self) -> list[OffloadKey]:
        """Submit what was planned; return the keys that have failed at once."""
        planned, self.planned = self.planned, {}
        failed: list[OffloadKey] = []
        for batch in planned.values():
            failed += self._start(
                batch.tier, batch.keys, batch.block_ids, batch.req_context, is_promotion=True
            ).failed
        return failed

    def cancel_promotions(self) -> list[OffloadKey]:
        """Give back what was reserved for planned promotions; return their keys."""
        planned, self.planned = self.planned, {}
        for batch in planned.values():
            for key in batch.keys:
                self.promoting.pop(key, None)
            self._manager.finish_writes(batch.keys, success=False, is_promotion=True)
        return [key for batch in planned.values() for key in batch.keys]

    def cascade(self, planned: PlannedCascade, req_context: ReqContext) -> None:
        """Pin the blocks, take their bytes from the tier's budget and submit the store."""
        tier, keys = planned.tier, planned.keys
        slots = self._table.pin_ready(keys)
        tier.in_flight_store_bytes += len(slots) * tier.row_bytes
        self._start(tier, keys, slots, req_context, is_promotion=False)

    def poll(self, tier: GuardedTier) -> EndedPromotions:
        """Take a tier's reports; return the blocks whose promotion has ended by them."""
        ended = EndedPromotions([], [])
        results = tier.get_finished()
        for result in results:
            job = self.jobs.close(result.job_id, tier)
            if job is not None:
                self._finish(job, result, ended)
        if results and tier.load_times is not None:
            tier.load_times.learn()
        jobs = self.jobs.of_tier[tier]
        if jobs:
            tier.check_age(next(iter(jobs.values())).started_s)
            if not tier.reports_jobs and tier.shutdown(0.0):
                # The tier is gone for good: no thread of it writes any more, and its slots are given back.
                for job in list(jobs.values()):
                    self.jobs.close(job.metadata.job_id, tier)
                    if not (job.is_stale or job.metadata.is_promotion):
                        self._on_unwritten(tier, job.metadata.keys, TierDeparture.JOB_FAILED)
                    self._release(job, (), ended)
        return ended

    def on_reset(self) -> None:
        """Right after the primary was reset: from now on the open jobs are stale, and only release their slots."""
        for job in self.jobs:
            if not job.is_stale:
                is_write = job.metadata.is_promotion
                self._table.orphans.claim(job.metadata.block_ids.tolist(), is_write=is_write)
        self.promoting.clear()
        self.jobs.mark_stale()

    def open_jobs_stats(self, tier: GuardedTier) -> dict[str, float]:
        """Return how many jobs of a tier have not been reported, and their blocks. Thread: any."""
        jobs = [job.metadata for job in tuple(self.jobs.of_tier[tier].values())]
        promotions = [len(job.keys) for job in jobs if job.is_promotion]
        cascades = [len(job.keys) for job in jobs if not job.is_promotion]
        return {
            "promotion_jobs": float(len(promotions)),
            "promoting_blocks": float(sum(promotions)),
            "cascade_jobs": float(len(cascades)),
            "cascading_blocks": float(sum(cascades)),
        }

    def check(self) -> None:
        """Raise InvariantError when a key is being promoted without a write in flight."""
        for key in self.promoting:
            if not self._table.is_in_flight(key):
                raise InvariantError(f"{key.hex()} is being promoted but no write of it is in flight")

    def record_overdue(self, keys: Collection[OffloadKey], tiers: Iterable[GuardedTier]) -> None:
        """Count, for each tier, a request that passed its deadline waiting for ``keys`` from it."""
        loading = {self.promoting[key] for key in keys if key in self.promoting}
        for tier in tiers:
            tier.record_overdue(keys, is_loading=tier in loading)

    def _start(
        self,
        tier: GuardedTier,
        keys: Sequence[OffloadKey],
        block_ids: Sequence[int],
        req_context: ReqContext,
        *,
        is_promotion: bool,
    ) -> EndedPromotions:
        """Open a job and submit it; return the blocks of a promotion that has failed at once."""
        now_s = self._clock()
        job = self.jobs.open(tier, keys, block_ids, req_context, is_promotion=is_promotion, now_s=now_s)
        if tier.announcements is not None:
            tier.announcements.begin_job(job.metadata.keys)
        submission = tier.submit(job.metadata)
        ended = EndedPromotions([], [])
        if submission is Submission.STARTED:
            if is_promotion and tier.load_times is not None:
                tier.load_times.begin(job.num_bytes)
            return ended
        self.jobs.close(job.metadata.job_id, tier)
        is_declined = submission is Submission.DECLINED
        if not is_promotion:
            why = TierDeparture.DECLINED if is_declined else TierDeparture.JOB_FAILED
            self._on_unwritten(tier, keys, why)
        self._release(job, (), ended, is_tried=not is_declined)
        return ended

    def _finish(self, job: TierJob, result: JobResult, ended: EndedPromotions) -> None:
        """Release what a reported job used, and record what it means for the tier."""
        tier, metadata = job.tier, job.metadata
        keys = metadata.keys
        arrived: Sequence[OffloadKey] = keys
        if not result.success:
            successful = result.successful_keys or ()
            arrived = [key for key in keys if key in successful]
        tier.count_ended(metadata, result, job.started_s)
        if metadata.is_promotion and tier.load_times is not None:
            is_whole = len(arrived) == len(keys)
            tier.load_times.end(job.num_bytes, job.started_s, is_whole=is_whole, took_s=result.took_s)
        if result.is_fault and not (result.success or arrived):
            tier.breaker.record_failure(metadata.req_context)
        elif tier.breaker.has_failures:
            tier.breaker.record_success(metadata.req_context)
        if len(arrived) < len(keys) and not job.is_stale:
            self._report_left_out(job, left_out(keys, arrived), result)
        self._release(job, arrived, ended)

    def _report_left_out(self, job: TierJob, keys: Sequence[OffloadKey], result: JobResult) -> None:
        """Record which blocks of a reported job did not arrive, and why."""
        if job.metadata.is_promotion:
            why = TierDeparture.LOAD_FAILED if result.is_fault else TierDeparture.EVICTED
            job.tier.departed.add(keys, why)
        else:
            why = TierDeparture.JOB_FAILED if result.is_fault else TierDeparture.NO_ROOM
            self._on_unwritten(job.tier, keys, why)

    def _release(
        self, job: TierJob, arrived: Sequence[OffloadKey], ended: EndedPromotions, *, is_tried: bool = True
    ) -> None:
        """Give back what a closed job pinned or reserved.

        Args:
            job: the job.
            arrived: which of its keys arrived, in its order.
            ended: receives the keys of a promotion.
            is_tried: whether the job was submitted; only then failed keys are left alone for a while.
        """
        tier, metadata = job.tier, job.metadata
        if not metadata.is_promotion:
            tier.in_flight_store_bytes -= job.num_bytes
        if tier.announcements is not None and not job.is_stale:
            report_to_routers(job, tier.announcements, arrived, is_tried=is_tried)
        if job.is_stale:
            self._table.orphans.settle_slots(metadata.block_ids.tolist(), is_write=metadata.is_promotion)
            return
        if not metadata.is_promotion:
            self._table.unpin_each(metadata.keys)
            return
        for key in metadata.keys:
            self.promoting.pop(key, None)
        finish_writes = self._manager.finish_writes
        finish_writes(arrived, success=True, is_promotion=True)
        tier.num_promoted_blocks += len(arrived)
        ended.arrived.extend(arrived)
        if tier.backoff.pauses:
            tier.backoff.record_successes(arrived)
        if len(arrived) < len(metadata.keys):
            failed = left_out(metadata.keys, arrived)
            ended.failed.extend(failed)
            finish_writes(failed, success=False, is_promotion=True)
            self.num_failed_promotions += len(failed)
            for key in failed if is_tried else ():
                tier.backoff.record_failure(key)


def report_to_routers(
    job: TierJob, announcements: Announcements, arrived: Sequence[OffloadKey], *, is_tried: bool
) -> None:
    """Record what a closed job has shown of its blocks.

    A block whose load failed is left alone for a while, whatever the cause: until then it cannot be had, not even
    when it is stored again.

    Args:
        job: the job, whose keys the tier's back-off does not know the outcome of yet.
        announcements: of its tier.
        arrived: which of its keys arrived.
        is_tried: whether it was submitted.
    """
    keys, is_promotion, backoff = job.metadata.keys, job.metadata.is_promotion, job.tier.backoff
    if backoff.pauses and not is_promotion:
        arrived = [key for key in arrived if not backoff.is_paused(key)]
    announcements.end_job(keys, frozenset(arrived), is_load=is_promotion and is_tried)


def left_out(keys: Sequence[OffloadKey], arrived: Collection[OffloadKey]) -> list[OffloadKey]:
    """Return those of ``keys``, distinct, that are not in ``arrived``. Pure."""
    found = frozenset(arrived)
    return [key for key in keys if key not in found]
