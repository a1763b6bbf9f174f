"""The secondary tier on a file system.

Lookups are answered from memory and jobs are moved by threads, so the scheduler's thread never waits for the disk. One
directory serves any number of engines, models and processes: each namespace has a folder, all share one capacity.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.departed import Loss
from kvtier.limits import count_usable_cores
from kvtier.misses import Miss
from kvtier.settings import parse_settings
from kvtier.tiering.base import NO_SETTINGS, PurgeOutcome, TierSettings
from kvtier.tiering.fs.directory import open_directory
from kvtier.tiering.fs.evictor import Evictor
from kvtier.tiering.fs.folders import FSNamespace
from kvtier.tiering.fs.place import FSPlace, open_fs_place, probe_fs_place
from kvtier.tiering.fs.recycled_files import RecycledFiles
from kvtier.tiering.fs.settings import FSSettings, plan_num_store_threads, require_capacity
from kvtier.tiering.fs.store import FSBlockStore
from kvtier.tiering.fs.system import REAL_CALLS, SystemCalls
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.disk import plan_num_threads
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES, MAX_KEY_BYTES
from kvtier.tiering.kit.place import TierFinding
from kvtier.tiering.kit.purging import remove_from_place
from kvtier.tiering.kit.tenant_counts import make_excesses, make_tenant_counts
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys

TIER_TYPE = "fs"

MAX_TASK_BYTES = 8 * 2**20
"""Bytes of rows that a thread moves at a stretch. Less pays for the shared count more often; more keeps a load waiting
behind a store, some milliseconds as it is, and the last thread of a job busy alone."""

MAX_TASK_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


class FSTier(
    ThreadedTier[FSNamespace],
):
    """One file per block in a directory that any number of engines may share.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, comparable with the file system's times.
        calls: the system, as far as blocks are written and read.
        own: the settings of ``FSSettings``, by name.

    Raises:
        ConfigError: a value that cannot work, or a directory that cannot be written.
    """

    own_settings: ClassVar = FSSettings
    can_encrypt: ClassVar[bool] = True
    keeps_quotas: ClassVar[bool] = True
    place_setting: ClassVar[str] = "root_dir"

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        settings: TierSettings = NO_SETTINGS,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        calls: SystemCalls = REAL_CALLS,
        **own: object,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        block_bytes = HEADER_PAGE_BYTES + rows.row_bytes
        fs_settings = parse_settings(FSSettings, own, f"tier {TIER_TYPE!r}")
        require_capacity(fs_settings, block_bytes)
        excesses = make_excesses(config, TIER_TYPE)
        directory = open_directory(fs_settings, primary_kv_view, calls, clock, wall_clock, excesses)
        recycled = RecycledFiles(directory.files, directory.file_mode, directory.block_bytes)
        evictor = Evictor(directory, recycled)
        has_direct_io = directory.has_direct_io
        self.capacity_blocks = max_keys = fs_settings.capacity_bytes // block_bytes
        self._store_of_files = FSBlockStore(
            directory,
            rows,
            evictor,
            recycled,
            max_keys,
            emit_events=settings.emit_events,
            clock=clock,
            make_counts=partial(make_tenant_counts, config, TIER_TYPE, block_bytes),
        )
        super().__init__(
            config,
            primary_kv_view,
            settings,
            block_store=self._store_of_files,
            options=ThreadOptions(
                plan_num_threads(fs_settings.num_threads, rows.row_bytes, has_direct_io=has_direct_io),
                max_task_blocks=min(MAX_TASK_BLOCKS, max(1, MAX_TASK_BYTES // max(1, rows.row_bytes))),
                # What is found on the disk goes into the index, which evictions leave: no answer is cached.
                positive_ttl_s=0.0,
                negative_ttl_s=fs_settings.negative_ttl_s,
                joins_jobs=True,
                num_store_threads=plan_num_store_threads(
                    fs_settings, count_usable_cores(), has_direct_io=has_direct_io
                ),
            ),
            clock=clock,
            remove_blocks=partial(remove_from_place, partial(open_fs_place, own)),
        )
        self._is_shared = fs_settings.shared
        evictor.start()

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> FSPlace:
        return open_fs_place(own)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        return probe_fs_place(own)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._encryption is not None and not self._encryption.serves(key):
            return False
        index = self._namespace.index
        is_known = key in index
        if is_known and self._guarded.is_open:
            return True
        if len(key) > MAX_KEY_BYTES or (index.is_complete and not self._is_shared and not is_known):
            return False
        return self._lookup.lookup(key)

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        del req_context
        known = self.explain_unused(key) or self._store_of_files.losses.explain(key)
        return known or self._store_of_files.siblings.explain(key)

    def reset(self, epoch: bytes) -> None:
        super().reset(epoch)
        self._store_of_files.losses.clear()

    def poll_purge(self) -> PurgeOutcome | int:
        found = super().poll_purge()
        if isinstance(found, PurgeOutcome):
            assert self._purge is not None, "it has just ended"
            self._namespace.index.forget_tenant(self._purge.tenant, Loss.PURGED)
        return found

    def wait_indexed(self, timeout_s: float) -> bool:
        return self._namespace.index.wait_complete(timeout_s)

    def drain_evicted(self) -> Collection[OffloadKey] | None:
        return self._namespace.index.drain_evicted(self.keys_being_stored())

    def stats(self) -> dict[str, float]:
        index = self._namespace.index
        return super().stats() | {"indexed_blocks": len(index)} | index.tenant_stats()
