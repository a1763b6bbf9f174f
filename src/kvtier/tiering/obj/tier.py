"""The secondary tier in an object store.

Lookups and jobs run on threads, so the scheduler's thread never waits for the store. One bucket serves any number of
engines and models; each namespace has its own names under a prefix, and what lies under it shares one capacity.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

from kvtier.base import Locality, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.misses import Miss
from kvtier.quantities import MAX_BYTES
from kvtier.settings import parse_settings
from kvtier.tiering.base import NO_SETTINGS, TierSettings
from kvtier.tiering.kit.backend import Counters, rows_of
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.lifetime import make_lifetime
from kvtier.tiering.kit.place import TierFinding
from kvtier.tiering.kit.purging import remove_from_place
from kvtier.tiering.kit.quota_counts import make_quota_counts
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.obj.client import Client
from kvtier.tiering.obj.evictor import Evictor
from kvtier.tiering.obj.expiry import ObjectExpiry
from kvtier.tiering.obj.layout import ObjNamespace
from kvtier.tiering.obj.place import ObjPlace, open_obj_place, probe_obj_place
from kvtier.tiering.obj.quotas import ObjQuotas, require_quotas_possible
from kvtier.tiering.obj.settings import ObjSettings, require_capacity
from kvtier.tiering.obj.store import ObjBlockStore

TIER_TYPE = "obj"

POSITIVE_TTL_S = 60.0
"""Seconds for which "held" is believed. Shorter pays a request and a round trip for a block that is still there; longer
promises for longer what another instance has deleted, which costs a failed load."""

COUNTS = ("hits", "absent", "damaged", "foreign", "loaded_bytes", "stored_blocks", "stored_bytes", "existed")
CAPACITY_COUNTS = ("declined", "evicted", "evicted_bytes", "failed_passes")


class ObjTier(
    ThreadedTier[ObjNamespace],
):
    """Objects in a bucket that any number of engines may share.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, for the ages of objects.
        own: the settings of ``ObjSettings``, by name.

    Raises:
        ConfigError: a value that cannot work.
        MissingExtraError: the client library is not installed.
    """

    own_settings: ClassVar = ObjSettings
    can_encrypt: ClassVar[bool] = True
    keeps_quotas: ClassVar[bool] = True
    locality: ClassVar[Locality | None] = Locality.REMOTE
    place_setting: ClassVar[str] = "url"

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        settings: TierSettings = NO_SETTINGS,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        **own: object,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        obj_settings = parse_settings(ObjSettings, own, f"tier {TIER_TYPE!r}")
        require_capacity(obj_settings, ENVELOPE_BYTES + rows.row_bytes)
        lifetime = make_lifetime(obj_settings.ttl_s)
        expiry = None if lifetime is None else ObjectExpiry(lifetime, wall_clock)
        client = Client(obj_settings, clock, expiry)
        capacity_bytes = obj_settings.capacity_bytes
        counts = make_quota_counts(config, TIER_TYPE, clock)
        quotas = None
        if counts is not None:
            require_quotas_possible(obj_settings)
            quotas = ObjQuotas(counts, obj_settings.target.root, is_bound=capacity_bytes is None)
        is_tidied = capacity_bytes is not None or expiry is not None or quotas is not None
        counters = Counters(*COUNTS, *(CAPACITY_COUNTS if is_tidied else ()))
        evictor = None
        if is_tidied:
            most_bytes = MAX_BYTES if capacity_bytes is None else capacity_bytes
            evictor = Evictor(client, obj_settings.target.root, most_bytes, counters, expiry, quotas)
        if capacity_bytes is not None:
            self.capacity_blocks = capacity_bytes // (ENVELOPE_BYTES + rows.row_bytes)
        store = ObjBlockStore(client, rows, obj_settings, evictor, counters, clock)
        self._losses, self._siblings = store.losses, store.siblings
        super().__init__(
            config,
            primary_kv_view,
            settings,
            block_store=store,
            options=ThreadOptions(obj_settings.num_threads, 1, POSITIVE_TTL_S),
            clock=clock,
            remove_blocks=partial(remove_from_place, partial(open_obj_place, own)),
        )

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> ObjPlace:
        return open_obj_place(own)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        return probe_obj_place(own)

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        del req_context
        return self.explain_unused(key) or self._losses.explain(key) or self._siblings.explain(key)

    def reset(self, epoch: bytes) -> None:
        super().reset(epoch)
        self._losses.clear()
