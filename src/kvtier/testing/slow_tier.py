"""A tier around a tier whose loads take time on a clock that the test moves.

It adds no storage and no thread: one load after another has the link, and is carried out and reported at the first poll
after its time has come. Stores take none.
"""

from collections import deque
from collections.abc import Callable, Iterable

from kvtier.testing.wrapped_tier import WrappedTier
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager


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
        """Return "slow"."""
        return "slow"

    def submit_load(self, job: JobMetadata) -> None:
        """Queue a load behind those before it."""
        self.num_loaded_blocks += len(job.keys)
        self._free_s = max(self._free_s, self._clock()) + self.latency_s + self.block_s * len(job.keys)
        self._loads.append((self._free_s, job))

    def get_finished(self) -> Iterable[JobResult]:
        """Carry out the loads whose time has come, and report what has ended."""
        while self._loads and self._loads[0][0] <= self._clock():
            self.inner.submit_load(self._loads.popleft()[1])
        return self.inner.get_finished()

    def drain(self, timeout_s: float) -> bool:
        """Pass on; loads whose time has not come do not end, however long anybody waits."""
        return self.inner.drain(timeout_s) and not self._loads

    def shutdown(self, timeout_s: float) -> bool:
        """End the inner tier; what was not due is never carried out."""
        self._loads.clear()
        return self.inner.shutdown(timeout_s)
