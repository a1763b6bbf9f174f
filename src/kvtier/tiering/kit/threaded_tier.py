"""A secondary tier whose blocks are moved by threads: everything but the backend.

Subclass ``ThreadedTier``, give it a ``BlockStore`` and name it. The scheduler's thread reads cached answers and queues
jobs and lookups; one thread sends the lookups of a step as one batch, a pool moves blocks, loads before stores. When
the backend cannot be reached its blocks are misses, the log has one line, and the manager's circuit breaker gets a
fault.
"""

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np

from kvtier.base import GROUP_INDEX_BYTES, TENANT_SUFFIX_BYTES, JobId, OffloadKey, ReqContext
from kvtier.config import ModelIdentity, OffloadingConfig
from kvtier.errors import ConfigError, TierError, describe_foreign
from kvtier.histogram import HistogramSnapshot
from kvtier.misses import NO_KEY_REASON, Miss, MissCause
from kvtier.namespace import make_namespace, require_stable_hash
from kvtier.tiering.base import (
    FAILURES_TO_OPEN,
    NO_SETTINGS,
    JobMetadata,
    JobResult,
    PurgeOutcome,
    SecondaryTierManager,
    TierSettings,
)
from kvtier.tiering.kit.backend import BlockStore
from kvtier.tiering.kit.direct import DirectUse
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES
from kvtier.tiering.kit.health import BackendHealth
from kvtier.tiering.kit.io_pool import IOPool, Transfer, TransferOutcome, check_job, plan_max_joined_blocks
from kvtier.tiering.kit.lookup import AsyncLookup, Generation
from kvtier.tiering.kit.page_guard import guard_with_page
from kvtier.tiering.kit.purging import BackgroundPurge, RemoveBlocks
from kvtier.tiering.kit.tier_encryption import open_tier_encryption

logger = logging.getLogger(__name__)

S = TypeVar("S")

SAME_DEADLINE_RATIO = 0.01
"""Jobs are joined that were submitted within this share of ``job_timeout_s``: the first one's deadline holds for the
call, so the others have this much less. Far more than a step takes; with zero no jobs of two steps are joined."""

STILL_CALLED_IN_CHILD = frozenset({"get_tier_type", "on_forked", "shutdown"})
"""What of a tier a forked child may still call; its other public methods raise there."""

DEFAULT_NEGATIVE_TTL_S = 2.0
"""Seconds for which "not held" is believed. Shorter looks in a shared backend more often for the same missing tails;
longer finds later what other engines write."""

