"""A secondary tier whose blocks are moved by threads: everything but the place where they are kept.

It knows no file, client or server; ``BlockStore`` does. The scheduler's thread reads verdicts and hands over jobs
and questions; a lookup's thread asks in one batch per step, a pool moves blocks, loads first. A place that cannot be
reached is a miss for whoever asks, one line in the log, and a fault that the manager's breaker hears of.
"""

import hashlib
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kvtier.base import GROUP_INDEX_BYTES, JobId, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.namespace import make_namespace, require_stable_hash
from kvtier.tiering.base import (
    FAILURES_TO_OPEN,
    EvictionReporter,
    JobMetadata,
    JobResult,
    ReachableTier,
    SecondaryTierManager,
)
from kvtier.tiering.kit.backend import BlockStore
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES
from kvtier.tiering.kit.health import OutageLog
from kvtier.tiering.kit.io_pool import IOPool, TransferOutcome
from kvtier.tiering.kit.lookup import AsyncLookup, Era

S = TypeVar("S")

DEFAULT_NEGATIVE_TTL_S = 2.0
"""Seconds for which a block that was not there is not asked for again. Shorter asks a shared place more often for
the same missing tails; longer finds later what other engines write."""


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """How a tier's threads work.

    Attributes:
        num_threads: threads that move blocks.
        max_part_blocks: blocks that a thread moves in one call.
        positive_ttl_s: seconds for which "held" is believed; 0 keeps no such verdict.
        negative_ttl_s: seconds for which "not held" is believed.
        num_store_threads: how many of the threads may store at the same time, None for each.
        cuts_evenly: whether a job is cut into as few parts as keep every thread busy. True where a call costs much
            beside its blocks, as a server's answer does; False where the last small parts let threads end together.
    """

    num_threads: int
    max_part_blocks: int
    positive_ttl_s: float
    negative_ttl_s: float = DEFAULT_NEGATIVE_TTL_S
    num_store_threads: int | None = None
    cuts_evenly: bool = False


