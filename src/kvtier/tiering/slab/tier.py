"""The secondary tier in one file of slots.

It decides what to ask of the file and never asks it on the scheduler's thread: an index in memory answers lookups,
since nobody else writes the file. Only while the index is being rebuilt is an unknown key a question for a thread,
which waits a moment for it.
"""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import ClassVar

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.cpu.policies import CachePolicy, create_cache_policy
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.tiering.base import RequestAware
from kvtier.tiering.block_store import rows_of
from kvtier.tiering.disk_settings import plan_num_threads
from kvtier.tiering.envelope import MAX_KEY_BYTES
from kvtier.tiering.evicting import EvictingTier
from kvtier.tiering.pooled import PoolOptions, require_lasting_keys
from kvtier.tiering.slab.book import SlotBook
from kvtier.tiering.slab.document import write_document
from kvtier.tiering.slab.opening import open_slab
from kvtier.tiering.slab.settings import parse_settings
from kvtier.tiering.slab.space import Space
from kvtier.tiering.slab.store import SlabBlockStore
from kvtier.tiering.slab.system import REAL_CALLS, SystemCalls

TIER_TYPE = "slab"

DEFAULT_POLICY = "lru"

MAX_PART_BYTES = 4 * 2**20
"""Bytes of rows that a thread moves at a stretch. Less seals fewer blocks ahead of their writes; more keeps a load
waiting behind a store, two milliseconds as it is, and the last thread of a job busy alone."""

MAX_PART_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


class SlabTier(EvictingTier[Space], RequestAware):
    """Fixed-size slots in one preallocated file that belongs to this tier alone.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        path: the file, absolute; made when it is missing, in a folder that exists.
        capacity_bytes: the length that the file has at most.
        direct_io: True insists, False avoids it, "auto" takes it where file system and rows allow it.
        num_threads: threads that move blocks; None takes eight for direct I/O on large rows, otherwise four.
        clock: seconds, monotonic.
        calls: the system, as far as the file is used.

    Raises:
        ConfigError: a value that cannot work, a file that is not ours, or a disk without room for it.
        TierError: the file belongs to a tier that is running.
    """

    honours: ClassVar[frozenset[str]] = frozenset({"policy"})

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        *,
        path: str | Path,
        capacity_bytes: int | str,
        direct_io: bool | str = "auto",
        num_threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        calls: SystemCalls = REAL_CALLS,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        own = parse_settings(
            path=path,
            capacity_bytes=capacity_bytes,
            direct_io=direct_io,
            num_threads=num_threads,
            row_bytes=rows.row_bytes,
        )
        max_part_blocks = min(MAX_PART_BLOCKS, max(1, MAX_PART_BYTES // rows.row_bytes))
        file = open_slab(own, primary_kv_view, calls)
        self._book = SlotBook(
            own.geometry.num_slots,
            self._make_policy,
            is_empty=file.is_new,
            tells_evicted=lambda: self.settings.emit_events,
        )
        self._slab = SlabBlockStore(file, rows, self._book, max_part_blocks)
        self._num_slots = self.capacity_blocks = own.geometry.num_slots
        # The index knows what is held and what is not: no verdict is kept beyond the moment of the start.
        threads = plan_num_threads(own.num_threads, rows.row_bytes, has_direct_io=file.has_direct_io)
        options = PoolOptions(threads, max_part_blocks, positive_ttl_s=0.0)
        super().__init__(config, primary_kv_view, self._slab, options, clock)
        write_document(own.path, self._space.namespace)
        self._slab.indexer.start(self._space)

    @staticmethod
    def get_tier_type() -> str:
        """Return "slab"."""
        return TIER_TYPE

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Answer from memory; a key that is not known while the index is being rebuilt is asked later."""
        # Whether it is complete is asked first: what is adopted between the two questions is found.
        is_complete = self._slab.indexer.is_complete
        if self._book.is_held(self._space, key):
            return True
        if is_complete or len(key) > MAX_KEY_BYTES:
            return False
        return super().lookup(key, req_context)

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        """Tell a policy that learns from requests of one that has arrived."""
        hints = req_context.kv_transfer_params or {}
        request = ArrivedRequest(req_context.req_id, tuple(chains), self._clock(), hints)
        self._book.tell_learner(self._space, lambda policy: policy.note_request(request))

    def request_finished(self, req_context: ReqContext) -> None:
        """Tell a policy that learns from requests that one has ended."""
        self._book.tell_learner(self._space, lambda policy: policy.note_finished(req_context.req_id))

    def wait_indexed(self, timeout_s: float) -> bool:
        """Block until what was in the file at the start is known; False when ``timeout_s`` passed first."""
        return self._slab.indexer.wait_complete(timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        """End the threads, then give the file and its lock back; idempotent.

        Returns:
            False when ``timeout_s`` passed and a thread may still touch the primary's rows; the file stays ours.
        """
        self._slab.indexer.stop()
        return super().shutdown(timeout_s)

    def _make_policy(self) -> CachePolicy:
        # Not before its first use: the settings that every tier has are assigned after the construction.
        return create_cache_policy(self.settings.policy or DEFAULT_POLICY, self._num_slots)

    def _take_untold(self, being_stored: Collection[OffloadKey]) -> Collection[OffloadKey]:
        return self._book.take_evicted(being_stored)
