"""A tier around a tier that fails on purpose: it is slow, fails, reports false results, loses blocks.

Faults are drawn from the given random source, or set by the test through fields, so that every failure can be repeated.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.errors import TierError
from kvtier.testing.wrapped_tier import WrappedTier
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager


@dataclass(slots=True)
class Faults:
    """Probability of each fault, from 0 to 1.

    Attributes:
        refuse_ratio: a submit raises and nothing is started.
        fail_ratio: a job is not carried out and reported as failed.
        delay_ratio: at a poll, a due job is postponed; its bytes move only then.
        unknown_ratio: at a poll, a result for an unknown job is reported too.
        repeat_ratio: a result is reported a second time.
        lookup_none_ratio: a lookup returns None.
        lookup_raise_ratio: a lookup raises.
        lose_ratio: at a load, one of its blocks is gone.
        poll_raise_ratio: a poll raises.
        claims_everything: every lookup returns True, whatever the inner tier holds.
        claims_success: a job that failed in parts is reported as a success, with the parts.
        refuses_to_end: a shutdown reports that threads are still running.
    """

    refuse_ratio: float = 0.0
    fail_ratio: float = 0.0
    delay_ratio: float = 0.0
    unknown_ratio: float = 0.0
    repeat_ratio: float = 0.0
    lookup_none_ratio: float = 0.0
    lookup_raise_ratio: float = 0.0
    lose_ratio: float = 0.0
    poll_raise_ratio: float = 0.0
    claims_everything: bool = False
    claims_success: bool = False
    refuses_to_end: bool = False


class FaultyTier(WrappedTier):
    """Forwards every call to another tier, except for its faults.

    A delayed job reaches the inner tier late, so its slots are really read or written late: a manager that reuses a
    slot before the report gets wrong bytes in it.

    Args:
        inner: the tier that does the work; it must end a job in its submit (not simulate_async).
        faults: how often each fault happens; may be changed at any time.
        rng: random source.
    """

    def __init__(self, inner: SecondaryTierManager, faults: Faults, rng: random.Random) -> None:
        super().__init__(inner)
        self.faults = faults
        self.num_submitted = 0
        self._rng = rng
        self._due: list[JobMetadata] = []
        self._before_reset: set[JobId] = set()
        self._results: list[JobResult] = []

    @staticmethod
    def get_tier_type() -> str:
        return "faulty"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._happens(self.faults.lookup_raise_ratio):
            raise TierError("faulty", "lookup failed on purpose")
        if self._happens(self.faults.lookup_none_ratio):
            return None
        return self.faults.claims_everything or self.inner.lookup(key, req_context)

    def submit_store(self, job: JobMetadata) -> None:
        self._submit(job)

    def submit_load(self, job: JobMetadata) -> None:
        self._submit(job)

    def get_finished(self) -> Iterable[JobResult]:
        if self._happens(self.faults.poll_raise_ratio):
            raise TierError("faulty", "get_finished failed on purpose")
        due, self._due = self._due, []
        for job in due:
            if self._happens(self.faults.delay_ratio):
                self._due.append(job)
            else:
                self._carry_out(job)
        results, self._results = self._results, []
        lies = [result for result in results if self._happens(self.faults.repeat_ratio)]
        if self._happens(self.faults.unknown_ratio):
            lies.append(JobResult(JobId(10**9 + self._rng.randrange(10**6)), success=True))
        return [*results, *lies]

    def drain_answered(self) -> None:
        self.inner.drain_answered()

    def reset(self, epoch: bytes) -> None:
        self._before_reset.update(job.job_id for job in self._due)
        self.inner.reset(epoch)

    def drain(self, timeout_s: float) -> bool:
        due, self._due = self._due, []
        for job in due:
            self._carry_out(job)
        return self.inner.drain(timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        if self.faults.refuses_to_end:
            return False
        self._results += [JobResult(job.job_id, success=False) for job in self._due]
        self._due.clear()
        return self.inner.shutdown(timeout_s)

    def _submit(self, job: JobMetadata) -> None:
        if self._happens(self.faults.refuse_ratio):
            raise TierError("faulty", "submit refused on purpose")
        self.num_submitted += 1
        self._due.append(job)

    def _carry_out(self, job: JobMetadata) -> None:
        if self._happens(self.faults.fail_ratio):
            self._results.append(JobResult(job.job_id, success=False))
            return
        if job.job_id in self._before_reset:
            self._results.append(self._finish_before_reset(job))
        elif job.is_promotion:
            self._results.append(self._load(job))
        else:
            self.inner.submit_store(job)
            self._results.extend(self.inner.get_finished())

    def _finish_before_reset(self, job: JobMetadata) -> JobResult:
        """End a job of an older epoch: a load still writes its slots and reports success."""
        if job.is_promotion:
            for slot in job.block_ids.tolist():
                self._spoil(slot)
        return JobResult(job.job_id, success=job.is_promotion)

    def _load(self, job: JobMetadata) -> JobResult:
        """Load through the inner tier; a lost block's slot gets random bytes and is reported as failed."""
        self.inner.submit_load(job)
        (result,) = self.inner.get_finished()
        if not self._happens(self.faults.lose_ratio):
            return result
        lost = self._rng.choice(job.keys)
        self._spoil(int(job.block_ids[job.keys.index(lost)]))
        came = frozenset(job.keys) if result.success else (result.successful_keys or frozenset())
        return JobResult(job.job_id, success=self.faults.claims_success, successful_keys=came - {lost})

    def _spoil(self, slot: int) -> None:
        whole = self.primary_kv_view.cast("B")
        row_bytes = whole.nbytes // len(self.primary_kv_view)
        whole[slot * row_bytes : (slot + 1) * row_bytes] = b"\xdb" * row_bytes

    def _happens(self, ratio: float) -> bool:
        return ratio > 0 and self._rng.random() < ratio
