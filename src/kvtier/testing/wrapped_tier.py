"""A tier around a tier that passes everything on, the optional abilities too: what wrappers of tests begin with.

It adds nothing. A wrapper overrides what it changes; whatever else a tier can do is passed on here, once for all,
or a tier behaves otherwise in tests than in use.
"""

from collections.abc import Collection, Iterable, Sequence

from kvtier.base import OffloadKey, ReqContext
from kvtier.tiering.base import (
    EvictionReporter,
    JobMetadata,
    JobResult,
    ReachableTier,
    RequestAware,
    SecondaryTierManager,
)


class WrappedTier(SecondaryTierManager, ReachableTier, RequestAware, EvictionReporter):
    """Passes everything on to another tier.

    An ability that the inner tier lacks is answered as if nothing had happened: its place is there, it has evicted
    nothing, of requests it is not told.

    Args:
        inner: the tier that does the work.

    Attributes:
        inner: the same.
    """

    def __init__(self, inner: SecondaryTierManager) -> None:
        super().__init__(inner.config, inner.primary_kv_view)
        self.settings = inner.settings
        self.capacity_blocks = inner.capacity_blocks
        self.inner = inner

    @staticmethod
    def get_tier_type() -> str:
        """Return "wrapped"."""
        return "wrapped"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Ask the inner tier."""
        return self.inner.lookup(key, req_context)

    def submit_store(self, job: JobMetadata) -> None:
        """Pass on."""
        self.inner.submit_store(job)

    def submit_load(self, job: JobMetadata) -> None:
        """Pass on."""
        self.inner.submit_load(job)

    def get_finished(self) -> Iterable[JobResult]:
        """Return what the inner tier reports."""
        return self.inner.get_finished()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Pass on."""
        self.inner.touch(keys, req_context)

    def request_finished(self, req_context: ReqContext) -> None:
        """Pass on."""
        self.inner.request_finished(req_context)

    def end_step(self) -> None:
        """Pass on."""
        self.inner.end_step()

    def take_answered(self) -> Collection[OffloadKey] | None:
        """Return what the inner tier has answers to."""
        return self.inner.take_answered()

    def waiting_s(self) -> float:
        """Return the inner tier's."""
        return self.inner.waiting_s()

    def drain(self, timeout_s: float) -> bool:
        """Pass on."""
        return self.inner.drain(timeout_s)

    def reset(self, epoch: bytes) -> None:
        """Pass on."""
        self.inner.reset(epoch)

    def stats(self) -> dict[str, float]:
        """Return the inner tier's numbers."""
        return self.inner.stats()

    def shutdown(self, timeout_s: float) -> bool:
        """End the inner tier."""
        return self.inner.shutdown(timeout_s)

    def check_reachable(self) -> None:
        """Ask the inner tier's place, if it has one."""
        if isinstance(self.inner, ReachableTier):
            self.inner.check_reachable()

    def take_unanswered(self) -> int:
        """Return how many of the inner tier's questions nobody has answered."""
        return self.inner.take_unanswered() if isinstance(self.inner, ReachableTier) else 0

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Tell the inner tier, if it wants to know."""
        if isinstance(self.inner, RequestAware):
            self.inner.note_request(chains, req_context)

    def take_evicted(self) -> Collection[OffloadKey]:
        """Return what the inner tier says that it has evicted."""
        return self.inner.take_evicted() if isinstance(self.inner, EvictionReporter) else ()
