"""The secondary tier on a file system.

It decides what to ask of the disk and never asks it on the scheduler's thread: lookups are answered from memory,
jobs and questions are handed to threads. One directory serves any number of engines, models and processes; each
namespace has its own folder in it, and all of them share one capacity.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError
from kvtier.namespace import make_namespace, require_stable_hash
from kvtier.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from kvtier.tiering.envelope import MAX_KEY_BYTES
from kvtier.tiering.fs.directory import open_directory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.index import KeyIndex
from kvtier.tiering.fs.layout import namespace_path
from kvtier.tiering.fs.settings import (
    DEFAULT_FILE_MODE,
    DEFAULT_NEGATIVE_TTL_S,
    DEFAULT_NUM_THREADS,
    parse_settings,
    require_short_keys,
)
from kvtier.tiering.fs.space import Space
from kvtier.tiering.fs.store import BlockStore, Rows
from kvtier.tiering.fs.system import REAL_CALLS, SystemCalls
from kvtier.tiering.io_pool import IOPool
from kvtier.tiering.lookup import AsyncLookup

TIER_TYPE = "fs"

MAX_PART_BYTES = 4 * 2**20
"""Bytes that a thread moves at a stretch. Less pays for the shared count more often; more keeps a load waiting
behind a store, and the last thread of a job busy alone."""

MAX_PART_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


class FSTier(SecondaryTierManager):
    """One file per block in a directory that any number of engines may share.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        root_dir: the directory, absolute; made when it is missing.
        capacity_bytes: the most that may be in it, over all namespaces and instances; among instances with
            different ones the smallest counts.
        shared: whether blocks that other processes write are looked for on the disk.
        negative_ttl_s: seconds for which a block that was not there is not looked for again.
        file_mode: permissions of files, as a number or octal text; folders get search permission with it.
        direct_io: True insists, False avoids it, "auto" takes it where file system and rows allow it.
        num_threads: threads that move blocks.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, comparable with the file system's times.
        calls: the system, as far as blocks are written and read.

    Raises:
        ConfigError: a value that cannot work, or a directory that cannot be written.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        *,
        root_dir: str | Path,
        capacity_bytes: int | str,
        shared: bool = True,
        negative_ttl_s: float = DEFAULT_NEGATIVE_TTL_S,
        file_mode: int | str = DEFAULT_FILE_MODE,
        direct_io: bool | str = "auto",
        num_threads: int = DEFAULT_NUM_THREADS,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        calls: SystemCalls = REAL_CALLS,
    ) -> None:
        super().__init__(config, primary_kv_view)
        require_stable_hash(config, TIER_TYPE)
        require_short_keys(config)
        num_rows, row_bytes = primary_kv_view.shape or (0, 0)
        own = parse_settings(
            root_dir=root_dir,
            capacity_bytes=capacity_bytes,
            shared=shared,
            negative_ttl_s=negative_ttl_s,
            file_mode=file_mode,
            direct_io=direct_io,
            num_threads=num_threads,
            row_bytes=row_bytes,
        )
        self._own = own
        self._clock = clock
        self._num_rows, self._row_bytes = num_rows, row_bytes
        directory = open_directory(own, primary_kv_view, calls, clock, wall_clock)
        rows = Rows(primary_kv_view.cast("B"), row_bytes)
        self._directory = directory
        self._space = self._open_space(b"")
        self._evictor = Evictor(directory, lambda: self._space)
        self._store = BlockStore(directory, rows, self._evictor, self._forget)
        # What is found on the disk goes into the index, which knows when it is gone: no verdict is kept.
        self._lookup = AsyncLookup(
            TIER_TYPE, self._find, clock=clock, positive_ttl_s=0.0, negative_ttl_s=own.negative_ttl_s
        )
        part_blocks = min(MAX_PART_BLOCKS, max(1, MAX_PART_BYTES // directory.block_bytes))
        self._pool = IOPool(TIER_TYPE, own.num_threads, clock=clock, max_part_blocks=part_blocks)
        self._evictor.start()

    @staticmethod
    def get_tier_type() -> str:
        """Return "fs"."""
        return TIER_TYPE

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Answer from memory; what is not known there is asked of the disk, unless nobody else writes it."""
        del req_context
        index = self._space.index
        if key in index:
            return True
        if len(key) > MAX_KEY_BYTES or (index.is_complete and not self._own.shared):
            return False
        return self._lookup.lookup(key)

    def submit_store(self, job: JobMetadata) -> None:
        """Start writing the job's slots.

        Raises:
            TierError: the job is malformed, or the tier is full of work or shut down; nothing was started.
        """
        self._check(job)
        self._pool.submit_store(job, partial(self._store.store, self._space), self.settings.job_timeout_s)

    def submit_load(self, job: JobMetadata) -> None:
        """Start reading into the job's slots; otherwise as ``submit_store``."""
        self._check(job)
        self._pool.submit_load(job, partial(self._store.load, self._space), self.settings.job_timeout_s)

    def get_finished(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each once."""
        # Callers that never end a step ask here; for others there is nothing left to hand over.
        self._lookup.flush()
        return self._pool.get_finished()

    def end_step(self) -> None:
        """Hand the questions of this step to the lookup's thread, as one batch."""
        self._lookup.flush()

    def take_answered(self) -> Collection[OffloadKey] | None:
        """Return the keys whose question to the disk has an answer now, each once."""
        return self._lookup.take_answered()

    def waiting_s(self) -> float:
        """Return the age in seconds of the oldest job that no thread has begun."""
        return self._pool.oldest_wait_s()

    def drain(self, timeout_s: float) -> bool:
        """Block until every accepted job has ended; False when ``timeout_s`` passed first."""
        return self._pool.drain(timeout_s)

    def wait_indexed(self, timeout_s: float) -> bool:
        """Block until what was in the directory at the start is known; False when ``timeout_s`` passed first."""
        return self._space.index.wait_complete(timeout_s)

    def reset(self, epoch: bytes) -> None:
        """Move to the namespace of ``epoch``; jobs in flight end in the one they were submitted in."""
        self._space = self._open_space(epoch)
        self._lookup.clear()

    def stats(self) -> dict[str, float]:
        """Return counts and gauges: loads by outcome, stores, evictions, lookups, the queue."""
        counts = self._directory.counters.snapshot()
        lookups = {f"lookup_{name}": value for name, value in self._lookup.stats().items()}
        return counts | self._pool.stats() | lookups | {"indexed_blocks": len(self._space.index)}

    def shutdown(self, timeout_s: float) -> bool:
        """End the threads; idempotent.

        Returns:
            False when ``timeout_s`` passed and a thread may still touch the primary's rows.
        """
        end_s = self._clock() + timeout_s
        has_ended = self._pool.shutdown(timeout_s)
        # The others touch no row: whether they end in time does not change the answer.
        self._lookup.shutdown(max(0.0, end_s - self._clock()))
        self._evictor.shutdown(max(0.0, end_s - self._clock()))
        return has_ended

    def _open_space(self, epoch: bytes) -> Space:
        namespace = make_namespace(self.config, self._row_bytes, epoch)
        max_keys = self._own.capacity_bytes // self._own.block_bytes
        # A new epoch is random, so nothing of it can be on the disk and there is nothing to scan.
        index = KeyIndex(max_keys, is_complete=bool(epoch))
        return Space(namespace, namespace_path(self._own.root_dir, namespace.name), index)

    def _find(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return self._store.find(self._space, keys)

    def _forget(self, space: Space, key: OffloadKey) -> None:
        if space is self._space:
            self._lookup.tell(key, is_held=False)

    def _check(self, job: JobMetadata) -> None:
        """Refuse what no thread could carry out."""
        if len(job.keys) != len(job.block_ids):
            counts = f"{len(job.keys)} keys and {len(job.block_ids)} slots"
            raise TierError(TIER_TYPE, f"job {job.job_id} has {counts}: give one slot for each key")
        too_long = next((key for key in job.keys if not 0 < len(key) <= MAX_KEY_BYTES), None)
        if too_long is not None:
            limit = f"1 to {MAX_KEY_BYTES} bytes fit into an envelope"
            raise TierError(TIER_TYPE, f"job {job.job_id} has a key of {len(too_long)} bytes: {limit}")
        if job.keys and not (job.block_ids.min() >= 0 and job.block_ids.max() < self._num_rows):
            slots = f"slots {job.block_ids.min()} to {job.block_ids.max()}"
            raise TierError(TIER_TYPE, f"job {job.job_id} names {slots}, the primary has {self._num_rows}")
