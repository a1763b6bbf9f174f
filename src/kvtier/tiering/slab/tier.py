"""The secondary tier in one preallocated file of equal slots.

Lookups are answered from the slot table and jobs are moved by threads, so the scheduler's thread never waits for the
disk. The file belongs to one tier while it runs; a restart finds in it what an earlier tier of the same namespace has
stored. Readable descriptions of its namespaces stand beside it: when nothing is found after a restart, compare two.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from kvtier.base import Locality, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.cpu.policies import create_cache_policy
from kvtier.cpu.policies.learning import make_arrived
from kvtier.departed import make_losses
from kvtier.errors import TierError
from kvtier.misses import Miss, MissCause
from kvtier.settings import parse_settings
from kvtier.tiering.base import NO_SETTINGS, TierSettings
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.disk import plan_num_threads
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES
from kvtier.tiering.kit.lifetime import make_lifetime
from kvtier.tiering.kit.mount import MountPoint
from kvtier.tiering.kit.place import TierFinding
from kvtier.tiering.kit.tenant_counts import make_tenant_counts
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.slab.documents import write_document
from kvtier.tiering.slab.expiry import SlotExpiry
from kvtier.tiering.slab.opening import open_slab
from kvtier.tiering.slab.place import SlabPlace, open_slab_place, probe_slab_place
from kvtier.tiering.slab.reopening import CurrentSlab
from kvtier.tiering.slab.settings import SlabSettings, plan_geometry, plan_max_task_blocks
from kvtier.tiering.slab.slab_file import REAL_CALLS, SlabFile, SystemCalls
from kvtier.tiering.slab.slot_table import SlabNamespace, SlotTable
from kvtier.tiering.slab.store import SlabBlockStore

TIER_TYPE = "slab"

DEFAULT_POLICY = "lru"


class SlabTier(
    ThreadedTier[SlabNamespace],
):
    """Fixed-size slots in one preallocated file that belongs to this tier alone.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, for the times of stores.
        calls: the system, as far as the file is used.
        own: the settings of ``SlabSettings``, by name.

    Raises:
        ConfigError: a value that cannot work, a file that is not ours, or a disk without room for it.
        UnknownNameError: no policy has the name of the setting.
        TierError: the file belongs to a tier that is running.
    """

    own_settings: ClassVar = SlabSettings
    can_encrypt: ClassVar[bool] = True
    keeps_quotas: ClassVar[bool] = True
    locality: ClassVar[Locality | None] = Locality.LOCAL
    place_setting: ClassVar[str] = "path"
    supported_settings: ClassVar[frozenset[str]] = frozenset({"policy"})

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
        slab_settings = parse_settings(SlabSettings, own, f"tier {TIER_TYPE!r}")
        geometry = plan_geometry(slab_settings, rows.row_bytes)
        policy = settings.policy or DEFAULT_POLICY
        create_cache_policy(policy, geometry.num_slots)  # an unknown name is refused before the file is made
        max_task_blocks = plan_max_task_blocks(rows.row_bytes)
        lifetime = make_lifetime(slab_settings.ttl_s)
        self._losses = losses = make_losses(TIER_TYPE, geometry.num_slots, clock)
        mount = MountPoint(slab_settings.path)

        def open_file() -> SlabFile:
            if mount.is_away():
                raise TierError(TIER_TYPE, f"nothing is mounted at {mount.path} any more")
            return open_slab(slab_settings, geometry, primary_kv_view, calls)

        def make_slot_table(file: SlabFile) -> SlotTable:
            num_slots = file.geometry.num_slots
            return SlotTable(
                num_slots,
                partial(create_cache_policy, policy, num_slots),
                is_empty=file.is_new,
                emit_events=settings.emit_events,
                losses=losses,
                expiry=None if lifetime is None else SlotExpiry(lifetime, wall_clock),
                tenant_counts=make_tenant_counts(config, TIER_TYPE, file.geometry.slot_bytes),
            )

        self._slab = CurrentSlab(open_file, make_slot_table, clock)
        file = self._slab.opened.file
        self._num_reopened = 0
        self.capacity_blocks = file.geometry.num_slots
        threads = plan_num_threads(
            slab_settings.num_threads, rows.row_bytes, has_direct_io=file.has_direct_io
        )
        store = SlabBlockStore(self._slab, rows, max_task_blocks, None if lifetime is None else wall_clock)
        super().__init__(
            config,
            primary_kv_view,
            settings,
            block_store=store,
            # The slot table has every block: no answer is cached beyond the moment of the start.
            options=ThreadOptions(threads, max_task_blocks, positive_ttl_s=0.0, joins_jobs=True),
            clock=clock,
            remove_blocks=store.remove_all,
        )
        write_document(slab_settings.path, self._namespace.identity)
        self._slab.opened.indexer.start(self._namespace)

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> SlabPlace:
        return open_slab_place(own)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        return probe_slab_place(own)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._encryption is not None and not self._encryption.serves(key):
            return False
        # Whether it is complete is read first: what is adopted between the two reads is found.
        opened = self._slab.opened
        is_complete = opened.indexer.is_complete
        is_held = opened.slots.is_held(self._namespace, key)
        if is_held and self._guarded.is_open:
            return True
        if (is_complete and not is_held) or len(key) > MAX_KEY_BYTES:
            return False
        return self._lookup.lookup(key)

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        del req_context
        if not self._slab.opened.indexer.is_complete:
            return Miss(MissCause.TIER_DOWN, TIER_TYPE, MappingProxyType({"reason": "indexing"}))
        known = self.explain_unused(key) or self._losses.explain(key)
        return known or self._slab.opened.indexer.siblings.explain(key)

    def reset(self, epoch: bytes) -> None:
        super().reset(epoch)
        self._losses.clear()
        self._slab.opened.indexer.siblings.clear()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._slab.opened.slots.touch(self._namespace, keys)

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        request = make_arrived(chains, req_context, self._clock())
        self._slab.opened.slots.report(self._namespace, lambda policy: policy.note_request(request))

    def request_finished(self, req_context: ReqContext) -> None:
        self._slab.opened.slots.report(self._namespace, lambda policy: policy.on_finished(req_context.req_id))

    def wait_indexed(self, timeout_s: float) -> bool:
        return self._slab.opened.indexer.wait_complete(timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        self._slab.opened.indexer.stop()
        return super().shutdown(timeout_s)

    def drain_evicted(self) -> Collection[OffloadKey] | None:
        if self._num_reopened != self._slab.num_reopened:
            self._num_reopened = self._slab.num_reopened
            return None  # every block of the file that was lost
        return self._slab.opened.slots.drain_evicted(self.keys_being_stored())