CHECK_S = 5.0
"""Seconds between two looks whether a place was emptied, which are made only when blocks are missing. Shorter asks a
server more often; longer leaves routers with blocks that are gone."""


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
        joins_jobs: whether a thread may move small jobs of several requests with one call of the block store, which
            then names the faults among the blocks that failed (``TransferOutcome.faults``).
    """

    num_threads: int
    max_task_blocks: int
    positive_ttl_s: float
    negative_ttl_s: float = DEFAULT_NEGATIVE_TTL_S
    num_store_threads: int | None = None
    cuts_evenly: bool = False
    joins_jobs: bool = False


class ThreadedTier(SecondaryTierManager, Generic[S]):
    """Everything of a tier but the backend.

    A tier that knows what it evicts writes ``drain_evicted`` and keeps blocks of ``keys_being_stored`` for a later
    report.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        block_store: the backend.
        options: how the threads work.
        clock: seconds, monotonic.
        remove_blocks: removes what the backend has of a namespace; None: its blocks cannot be purged by an engine.

    Attributes:
        direct: the tier without a manager, for engines whose own threads wait for it.

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
        remove_blocks: RemoveBlocks | None = None,
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
            max_joined_blocks=plan_max_joined_blocks(self._row_bytes) if options.joins_jobs else 1,
        )
        self._lookup = AsyncLookup(
            name,
            self._contains_batch,
            clock=clock,
            positive_ttl_s=options.positive_ttl_s,
            negative_ttl_s=options.negative_ttl_s,
        )
        self._encryption = open_tier_encryption(config, settings, name, clock)
        self._purge = None if remove_blocks is None else BackgroundPurge(name, remove_blocks)
        self._open_stores: dict[JobId, tuple[OffloadKey, ...]] | None = {} if settings.emit_events else None
        self._namespace = self._open_namespace(b"")
        self._joins_jobs = options.joins_jobs
        self._bound: dict[_Move[S], _BoundTransfer] = {}
        self.direct = DirectUse(
            self._pool,
            self._contains_batch,
            submit_store=lambda job: self._submit(job, self._store),
            submit_load=lambda job: self._submit(job, self._load),
        )
        self._num_drops = 0
        self._is_closed = False
        self._may_be_emptied = type(block_store).restore_description is not BlockStore.restore_description
        self._next_check_s = float("-inf")
        self._is_emptied = False
        _open_tiers.add(self)

    def on_forked(self) -> None:
        """Refuse further use in a forked child, which has none of the threads and locks that they may have held.

        It would wait for them for ever, or write into files that its parent takes for its own. No lock is taken here.
        """
        self._block_store.on_forked()
        message = (
            f"was opened by process {os.getppid()}, of which this one is a fork: threads and locks do not live on in a "
            'child, build the engine in the process that uses it (multiprocessing: "spawn")'
        )

        def refuse(*_: object, **__: object) -> NoReturn:
            raise TierError(self._name, message)

        # Over the methods, so that a tier that is not forked checks nothing.
        for name in set(dir(self)) - STILL_CALLED_IN_CHILD:
            if not name.startswith("_") and isinstance(getattr(type(self), name, None), FunctionType):
                setattr(self, name, refuse)
        setattr(self, "shutdown", lambda _: True)  # noqa: B010 - as above: what it would end is its parent's

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        del req_context
        if len(key) > MAX_KEY_BYTES or not (self._encryption is None or self._encryption.serves(key)):
            return False
        return self._lookup.lookup(key)

    def submit_store(self, job: JobMetadata) -> None:
        self._submit(job, self._store, may_join=self._joins_jobs)
        if self._open_stores is not None:
            self._open_stores[job.job_id] = job.keys

    def submit_load(self, job: JobMetadata) -> None:
        self._submit(job, self._load, may_join=self._joins_jobs)

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
        run = partial(self._drop, self._guarded, self._namespace, self._lookup.generation)
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
        except Exception as error:  # noqa: BLE001  # foreign: a client may raise anything; its tier is away
            failure = _as_tier_error(self._name, error)
            self._health.on_failure(failure, num_unanswered=FAILURES_TO_OPEN)
            raise failure from None

    def drain_unanswered(self) -> int:
        return self._health.drain_unanswered() if self._health.num_unanswered else 0

    def drain_emptied(self) -> bool:
        if not self._is_emptied:
            return False
        self._is_emptied = False
        return True

    def waiting_s(self) -> float:
        return self._pool.oldest_wait_s()

    def drain(self, timeout_s: float) -> bool:
        return self._pool.drain(timeout_s)

    def reset(self, epoch: bytes) -> None:
        self._namespace = self._open_namespace(epoch)
        self._lookup.clear()

    def switch_model(self, model: ModelIdentity) -> None:
        self.config = replace(self.config, model=model)
        self.reset(b"")

    def purge(self, tenant: int | None = None) -> PurgeOutcome | None:
        if self._purge is None:
            return super().purge(tenant)
        if tenant is not None and self._encryption is not None:
            failure = "names of encrypted blocks tell a running engine no tenant: purge the place with --key-file RING"
            return PurgeOutcome(0, error=failure)
        self._purge.begin(self._namespace_name, tenant)
        return None

    def poll_purge(self) -> PurgeOutcome | int:
        assert self._purge is not None, "only a purge that has begun goes on"
        found = self._purge.poll()
        if isinstance(found, PurgeOutcome):
            self._lookup.clear()  # what was found before is gone
            self._guarded.on_purged()
            if self._encryption is not None:
                # The backend has keyed names. Without keys every announced block is withdrawn.
                return PurgeOutcome(found.num_blocks, error=found.error)
        return found

    def stats(self) -> dict[str, float]:
        lookups = {f"lookup_{name}": value for name, value in self._lookup.stats().items()}
        encryption = {} if self._encryption is None else self._encryption.stats()
        return self._block_store.stats() | self._pool.stats() | lookups | encryption

    def histograms(self) -> dict[str, HistogramSnapshot]:
        return {"lookup_s": self._lookup.latency()}

    def shutdown(self, timeout_s: float) -> bool:
        end_s = self._clock() + timeout_s
        # It touches no row, but closes what it has opened.
        if self._purge is not None and not self._purge.stop(timeout_s):
            logger.warning("tier %s: a purge has not ended in %.1f s", self._name, timeout_s)
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

    def _submit(self, job: JobMetadata, move: "_Move[S]", *, may_join: bool = False) -> None:
        """Queue a job with what moves its blocks, bound to the namespace of now."""
        check_job(job, self._num_rows, self._name)
        timeout_s, now_s, generation = self.settings.job_timeout_s, self._clock(), self._lookup.generation
        bound = self._bound.get(move) if may_join else None
        if bound is None or bound.generation != generation or bound.until_s < now_s:
            block_store = self._guarded.with_deadline(now_s + timeout_s)
            run: Transfer = partial(move, block_store, self._namespace, generation)
            if self._encryption is not None:
                run = self._encryption.bind(run)
            bound = _BoundTransfer(run, generation, now_s + SAME_DEADLINE_RATIO * timeout_s)
            if may_join:
                self._bound[move] = bound
        self._pool.submit(job, bound.run, timeout_s)

    def explain_unused(self, key: OffloadKey) -> Miss | None:
        """Return that there is no key for the tenant of ``key``, or why the namespace is not used; None otherwise."""
        has_key = self._encryption is None or self._encryption.serves(key)
        reason = self._guarded.refusal if has_key else NO_KEY_REASON
        cause = MissCause.TIER_DOWN if has_key else MissCause.LIMITED
        return Miss(cause, self.get_tier_type(), MappingProxyType({"reason": reason})) if reason else None

    def _open_namespace(self, epoch: bytes) -> S:
        # A new epoch is random: nothing can have been stored in it.
        identity = make_namespace(self.config, self._row_bytes, epoch)
        if self._encryption is not None:
            identity = self._encryption.open_namespace(identity)
        self._namespace_name = identity.name
        store, model = self._block_store, None if epoch else self.config.model
        namespace = store.open_namespace(identity, is_new=bool(epoch))
        self._guarded = guard_with_page(store, self._name, model, identity, namespace, self._clock)
        return namespace

    def _contains_batch(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        if self._encryption is not None:
            self._encryption.refresh()
        try:
            held = self._guarded.contains_batch(self._namespace, keys)
        except Exception as error:  # noqa: BLE001  # foreign: as above; it costs these lookups
            self._health.on_failure(_as_tier_error(self._name, error), num_unanswered=1)
            return ()
        self._health.on_success()
        if not held:
            self._check_emptied(self._namespace)
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
        except Exception as error:  # noqa: BLE001  # foreign: as above; it costs these blocks
            return _fail(self._health, self._name, error)
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
        except Exception as error:  # noqa: BLE001  # foreign: as above; it costs these blocks
            self._lookup.report(keys, is_held=False, generation=generation)
            return _fail(self._health, self._name, error)
        if self._health.is_out and not outcome.is_fault:
            self._health.on_success()
        if len(outcome.succeeded) < len(keys):
            failed = set(keys).difference(outcome.succeeded)
            self._lookup.report(failed, is_held=False, generation=generation)
            self._check_emptied(namespace)
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
        except Exception as error:  # noqa: BLE001  # foreign: a store may raise anything
            return _fail(self._health, self._name, error)
        self._lookup.report(keys, is_held=False, generation=generation)
        return TransferOutcome(keys)

    def _check_emptied(self, namespace: S) -> None:
        """Look, every few seconds at most, whether blocks are missing because the whole place was emptied.

        Two threads may look at the same time: what describes the namespace is written once, and one of them sees it.
        """
        now_s = self._clock()
        if not self._may_be_emptied or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_S
        try:
            is_emptied = self._block_store.restore_description(namespace)
        except Exception:  # noqa: BLE001  # foreign: the next call finds out what is wrong
            return
        if is_emptied:
            self._is_emptied = True
            logger.warning(
                "tier %s: it was emptied, or has lost its data: its blocks are misses until they are stored again",
                self._name,
            )


def _fail(health: BackendHealth, tier: str, error: Exception) -> TransferOutcome:
    """Count a failure of the backend; return that no block was moved."""
    health.on_failure(_as_tier_error(tier, error))
    return TransferOutcome((), is_fault=True)


def _as_tier_error(tier: str, error: Exception) -> TierError:
    """Return the error to log: a foreign one without its text, which may quote a request with a secret in it."""
    if isinstance(error, TierError):
        return error
    return TierError(tier, f"failed unexpectedly: {describe_foreign(error)}")


_open_tiers: weakref.WeakSet[ThreadedTier[Any]] = weakref.WeakSet()  # Any: of whatever namespace
"""The tiers of this process; a dropped one leaves by itself."""


def _refuse_in_child() -> None:
    for tier in list(_open_tiers):
        tier.on_forked()


os.register_at_fork(after_in_child=_refuse_in_child)


class _BoundTransfer(NamedTuple):
    """What moves the blocks of jobs submitted until ``until_s`` on the clock; the pool joins jobs that share it."""

    run: Transfer
    generation: Generation
    until_s: float


_Move = Callable[
    [BlockStore[S], S, Generation, Sequence[OffloadKey], Sequence[int]],
    TransferOutcome,
]
"""Moves blocks of one job: the store until the job's deadline, the namespace and the generation of its submission,
keys, slots. What a job of before a reset finds out says nothing about the present namespace."""


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
    suffix_bytes = GROUP_INDEX_BYTES if config.settings.tenants is None else TENANT_SUFFIX_BYTES
    key_bytes = hashlib.new(algorithm, usedforsecurity=False).digest_size + suffix_bytes
    if key_bytes > MAX_KEY_BYTES:
        remedy = f"gives keys of {key_bytes} bytes, at most {MAX_KEY_BYTES} can be stored: use sha256"
        raise ConfigError("hash_algorithm", algorithm, remedy)
