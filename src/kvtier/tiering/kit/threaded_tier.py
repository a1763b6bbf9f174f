"""A secondary tier whose blocks are moved by threads: everything but the backend.

Subclass ``ThreadedTier``, give it a ``BlockStore`` and name it. The scheduler's thread reads cached answers and queues
jobs and lookups; one thread sends the lookups of a step as one batch, a pool moves blocks, loads before stores. When
the backend cannot be reached its blocks are misses, the log has one line, and the manager's circuit breaker gets a
fault.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from kvtier.base import GROUP_INDEX_BYTES, JobId, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.histogram import HistogramSnapshot
from kvtier.namespace import make_namespace, require_stable_hash
from kvtier.tiering.base import (
    FAILURES_TO_OPEN,
    NO_SETTINGS,
    DroppingTier,
    JobMetadata,
    JobResult,
    ReachableTier,
    SecondaryTierManager,
    TierSettings,
)
from kvtier.tiering.kit.backend import BlockStore
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES
from kvtier.tiering.kit.health import BackendHealth
from kvtier.tiering.kit.io_pool import IOPool, TransferOutcome
from kvtier.tiering.kit.lookup import AsyncLookup, Generation

S = TypeVar("S")

DEFAULT_NEGATIVE_TTL_S = 2.0
"""Seconds for which "not held" is believed. Shorter looks in a shared backend more often for the same missing tails;
longer finds later what other engines write."""


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """How a tier's threads work.

    Attributes:
        num_threads: threads that move blocks.
        max_task_blocks: blocks that a thread moves in one call.
        positive_ttl_s: seconds for which "held" is believed; 0 caches no such answer.
        negative_ttl_s: seconds for which "not held" is believed.
        num_store_threads: how many of the threads may store at the same time, None for each.
        cuts_evenly: whether a job is cut into as few tasks as keep every thread busy. True where a call costs much
            beside its blocks, as a server's answer does; False where the last small tasks let threads end together.
    """

    num_threads: int
    max_task_blocks: int
    positive_ttl_s: float
    negative_ttl_s: float = DEFAULT_NEGATIVE_TTL_S
    num_store_threads: int | None = None
    cuts_evenly: bool = False


class ThreadedTier(SecondaryTierManager, ReachableTier, DroppingTier, Generic[S]):
    """Everything of a tier but the backend.

    A tier that knows what it evicts adds ``EvictionReporter`` and keeps blocks of ``keys_being_stored`` for a later
    report.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        block_store: the backend.
        options: how the threads work.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the engine's keys change from process to process, or do not fit into a header.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        settings: TierSettings = NO_SETTINGS,
        *,
        block_store: BlockStore[S],
        options: ThreadOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, primary_kv_view, settings)
        self._name = name = self.get_tier_type()
        require_lasting_keys(config, name)
        self._num_rows, self._row_bytes = primary_kv_view.shape or (0, 0)
        self._clock = clock
        self._block_store = block_store
        self._caches_hits = options.positive_ttl_s > 0
        self._health = BackendHealth(name, clock)
        self._pool = IOPool(
            name,
            options.num_threads,
            clock=clock,
            num_store_threads=options.num_store_threads,
            max_task_blocks=options.max_task_blocks,
            cuts_evenly=options.cuts_evenly,
        )
        self._lookup = AsyncLookup(
            name,
            self._contains_batch,
            clock=clock,
            positive_ttl_s=options.positive_ttl_s,
            negative_ttl_s=options.negative_ttl_s,
        )
        self._open_stores: dict[JobId, tuple[OffloadKey, ...]] | None = {} if settings.emit_events else None
        self._namespace = self._open_namespace(b"")
        self._num_drops = 0
        self._is_closed = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        del req_context
        return False if len(key) > MAX_KEY_BYTES else self._lookup.lookup(key)

    def submit_store(self, job: JobMetadata) -> None:
        self._submit(job, self._store)
        if self._open_stores is not None:
            self._open_stores[job.job_id] = job.keys

    def submit_load(self, job: JobMetadata) -> None:
        self._submit(job, self._load)

    def get_finished(self) -> Iterable[JobResult]:
        # For callers that never end a step; for others nothing is left to send.
        self.end_step()
        results = self._pool.get_finished()
        if self._num_drops:
            results = [result for result in results if result.job_id >= 0]
        if self._open_stores:
            for result in results:
                self._open_stores.pop(result.job_id, None)
        return results

    def drop(self, keys: Collection[OffloadKey]) -> None:
        # A job of the pool among the stores, which the manager knows nothing of: it is not reported.
        self._num_drops += 1
        own = JobMetadata(
            JobId(-self._num_drops),
            tuple(keys),
            np.zeros(len(keys), np.int64),
            is_promotion=False,
            req_context=ReqContext("drop"),
        )
        run = partial(self._drop, self._block_store, self._namespace, self._lookup.generation)
        self._pool.submit(own, run, self.settings.job_timeout_s)

    def end_step(self) -> None:
        lookup = self._lookup
        if lookup.collected is not None or lookup.answers:
            lookup.flush()

    def drain_answered(self) -> Collection[OffloadKey] | None:
        return self._lookup.drain_answered()

    def check_reachable(self) -> None:
        try:
            self._block_store.check_reachable()
        except TierError as error:
            self._health.on_failure(error, num_unanswered=FAILURES_TO_OPEN)
            raise

    def drain_unanswered(self) -> int:
        return self._health.drain_unanswered() if self._health.num_unanswered else 0

    def waiting_s(self) -> float:
        return self._pool.oldest_wait_s()

    def drain(self, timeout_s: float) -> bool:
        return self._pool.drain(timeout_s)

    def reset(self, epoch: bytes) -> None:
        self._namespace = self._open_namespace(epoch)
        self._lookup.clear()

    def stats(self) -> dict[str, float]:
        lookups = {f"lookup_{name}": value for name, value in self._lookup.stats().items()}
        return self._block_store.stats() | self._pool.stats() | lookups

    def histograms(self) -> dict[str, HistogramSnapshot]:
        return {"lookup_s": self._lookup.latency()}

    def shutdown(self, timeout_s: float) -> bool:
        end_s = self._clock() + timeout_s
        has_ended = self._pool.shutdown(timeout_s)
        # A lookup touches no row: whether its thread ends in time does not change the answer.
        has_lookup_ended = self._lookup.shutdown(max(0.0, end_s - self._clock()))
        if has_ended and has_lookup_ended and not self._is_closed:
            self._is_closed = True
            self._block_store.close()
        return has_ended

    def keys_being_stored(self) -> frozenset[OffloadKey]:
        """Return the blocks whose store has not been reported yet; without ``emit_events`` none is recorded."""
        return frozenset().union(*(self._open_stores or {}).values())

    def _submit(self, job: JobMetadata, move: "_Move[S]") -> None:
        """Queue a job with what moves its blocks, bound to the namespace of now."""
        check_job(job, self._num_rows, self._name)
        timeout_s = self.settings.job_timeout_s
        block_store = self._block_store.with_deadline(self._clock() + timeout_s)
        run = partial(move, block_store, self._namespace, self._lookup.generation)
        self._pool.submit(job, run, timeout_s)

    def _open_namespace(self, epoch: bytes) -> S:
        # A new epoch is random: nothing can have been stored in it.
        identity = make_namespace(self.config, self._row_bytes, epoch)
        return self._block_store.open_namespace(identity, is_new=bool(epoch))

    def _contains_batch(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        try:
            held = self._block_store.contains_batch(self._namespace, keys)
        except TierError as error:
            self._health.on_failure(error, num_unanswered=1)
            return ()
        self._health.on_success()
        return held

    def _store(
        self,
        block_store: BlockStore[S],
        namespace: S,
        generation: Generation,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
    ) -> TransferOutcome:
        try:
            outcome = block_store.store(namespace, keys, slots)
        except TierError as error:
            return self._failed(error)
        if self._health.is_out and not outcome.is_fault:
            self._health.on_success()
        if self._caches_hits and outcome.succeeded:
            self._lookup.report(outcome.succeeded, is_held=True, generation=generation)
        return outcome

    def _load(
        self,
        block_store: BlockStore[S],
        namespace: S,
        generation: Generation,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
    ) -> TransferOutcome:
        try:
            outcome = block_store.load(namespace, keys, slots)
        except TierError as error:
            self._lookup.report(keys, is_held=False, generation=generation)
            return self._failed(error)
        if self._health.is_out and not outcome.is_fault:
            self._health.on_success()
        if len(outcome.succeeded) < len(keys):
            failed = set(keys).difference(outcome.succeeded)
            self._lookup.report(failed, is_held=False, generation=generation)
        return outcome

    def _drop(
        self,
        block_store: BlockStore[S],
        namespace: S,
        generation: Generation,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
    ) -> TransferOutcome:
        del slots
        try:
            block_store.drop(namespace, keys)
        except TierError as error:
            return self._failed(error)
        self._lookup.report(keys, is_held=False, generation=generation)
        return TransferOutcome(keys)

    def _failed(self, error: TierError) -> TransferOutcome:
        self._health.on_failure(error)
        return TransferOutcome((), is_fault=True)


_Move = Callable[
    [BlockStore[S], S, Generation, Sequence[OffloadKey], Sequence[int]],
    TransferOutcome,
]
"""Moves blocks of one job: the store until the job's deadline, the namespace and the generation of its submission,
keys, slots. What a job of before a reset finds out says nothing about the present namespace."""


def check_job(job: JobMetadata, num_rows: int, tier: str) -> None:
    """Refuse a job that no thread could carry out.

    Raises:
        TierError: keys and slots do not fit together, or one of them cannot be.
    """

    def refusal(reason: str) -> TierError:
        return TierError(tier, f"job {job.job_id} {reason}")

    if len(job.keys) != len(job.block_ids):
        counts = f"{len(job.keys)} keys and {len(job.block_ids)} slots"
        raise refusal(f"has {counts}: give one slot for each key")
    too_long = next((key for key in job.keys if not 0 < len(key) <= MAX_KEY_BYTES), None)
    if too_long is not None:
        limit = f"1 to {MAX_KEY_BYTES} bytes fit into a header"
        raise refusal(f"has a key of {len(too_long)} bytes: {limit}")
    if job.keys and not (job.block_ids.min() >= 0 and job.block_ids.max() < num_rows):
        slots = f"slots {job.block_ids.min()} to {job.block_ids.max()}"
        raise refusal(f"names {slots}, the primary has {num_rows}")


def require_lasting_keys(config: OffloadingConfig, tier: str) -> None:
    """Refuse keys that no other process would compute again, or that do not fit into a header.

    A tier calls this before it opens anything.

    Raises:
        ConfigError: the engine's hash is seeded at random or too long; an algorithm that hashlib does not know is
            let through, and its keys are checked as they come.
    """
    require_stable_hash(config, tier)
    algorithm = config.hash_algorithm
    if algorithm not in hashlib.algorithms_available:
        return
    key_bytes = hashlib.new(algorithm, usedforsecurity=False).digest_size + GROUP_INDEX_BYTES
    if key_bytes > MAX_KEY_BYTES:
        remedy = f"gives keys of {key_bytes} bytes, at most {MAX_KEY_BYTES} can be stored: use sha256"
        raise ConfigError("hash_algorithm", algorithm, remedy)
