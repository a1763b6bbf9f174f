"""A tier with threads whose place evicts on its own, and that tells what has left.

It evicts nothing and knows no place. Its part is the order of the news: whoever hears of a store when it is
reported must not have heard of the block's eviction before it.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from kvtier.base import JobId, OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.tiering.base import EvictionReporter, JobMetadata, JobResult
from kvtier.tiering.block_store import BlockStore
from kvtier.tiering.pooled import PooledTier, PoolOptions

S = TypeVar("S")


class EvictingTier(PooledTier[S], EvictionReporter):
    """What a subclass has to add to a PooledTier is ``_take_untold``.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        block_store: the place.
        options: how the threads work.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the engine's keys change from process to process, or do not fit into an envelope.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        block_store: BlockStore[S],
        options: PoolOptions,
        clock: Callable[[], float],
    ) -> None:
        self._open_stores: dict[JobId, tuple[OffloadKey, ...]] = {}
        super().__init__(config, primary_kv_view, block_store, options, clock)

    def submit_store(self, job: JobMetadata) -> None:
        """Start writing the job's slots; raises as the class above does."""
        super().submit_store(job)
        if self.settings.emit_events:
            self._open_stores[job.job_id] = job.keys

    def get_finished(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each once."""
        results = list(super().get_finished())
        for result in results:
            self._open_stores.pop(result.job_id, None)
        return results

    def take_evicted(self) -> Collection[OffloadKey]:
        """Return the blocks of this epoch that this process evicted or found damaged and that are not back, each once.

        Those whose store has not been reported yet wait, so that it is told before their eviction.
        """
        return self._take_untold(frozenset().union(*self._open_stores.values()))

    @abstractmethod
    def _take_untold(self, being_stored: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Return what has left and is not back; those in ``being_stored`` are kept for a later call."""
