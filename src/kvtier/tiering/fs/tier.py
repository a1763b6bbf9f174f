"""The secondary tier on a local disk: packs of slots, each written by one engine and read by all of a directory.

Lookups are answered from memory and jobs are moved by threads, so the scheduler's thread never waits for the disk. One
directory serves any number of engines, models and processes of a host: each namespace has a folder, all share one
capacity, and what one engine stores is found by the others a tenth of a second later.
"""

import os
import secrets
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
from kvtier.errors import ConfigError, PlaceError
from kvtier.misses import Miss, MissCause
from kvtier.settings import parse_settings
from kvtier.tiering.base import NO_SETTINGS, TierSettings
from kvtier.tiering.fs.block_accounts import BlockAccounts
from kvtier.tiering.fs.catalog import PackCatalog
from kvtier.tiering.fs.directory import PackDirectory
from kvtier.tiering.fs.documents import PackSiblings
from kvtier.tiering.fs.expiry import SlotExpiry
from kvtier.tiering.fs.keeper import Keeper
from kvtier.tiering.fs.neighbours import Neighbours, PackNamespace
from kvtier.tiering.fs.notes import list_capacities
from kvtier.tiering.fs.pack_header import disk_bytes_of
from kvtier.tiering.fs.place import TIER_TYPE, PackPlace, open_pack_place, probe_pack_place
from kvtier.tiering.fs.room import Room
from kvtier.tiering.fs.settings import PackSettings, explain_shrinking, plan_max_task_blocks
from kvtier.tiering.fs.slot_table import SlotTable
from kvtier.tiering.fs.store import PackBlockStore
from kvtier.tiering.fs.system_calls import REAL_CALLS, SystemCalls
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.disk import Durability, is_aligned, plan_num_threads
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES
from kvtier.tiering.kit.lifetime import make_lifetime
from kvtier.tiering.kit.place import TierFinding
from kvtier.tiering.kit.tenant_counts import make_tenant_counts
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys

DEFAULT_POLICY = "lru"


