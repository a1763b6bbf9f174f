"""A tier around a tier that passes everything on, the optional abilities too: what wrappers of tests begin with.

It adds nothing. A wrapper overrides what it changes; whatever else a tier can do is passed on here, once for all,
or a tier behaves otherwise in tests than in use.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import ModelIdentity
from kvtier.histogram import HistogramSnapshot
from kvtier.misses import Miss
from kvtier.tiering.base import JobMetadata, JobResult, PurgeOutcome, SecondaryTierManager


class WrappedTier(SecondaryTierManager):
    """Passes everything on to another tier.

    Args:
        inner: the tier that does the work.

    Attributes:
        inner: the same.
    """

    def __init__(self, inner: SecondaryTierManager) -> None:
        super().__init__(inner.config, inner.primary_kv_view, inner.settings)
        self.capacity_blocks = inner.capacity_blocks
        self.inner = inner

    @staticmethod
    def get_tier_type() -> str:
        return "wrapped"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.inner.lookup(key, req_context)

    def submit_store(self, job: JobMetadata) -> None:
        self.inner.submit_store(job)

    def submit_load(self, job: JobMetadata) -> None:
        self.inner.submit_load(job)

    def get_finished(self) -> Iterable[JobResult]:
        return self.inner.get_finished()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.inner.touch(keys, req_context)

    def request_finished(self, req_context: ReqContext) -> None:
        self.inner.request_finished(req_context)

    def end_step(self) -> None:
        self.inner.end_step()

    def drain_answered(self) -> Collection[OffloadKey] | None:
        return self.inner.drain_answered()

    def wait_indexed(self, timeout_s: float) -> bool:
        return self.inner.wait_indexed(timeout_s)

    def waiting_s(self) -> float:
        return self.inner.waiting_s()

    def drain(self, timeout_s: float) -> bool:
        return self.inner.drain(timeout_s)

    def reset(self, epoch: bytes) -> None:
        self.inner.reset(epoch)

    def switch_model(self, model: ModelIdentity) -> None:
        self.inner.switch_model(model)

    def stats(self) -> dict[str, float]:
        return self.inner.stats()

    def histograms(self) -> dict[str, HistogramSnapshot]:
        return self.inner.histograms()

    def shutdown(self, timeout_s: float) -> bool:
        return self.inner.shutdown(timeout_s)

    def check_reachable(self) -> None:
        self.inner.check_reachable()

    def drain_unanswered(self) -> int:
        return self.inner.drain_unanswered()

    def drain_emptied(self) -> bool:
        return self.inner.drain_emptied()

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        self.inner.note_request(chains, req_context)

    def drain_evicted(self) -> Collection[OffloadKey] | None:
        return self.inner.drain_evicted()

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        return self.inner.explain(key, req_context, behind)

    def purge(self, tenant: int | None = None) -> PurgeOutcome | None:
        return self.inner.purge(tenant)

    def poll_purge(self) -> PurgeOutcome | int:
        return self.inner.poll_purge()

    def drop(self, keys: Collection[OffloadKey]) -> None:
        self.inner.drop(keys)


class SlowTier(WrappedTier):
    """Passes everything on to another tier, loads late.

    Args:
        inner: the tier that does the work; it must end a job in its submit (not simulate_async).
        clock: seconds, monotonic.
        block_s: seconds that loading a block takes; may be changed at any time, for loads submitted later.
        latency_s: seconds that a load of any size takes beside those; likewise.

    Attributes:
        num_loaded_blocks: blocks of the loads that were submitted.
    """

    def __init__(
        self,
        inner: SecondaryTierManager,
        clock: Callable[[], float],
        block_s: float = 0.0,
        latency_s: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self.block_s = block_s
        self.latency_s = latency_s
        self.num_loaded_blocks = 0
        self._clock = clock
        self._free_s = 0.0
        self._loads: deque[tuple[float, JobMetadata]] = deque()

    @staticmethod
    def get_tier_type() -> str:
        return "slow"

    def submit_load(self, job: JobMetadata) -> None:
        self.num_loaded_blocks += len(job.keys)
        self._free_s = max(self._free_s, self._clock()) + self.latency_s + self.block_s * len(job.keys)
        self._loads.append((self._free_s, job))

    def get_finished(self) -> Iterable[JobResult]:
        while self._loads and self._loads[0][0] <= self._clock():
            self.inner.submit_load(self._loads.popleft()[1])
        return self.inner.get_finished()

    def drain(self, timeout_s: float) -> bool:
        return self.inner.drain(timeout_s) and not self._loads

    def shutdown(self, timeout_s: float) -> bool:
        self._loads.clear()
        return self.inner.shutdown(timeout_s)