class ThreadedTier(SecondaryTierManager, ReachableTier, Generic[S]):
    """Everything of a tier but the place where blocks are kept; a subclass builds that and names itself.

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
        options: ThreadOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, primary_kv_view)
        name = self.get_tier_type()
        require_lasting_keys(config, name)
        self._num_rows, self._row_bytes = primary_kv_view.shape or (0, 0)
        self._clock = clock
        self._block_store = block_store
        self._has_positive_verdicts = options.positive_ttl_s > 0
        self._outages = OutageLog()
        self._pool = IOPool(
            name,
            options.num_threads,
            clock=clock,
            num_store_threads=options.num_store_threads,
            max_part_blocks=options.max_part_blocks,
            cuts_evenly=options.cuts_evenly,
        )
        self._lookup = AsyncLookup(
            name,
            self._find,
            clock=clock,
            positive_ttl_s=options.positive_ttl_s,
            negative_ttl_s=options.negative_ttl_s,
        )
        self._space = self._open_space(b"")
        self._is_closed = False

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        del req_context
        return False if len(key) > MAX_KEY_BYTES else self._lookup.lookup(key)

    def submit_store(self, job: JobMetadata) -> None:
        require_sound(job, self._num_rows, self.get_tier_type())
        timeout_s = self.settings.job_timeout_s
        bound = _Bound(self._block_store.until(self._clock() + timeout_s), self._space, self._lookup.era)
        self._pool.submit_store(job, partial(self._store, bound), timeout_s)

    def submit_load(self, job: JobMetadata) -> None:
        require_sound(job, self._num_rows, self.get_tier_type())
        timeout_s = self.settings.job_timeout_s
        bound = _Bound(self._block_store.until(self._clock() + timeout_s), self._space, self._lookup.era)
        self._pool.submit_load(job, partial(self._load, bound), timeout_s)

    def get_finished(self) -> Iterable[JobResult]:
        # Callers that never end a step ask here; for others there is nothing left to hand over.
        self._lookup.flush()
        return self._pool.get_finished()

    def end_step(self) -> None:
        self._lookup.flush()

    def drain_answered(self) -> Collection[OffloadKey] | None:
        return self._lookup.drain_answered()

    def check_reachable(self) -> None:
        try:
            self._block_store.check_reachable()
        except TierError as error:
            self._outages.on_failure(error, num_unanswered=FAILURES_TO_OPEN)
            raise

    def drain_unanswered(self) -> int:
        return self._outages.drain_unanswered()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        del req_context
        self._block_store.touch(self._space, keys)

    def waiting_s(self) -> float:
        return self._pool.oldest_wait_s()

    def drain(self, timeout_s: float) -> bool:
        return self._pool.drain(timeout_s)

    def reset(self, epoch: bytes) -> None:
        self._space = self._open_space(epoch)
        self._lookup.clear()

    def stats(self) -> dict[str, float]:
        lookups = {f"lookup_{name}": value for name, value in self._lookup.stats().items()}
        return self._block_store.stats() | self._pool.stats() | lookups

    def shutdown(self, timeout_s: float) -> bool:
        end_s = self._clock() + timeout_s
        has_ended = self._pool.shutdown(timeout_s)
        # A question touches no row: whether its thread ends in time does not change the answer.
        has_answered = self._lookup.shutdown(max(0.0, end_s - self._clock()))
        if has_ended and has_answered and not self._is_closed:
            self._is_closed = True
            self._block_store.close()
        return has_ended

    def _open_space(self, epoch: bytes) -> S:
        # A new epoch is random: nobody has stored anything in it.
        namespace = make_namespace(self.config, self._row_bytes, epoch)
        return self._block_store.open_space(namespace, is_new=bool(epoch))

    def _find(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        try:
            found = self._block_store.find(self._space, keys)
        except TierError as error:
            self._outages.on_failure(error, num_unanswered=1)
            return ()
        self._outages.on_success(self.get_tier_type())
        return found

    def _store(self, bound: "_Bound[S]", keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        moved = self._move(partial(bound.block_store.store, bound.space, keys, slots))
        if self._has_positive_verdicts and moved.arrived:
            self._lookup.tell(moved.arrived, is_held=True, era=bound.era)
        return moved

    def _load(self, bound: "_Bound[S]", keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        moved = self._move(partial(bound.block_store.load, bound.space, keys, slots))
        if len(moved.arrived) < len(keys):
            self._lookup.tell(set(keys).difference(moved.arrived), is_held=False, era=bound.era)
        return moved

    def _move(self, move: Callable[[], TransferOutcome]) -> TransferOutcome:
        try:
            moved = move()
        except TierError as error:
            self._outages.on_failure(error)
            return TransferOutcome((), is_fault=True)
        if not moved.is_fault:
            self._outages.on_success(self.get_tier_type())
        return moved


@dataclass(frozen=True, slots=True)
class _Bound(Generic[S]):
    """What a job was submitted with.

    Attributes:
        block_store: the place, until the job's deadline.
        space: its namespace.
        era: what one of before a reset has met says nothing about the present namespace.
    """

    block_store: BlockStore[S]
    space: S
    era: Era


def require_sound(job: JobMetadata, num_rows: int, tier: str) -> None:
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
        limit = f"1 to {MAX_KEY_BYTES} bytes fit into an envelope"
        raise refusal(f"has a key of {len(too_long)} bytes: {limit}")
    if job.keys and not (job.block_ids.min() >= 0 and job.block_ids.max() < num_rows):
        slots = f"slots {job.block_ids.min()} to {job.block_ids.max()}"
        raise refusal(f"names {slots}, the primary has {num_rows}")


def require_lasting_keys(config: OffloadingConfig, tier: str) -> None:
    """Refuse keys that no other process would compute again, or that do not fit into an envelope.

    A tier asks this before it opens anything.

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


class SelfEvictingTier(ThreadedTier[S], EvictionReporter):
    """What a subclass has to add to a ThreadedTier is ``_drain_unreported``.

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
        options: ThreadOptions,
        clock: Callable[[], float],
    ) -> None:
        self._open_stores: dict[JobId, tuple[OffloadKey, ...]] = {}
        super().__init__(config, primary_kv_view, block_store, options, clock)

    def submit_store(self, job: JobMetadata) -> None:
        super().submit_store(job)
        if self.settings.emit_events:
            self._open_stores[job.job_id] = job.keys

    def get_finished(self) -> Iterable[JobResult]:
        results = list(super().get_finished())
        for result in results:
            self._open_stores.pop(result.job_id, None)
        return results

    def drain_evicted(self) -> Collection[OffloadKey]:
        return self._drain_unreported(frozenset().union(*self._open_stores.values()))

    @abstractmethod
    def _drain_unreported(self, being_stored: Collection[OffloadKey]) -> Collection[OffloadKey]:
        """Return what has left and is not back; those in ``being_stored`` are kept for a later call."""
