"""The readable identity of the engine's blocks, in a file beside the slab.

Nothing reads it but people: whoever wonders why nothing is found after a restart compares two of them.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import ClassVar

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.cpu.policies import CachePolicy, create_cache_policy
from kvtier.cpu.policies.learning import ArrivedRequest
from kvtier.namespace import Namespace
from kvtier.tiering.base import RequestAware
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.disk import plan_num_threads
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES
from kvtier.tiering.kit.threaded_tier import SelfEvictingTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.slab.opening import open_slab
from kvtier.tiering.slab.settings import parse_settings
from kvtier.tiering.slab.slab_file import REAL_CALLS, SystemCalls
from kvtier.tiering.slab.slot_table import SlabNamespace, SlotTable
from kvtier.tiering.slab.store import SlabBlockStore

logger = logging.getLogger(__name__)

FILE_MODE = 0o600


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


TIER_TYPE = "slab"

DEFAULT_POLICY = "lru"

MAX_PART_BYTES = 4 * 2**20
"""Bytes of rows that a thread moves at a stretch. Less seals fewer blocks ahead of their writes; more keeps a load
waiting behind a store, two milliseconds as it is, and the last thread of a job busy alone."""

MAX_PART_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


class SlabTier(SelfEvictingTier[SlabNamespace], RequestAware):
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

    supported_settings: ClassVar[frozenset[str]] = frozenset({"policy"})

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
        self._book = SlotTable(
            own.geometry.num_slots,
            self._make_policy,
            is_empty=file.is_new,
            tells_evicted=lambda: self.settings.emit_events,
        )
        self._slab = SlabBlockStore(file, rows, self._book, max_part_blocks)
        self._num_slots = self.capacity_blocks = own.geometry.num_slots
        # The index knows what is held and what is not: no verdict is kept beyond the moment of the start.
        threads = plan_num_threads(own.num_threads, rows.row_bytes, has_direct_io=file.has_direct_io)
        options = ThreadOptions(threads, max_part_blocks, positive_ttl_s=0.0)
        super().__init__(config, primary_kv_view, self._slab, options, clock)
        write_document(own.path, self._space.namespace)
        self._slab.indexer.start(self._space)

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        # Whether it is complete is asked first: what is adopted between the two questions is found.
        is_complete = self._slab.indexer.is_complete
        if self._book.is_held(self._space, key):
            return True
        if is_complete or len(key) > MAX_KEY_BYTES:
            return False
        return super().lookup(key, req_context)

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        hints = req_context.kv_transfer_params or {}
        request = ArrivedRequest(req_context.req_id, tuple(chains), self._clock(), hints)
        self._book.report_to_learner(self._space, lambda policy: policy.note_request(request))

    def request_finished(self, req_context: ReqContext) -> None:
        self._book.report_to_learner(self._space, lambda policy: policy.on_finished(req_context.req_id))

    def wait_indexed(self, timeout_s: float) -> bool:
        """Block until what was in the file at the start is known; False when ``timeout_s`` passed first."""
        return self._slab.indexer.wait_complete(timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        self._slab.indexer.stop()
        return super().shutdown(timeout_s)

    def _make_policy(self) -> CachePolicy:
        # Not before its first use: the settings that every tier has are assigned after the construction.
        return create_cache_policy(self.settings.policy or DEFAULT_POLICY, self._num_slots)

    def _drain_unreported(self, being_stored: Collection[OffloadKey]) -> Collection[OffloadKey]:
        return self._book.drain_evicted(being_stored)
