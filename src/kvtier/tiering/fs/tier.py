"""The secondary tier on a file system.

It decides what to ask of the disk and never asks it on the scheduler's thread: lookups are answered from memory,
jobs and questions are handed to threads. One directory serves any number of engines, models and processes; each
namespace has its own folder in it, and all of them share one capacity.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.limits import count_usable_cores
from kvtier.tiering.fs.directory import open_directory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.folders import FSNamespace
from kvtier.tiering.fs.recycled_files import RecycledFiles
from kvtier.tiering.fs.settings import (
    DEFAULT_FILE_MODE,
    parse_settings,
    plan_num_store_threads,
)
from kvtier.tiering.fs.store import FSBlockStore
from kvtier.tiering.fs.system import REAL_CALLS, SystemCalls
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.disk import plan_num_threads
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES
from kvtier.tiering.kit.threaded_tier import (
    DEFAULT_NEGATIVE_TTL_S,
    SelfEvictingTier,
    ThreadOptions,
    require_lasting_keys,
)

TIER_TYPE = "fs"

MAX_PART_BYTES = 8 * 2**20
"""Bytes of rows that a thread moves at a stretch. Less pays for the shared count more often; more keeps a load waiting
behind a store, some milliseconds as it is, and the last thread of a job busy alone."""

MAX_PART_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


class FSTier(SelfEvictingTier[FSNamespace]):
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
        num_threads: threads that move blocks; None takes eight for direct I/O on large rows, otherwise four.
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
        num_threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        calls: SystemCalls = REAL_CALLS,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        own = parse_settings(
            root_dir=root_dir,
            capacity_bytes=capacity_bytes,
            shared=shared,
            negative_ttl_s=negative_ttl_s,
            file_mode=file_mode,
            direct_io=direct_io,
            num_threads=num_threads,
            row_bytes=rows.row_bytes,
        )
        self._is_shared = own.shared
        directory = open_directory(own, primary_kv_view, calls, clock, wall_clock)
        spares = RecycledFiles(directory.files, directory.file_mode, directory.block_bytes)
        self._evictor = Evictor(directory, lambda: self._space, spares)
        options = ThreadOptions(
            plan_num_threads(own.num_threads, rows.row_bytes, has_direct_io=directory.has_direct_io),
            max_part_blocks=min(MAX_PART_BLOCKS, max(1, MAX_PART_BYTES // max(1, rows.row_bytes))),
            # What is found on the disk goes into the index, which knows when it is gone: no verdict is kept.
            positive_ttl_s=0.0,
            negative_ttl_s=own.negative_ttl_s,
            num_store_threads=plan_num_store_threads(
                own, count_usable_cores(), has_direct_io=directory.has_direct_io
            ),
        )
        self.capacity_blocks = max_keys = own.capacity_bytes // own.block_bytes
        block_store = FSBlockStore(
            directory, rows, self._evictor, spares, max_keys, tells_evicted=lambda: self.settings.emit_events
        )
        super().__init__(config, primary_kv_view, block_store, options, clock)
        self._evictor.start()

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        index = self._space.index
        if key in index:
            return True
        if len(key) > MAX_KEY_BYTES or (index.is_complete and not self._is_shared):
            return False
        return super().lookup(key, req_context)

    def wait_indexed(self, timeout_s: float) -> bool:
        """Block until what was in the directory at the start is known; False when ``timeout_s`` passed first."""
        return self._space.index.wait_complete(timeout_s)

    def stats(self) -> dict[str, float]:
        return super().stats() | {"indexed_blocks": len(self._space.index)}

    def _drain_unreported(self, being_stored: Collection[OffloadKey]) -> Collection[OffloadKey]:
        return self._space.index.drain_evicted(being_stored)
