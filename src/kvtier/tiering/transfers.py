"""Carries out promotions and cascades: opens their jobs, submits them, and settles each exactly once.

It decides neither what is promoted nor what is cascaded. A job pins (cascade) or reserves (promotion) its slots
from here until its tier reports it; whatever the tier does, the slots come back once and only then.
"""

from collections.abc import Collection, Iterable, Sequence

from kvtier.base import OffloadKey, ReqContext
from kvtier.errors import InvariantError
from kvtier.tiering.base import JobResult
from kvtier.tiering.cascade import PlannedCascade
from kvtier.tiering.guard import Submission, TierGuard
from kvtier.tiering.jobs import JobTable, OpenJob
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager
from kvtier.tiering.promotion import PlannedPromotion


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
        self.promoting: dict[OffloadKey, TierGuard] = {}
        self.num_failed_promotions = 0

    def reserve(
        self, guard: TierGuard, key: OffloadKey, req_context: ReqContext, protected: Collection[OffloadKey]
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

    def poll(self, guard: TierGuard) -> list[OffloadKey]:
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

    def record_overdue(self, keys: Collection[OffloadKey], guards: Iterable[TierGuard]) -> None:
        """Tell each tier that a request passed its deadline waiting for ``keys`` from it."""
        loading = {id(self.promoting[key]) for key in keys if key in self.promoting}
        for guard in guards:
            guard.record_overdue(keys, is_loading=id(guard) in loading)

    def _submit(self, job: OpenJob) -> list[OffloadKey]:
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

    def _finish(self, job: OpenJob, result: JobResult) -> list[OffloadKey]:
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
            note_events(job, arrived, is_fault=result.is_fault)
        return self._settle(job, arrived)

    def _settle(
        self, job: OpenJob, arrived: Sequence[OffloadKey], *, is_tried: bool = True
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
        self, job: OpenJob, arrived: Sequence[OffloadKey], *, is_tried: bool
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

    def _bury(self, guard: TierGuard) -> list[OffloadKey]:
        """Give back the slots of a tier that is out of service, once it is gone for good."""
        jobs = self.jobs.of_tier(guard)
        if not jobs or not guard.shutdown(0.0):
            return []
        ended: list[OffloadKey] = []
        for job in jobs:
            self.jobs.close(job.metadata.job_id, guard)
            ended += self._settle(job, ())
        return ended


def note_events(job: OpenJob, arrived: Sequence[OffloadKey], *, is_fault: bool) -> None:
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
