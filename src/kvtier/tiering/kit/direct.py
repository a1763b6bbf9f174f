"""A tier without a manager: for engines that have host memory of their own, and threads that may wait.

What a manager does for its tiers is the caller's here: it keeps a row as it is while a call uses it, and leaves a tier
alone that fails again and again. Answers are not cached: each is what the backend says now.
"""

import itertools
from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.tiering.base import JobMetadata, JobResult
from kvtier.tiering.kit.io_pool import IOPool

REQUEST = ReqContext("direct")
"""A caller without a manager has no requests that a tier would know."""


class DirectUse:
    """Calls of a tier that return when their work is done; several threads may call at once.

    Args:
        pool: the tier's threads.
        find_held: which of some keys are held; asks the backend, and raises nothing.
        submit_store: queues a job that writes.
        submit_load: queues a job that reads.
    """

    def __init__(
        self,
        pool: IOPool,
        find_held: Callable[[Sequence[OffloadKey]], Collection[OffloadKey]],
        *,
        submit_store: Callable[[JobMetadata], None],
        submit_load: Callable[[JobMetadata], None],
    ) -> None:
        self._pool = pool
        self.find_held = find_held
        self._submit_store = submit_store
        self._submit_load = submit_load
        self._job_numbers = itertools.count(1)

    def store(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> JobResult:
        """Write the rows ``slots`` under ``keys`` and wait.

        Raises:
            TierError: keys and slots do not fit together, or the tier has ended; nothing was started.
        """
        return self._run(self._submit_store, keys, slots, is_promotion=False)

    def load(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> JobResult:
        """Read ``keys`` into the rows ``slots`` and wait; the rows of keys that failed hold anything.

        Raises:
            TierError: as for a store.
        """
        return self._run(self._submit_load, keys, slots, is_promotion=True)

    def _run(
        self,
        submit: Callable[[JobMetadata], None],
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        *,
        is_promotion: bool,
    ) -> JobResult:
        job_id = JobId(next(self._job_numbers))
        submit(JobMetadata(job_id, tuple(keys), np.asarray(slots, np.int64), is_promotion, REQUEST))
        return self._pool.wait(job_id)
