"""The secondary tier on a Valkey or Redis server or cluster.

Lookups are answered from memory or by a thread, and jobs are moved by threads, so the scheduler's thread never waits
for a server. One server serves any number of engines and models; it decides what to evict.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

from kvtier.base import Locality, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.misses import Miss
from kvtier.settings import parse_settings
from kvtier.tiering.base import NO_SETTINGS, TierSettings
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.place import TierFinding, name_place
from kvtier.tiering.kit.purging import remove_from_place
from kvtier.tiering.kit.quota_counts import make_quota_counts
from kvtier.tiering.kit.quota_keeper import QuotaKeeper
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.valkey.cluster import Cluster
from kvtier.tiering.valkey.errors import TIER_TYPE
from kvtier.tiering.valkey.names import ValkeyNamespace
from kvtier.tiering.valkey.place import ValkeyPlace, open_valkey_place, probe_valkey_place
from kvtier.tiering.valkey.servers import SingleServer
from kvtier.tiering.valkey.settings import ValkeySettings
from kvtier.tiering.valkey.store import ValkeyBlockStore

POSITIVE_TTL_S = 2.0
"""Seconds for which a block is believed to be held. Longer promises more blocks that were evicted meanwhile, each of
which costs a load that finds nothing; shorter looks up the same prefix again."""

MAX_TASK_BYTES = 16 * 2**20
"""Bytes of rows that a thread moves at a stretch, as one batch. Less looks up more often what the server holds; more
keeps a load waiting behind a store."""

MAX_TASK_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


QUOTA_PERMISSIONS = "+scan +object|idletime +memory|usage +client|no-touch"
"""What a user must be allowed to do beside moving blocks, where tenants have quotas."""


class ValkeyTier(
    ThreadedTier[ValkeyNamespace],
):
    """One value per block on a server, or a cluster of them, that any number of engines may share.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        clock: seconds, monotonic.
        own: the settings of ``ValkeySettings``, by name.

    Raises:
        ConfigError: a value that cannot work.
    """

    own_settings: ClassVar = ValkeySettings
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
        **own: object,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        valkey_settings = parse_settings(ValkeySettings, own, f"tier {TIER_TYPE!r}")
        servers = (Cluster if valkey_settings.cluster else SingleServer)(valkey_settings, clock)
        counts = make_quota_counts(config, TIER_TYPE, clock)
        keeper = None
        if counts is not None:
            open_place = partial(open_valkey_place, own)
            keeper = QuotaKeeper(TIER_TYPE, counts, open_place, clock, needed=QUOTA_PERMISSIONS)
        store = ValkeyBlockStore(
            servers,
            rows,
            valkey_settings.ttl_s,
            clock,
            renews=valkey_settings.renew_ttl,
            quotas=keeper,
            where=name_place(TIER_TYPE, self.place_setting, valkey_settings.list_reach()),
        )
        self._losses, self._siblings = store.losses, store.siblings
        super().__init__(
            config,
            primary_kv_view,
            settings,
            block_store=store,
            options=ThreadOptions(
                valkey_settings.num_threads,
                max_task_blocks=min(MAX_TASK_BLOCKS, max(1, MAX_TASK_BYTES // max(1, rows.row_bytes))),
                positive_ttl_s=POSITIVE_TTL_S,
                cuts_evenly=True,
                joins_jobs=True,
            ),
            clock=clock,
            remove_blocks=partial(remove_from_place, partial(open_valkey_place, own)),
        )

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> ValkeyPlace:
        return open_valkey_place(own)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        return probe_valkey_place(own)

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        del req_context
        return self.explain_unused(key) or self._losses.explain(key) or self._siblings.explain(key)

    def reset(self, epoch: bytes) -> None:
        super().reset(epoch)
        self._losses.clear()
