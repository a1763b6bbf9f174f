"""The secondary tier in one preallocated file of equal slots.

Lookups are answered from the slot table and jobs are moved by threads, so the scheduler's thread never waits for the
disk. The file belongs to one tier while it runs; a restart finds in it what an earlier tier of the same namespace has
stored. A readable description of the namespace stands beside it: when nothing is found after a restart, compare two.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from kvtier.base import Locality, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.cpu.policies import create_cache_policy
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.namespace import Namespace
from kvtier.settings import parse_settings
from kvtier.tiering.base import NO_SETTINGS, EvictionReporter, RequestAware, TierSettings
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.disk import plan_num_threads
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.slab.opening import open_slab
from kvtier.tiering.slab.settings import SlabSettings, plan_geometry, plan_max_task_blocks
from kvtier.tiering.slab.slab_file import REAL_CALLS, SystemCalls
from kvtier.tiering.slab.slot_table import SlabNamespace, SlotTable
from kvtier.tiering.slab.store import SlabBlockStore

logger = logging.getLogger(__name__)

TIER_TYPE = "slab"

FILE_MODE = 0o600
"""Permissions of the description."""

DEFAULT_POLICY = "lru"


class SlabTier(ThreadedTier[SlabNamespace], EvictionReporter, RequestAware):
    """Fixed-size slots in one preallocated file that belongs to this tier alone.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        clock: seconds, monotonic.
        calls: the system, as far as the file is used.
        own: the settings of ``SlabSettings``, by name.

    Raises:
        ConfigError: a value that cannot work, a file that is not ours, or a disk without room for it.
        UnknownNameError: no policy has the name of the setting.
        TierError: the file belongs to a tier that is running.
    """

    own_settings: ClassVar = SlabSettings
    locality: ClassVar[Locality | None] = Locality.LOCAL
    supported_settings: ClassVar[frozenset[str]] = frozenset({"policy"})

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        settings: TierSettings = NO_SETTINGS,
        *,
        clock: Callable[[], float] = time.monotonic,
        calls: SystemCalls = REAL_CALLS,
        **own: object,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        slab_settings = parse_settings(SlabSettings, own, f"tier {TIER_TYPE!r}")
        geometry = plan_geometry(slab_settings, rows.row_bytes)
        make_policy = partial(create_cache_policy, settings.policy or DEFAULT_POLICY, geometry.num_slots)
        make_policy()  # an unknown name is refused before the file is made
        max_task_blocks = plan_max_task_blocks(rows.row_bytes)
        file = open_slab(slab_settings, geometry, primary_kv_view, calls)
        self._slots = SlotTable(
            geometry.num_slots, make_policy, is_empty=file.is_new, emit_events=settings.emit_events
        )
        self._slab = SlabBlockStore(file, rows, self._slots, max_task_blocks)
        self.capacity_blocks = geometry.num_slots
        threads = plan_num_threads(
            slab_settings.num_threads, rows.row_bytes, has_direct_io=file.has_direct_io
        )
        super().__init__(
            config,
            primary_kv_view,
            settings,
            block_store=self._slab,
            # The slot table has every block: no answer is cached beyond the moment of the start.
            options=ThreadOptions(threads, max_task_blocks, positive_ttl_s=0.0),
            clock=clock,
        )
        write_document(slab_settings.path, self._namespace.identity)
        self._slab.indexer.start(self._namespace)

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        # Whether it is complete is read first: what is adopted between the two reads is found.
        is_complete = self._slab.indexer.is_complete
        if self._slots.is_held(self._namespace, key):
            return True
        if is_complete or len(key) > MAX_KEY_BYTES:
            return False
        return self._lookup.lookup(key)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._slots.touch(self._namespace, keys)

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        hints = req_context.kv_transfer_params or {}
        request = ArrivedRequest(req_context.req_id, tuple(chains), self._clock(), hints)
        self._slots.report_to_learner(self._namespace, lambda policy: policy.note_request(request))

    def request_finished(self, req_context: ReqContext) -> None:
        self._slots.report_to_learner(self._namespace, lambda policy: policy.on_finished(req_context.req_id))

    def wait_indexed(self, timeout_s: float) -> bool:
        """Block until what was in the file at the start is known; False when ``timeout_s`` passed first."""
        return self._slab.indexer.wait_complete(timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        self._slab.indexer.stop()
        return super().shutdown(timeout_s)

    def drain_evicted(self) -> Collection[OffloadKey] | None:
        return self._slots.drain_evicted(self.keys_being_stored())


def document_path(slab_path: Path) -> Path:
    """Return where the document of the slab at ``slab_path`` is. Pure."""
    return slab_path.with_name(f"{slab_path.name}.namespace.json")


def write_document(slab_path: Path, namespace: Namespace) -> None:
    """Replace the document beside a slab by that of ``namespace``; one that cannot be written is named in the log."""
    path = document_path(slab_path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
        )
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(namespace.document + "\n")
        temporary.replace(path)
    except OSError as error:
        logger.warning("tier slab: %s was not written: %s", path, error)