class FSTier(
    ThreadedTier[PackNamespace],
):
    """Slots in packs, below a directory that the engines of a host share.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, comparable with the file system's times.
        calls: the system, as far as packs are used.
        has_thread: whether the keeper has a thread of its own; otherwise its owner calls ``keeper.tick``.
        own: the settings of ``PackSettings``, by name.

    Attributes:
        keeper: keeps up with other processes.

    Raises:
        ConfigError: a value that cannot work, or a directory that cannot be used.
        UnknownNameError: no policy has the name of the setting.
    """

    own_settings: ClassVar = PackSettings
    can_encrypt: ClassVar[bool] = True
    keeps_quotas: ClassVar[bool] = True
    locality: ClassVar[Locality | None] = Locality.LOCAL
    place_setting: ClassVar[str] = "root_dir"
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
        has_thread: bool = True,
        **own: object,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        pack_settings = parse_settings(PackSettings, own, f"tier {TIER_TYPE!r}")
        process = f"{os.getpid()}x{secrets.token_hex(4)}"
        directory = open_directory(pack_settings, primary_kv_view, process, calls, clock)
        self.capacity_blocks = max(1, pack_settings.capacity_bytes // directory.geometry.slot_bytes)
        make_policy = partial(create_cache_policy, settings.policy or DEFAULT_POLICY, self.capacity_blocks)
        lifetime = make_lifetime(pack_settings.ttl_s)
        self._losses = make_losses(TIER_TYPE, self.capacity_blocks, clock)
        accounts = BlockAccounts(
            emit_events=settings.emit_events,
            losses=self._losses,
            expiry=None if lifetime is None else SlotExpiry(lifetime, wall_clock),
            tenant_counts=make_tenant_counts(config, TIER_TYPE, directory.geometry.slot_bytes),
        )
        table = SlotTable(make_policy, wall_clock, accounts)
        is_durable = pack_settings.durability is Durability.FDATASYNC
        self._catalog = catalog = PackCatalog(TIER_TYPE, directory, table, wall_clock, is_durable=is_durable)
        self._table = table
        room = Room(catalog, pack_settings.capacity_bytes, clock, wall_clock)
        self._siblings = PackSiblings(directory, TIER_TYPE)
        self.keeper = Keeper(
            catalog, room, process, pack_settings.capacity_bytes, self._siblings, clock, wall_clock
        )
        max_task_blocks = plan_max_task_blocks(rows.row_bytes)
        store = PackBlockStore(
            catalog,
            room,
            self.keeper,
            rows,
            max_task_blocks,
            partial(Neighbours, lifetime, wall_clock),
            has_direct_io=directory.has_direct_io,
        )
        threads = plan_num_threads(
            pack_settings.num_threads, rows.row_bytes, has_direct_io=directory.has_direct_io
        )
        super().__init__(
            config,
            primary_kv_view,
            settings,
            block_store=store,
            # Every block that is known is in memory: no answer is cached beyond the moment of the start.
            options=ThreadOptions(threads, max_task_blocks, positive_ttl_s=0.0, joins_jobs=True),
            clock=clock,
            remove_blocks=store.remove_all,
        )
        self.keeper.start(store.is_whole, store.remove_own, has_thread=has_thread)

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> PackPlace:
        return open_pack_place(own)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        return probe_pack_place(own)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._encryption is not None and not self._encryption.serves(key):
            return False
        catalog, namespace = self._catalog, self._namespace
        # Whether it is complete is read first: what is listed between the two reads is found.
        is_complete = catalog.is_indexed
        is_held = self._table.is_held(namespace, key) or namespace.neighbours.find(key) is not None
        if is_held and self._guarded.is_open:
            return True
        if (is_complete and not is_held) or len(key) > MAX_KEY_BYTES:
            catalog.note_missing()
            return False
        return self._lookup.lookup(key)

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        del req_context
        if not self._catalog.is_indexed:
            return Miss(MissCause.TIER_DOWN, TIER_TYPE, MappingProxyType({"reason": "indexing"}))
        if self._namespace.neighbours.is_over(key):
            return Miss(MissCause.EXPIRED, TIER_TYPE)
        known = self.explain_unused(key) or self._losses.explain(key)
        if known is None and not self._catalog.is_held(self._namespace, key):
            known = self._siblings.explain(key)
        return known

    def reset(self, epoch: bytes) -> None:
        super().reset(epoch)
        self._losses.clear()
        self._siblings.clear()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._table.touch(self._namespace, keys)
        self.keeper.note_uses(self._namespace, list(keys))

    def note_request(self, chains: Sequence[Sequence[OffloadKey]], req_context: ReqContext) -> None:
        self.keeper.note_use()
        request = make_arrived(chains, req_context, self._clock())
        self._table.report(self._namespace, lambda policy: policy.note_request(request))

    def request_finished(self, req_context: ReqContext) -> None:
        self._table.report(self._namespace, lambda policy: policy.on_finished(req_context.req_id))

    def wait_indexed(self, timeout_s: float) -> bool:
        return self._catalog.wait_indexed(timeout_s)

    def drain_evicted(self) -> Collection[OffloadKey] | None:
        return self._table.drain_evicted(self.keys_being_stored(), self._namespace.neighbours.__contains__)


def open_directory(
    settings: PackSettings,
    rows: memoryview,
    process: str,
    calls: SystemCalls,
    clock: Callable[[], float],
) -> PackDirectory:
    """Make the directory ready for rows such as these.

    Args:
        settings: where it is, and what it may take.
        rows: the primary's, shape (num_blocks, row_stride).
        process: name of this tier.
        calls: the system.
        clock: seconds, monotonic.

    Raises:
        ConfigError: it cannot be used, has not room for a block, or direct I/O is insisted on and impossible.
    """
    row_bytes = (rows.shape or (0, 0))[1]
    directory = PackDirectory(
        settings.root_dir,
        row_bytes,
        settings.capacity_bytes,
        process=process,
        file_mode=settings.file_mode,
        direct_io=settings.direct_io is not False and is_aligned(rows),
        pack_bytes=settings.pack_bytes,
        calls=calls,
        clock=clock,
    )
    least_bytes = disk_bytes_of(directory.geometry._replace(num_slots=1))
    if settings.capacity_bytes < least_bytes:
        remedy = f"one block takes {least_bytes} bytes with its headers and journal; give many times that"
        raise ConfigError("capacity_bytes", settings.capacity_bytes, remedy)
    directory.make_ready()
    if settings.direct_io and not directory.has_direct_io:
        raise ConfigError(
            "direct_io", value=True, remedy='the file system or the rows forbid it: say "auto" to go without'
        )
    allowed = list_capacities(settings.root_dir, settings.file_mode)
    shrinking = explain_shrinking(settings, directory.used_bytes(), allowed)
    if shrinking is not None:
        raise PlaceError("capacity_bytes", settings.capacity_bytes, shrinking)
    return directory
