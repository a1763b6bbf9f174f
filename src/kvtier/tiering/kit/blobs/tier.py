"""The secondary tier over named bytes: everything of it but the client of its backend.

Lookups and jobs run on threads, so the scheduler's thread never waits for the backend. One backend serves any number of
engines and models; each namespace has its own names, and what is there shares one capacity.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import ClassVar

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.misses import Miss
from kvtier.quantities import MAX_BYTES
from kvtier.tiering.base import NO_SETTINGS, TierSettings
from kvtier.tiering.kit.backend import Counters, Rows, rows_of
from kvtier.tiering.kit.blobs.contract import Blobs
from kvtier.tiering.kit.blobs.evictor import Evictor
from kvtier.tiering.kit.blobs.place import FIRST_PAUSE_S, BlobPlace, BlobSiblings
from kvtier.tiering.kit.blobs.quotas import BlobQuotas
from kvtier.tiering.kit.blobs.settings import BlobSettings, require_capacity, require_listing
from kvtier.tiering.kit.blobs.store import CAPACITY_COUNTS, COUNTS, BlobNamespace, BlobStore
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.lifetime import make_lifetime
from kvtier.tiering.kit.place import TierFinding, name_place
from kvtier.tiering.kit.quota_counts import make_quota_counts
from kvtier.tiering.kit.siblings import SiblingNamespaces
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys

POSITIVE_TTL_S = 60.0
"""Seconds for which "held" is believed. Shorter pays a request and a round trip for a block that is still there; longer
promises for longer what another instance has deleted, which costs a failed load."""


class BlobTier(ThreadedTier[BlobNamespace]):
    """Blocks in a backend that any number of engines may share. A tier names itself and opens its backend.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970, for the ages of blobs.
        own: the tier's own settings, by name.

    Raises:
        ConfigError: a value that cannot work.
    """

    own_settings: ClassVar[type[BlobSettings]]
    can_encrypt: ClassVar[bool] = True
    keeps_quotas: ClassVar[bool] = True
    place_setting: ClassVar[str]

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
        tier = self.get_tier_type()
        require_lasting_keys(config, tier)
        rows = rows_of(primary_kv_view)
        blobs = self.open_blobs(own, clock, rows)
        block_bytes = ENVELOPE_BYTES + rows.row_bytes
        counts = make_quota_counts(config, tier, clock)
        capacity_bytes = blobs.settings.capacity_bytes
        require_capacity(blobs.settings, block_bytes)
        if not (blobs.can_list and blobs.has_times):
            has_quotas = counts is not None
            require_listing(
                blobs.settings, expires_itself=blobs.expires_itself, has_quotas=has_quotas, tier=tier
            )
        quotas = None
        if counts is not None:
            quotas = BlobQuotas(counts, blobs.names, is_bound=capacity_bytes is None)
        lifetime = None if blobs.expires_itself else make_lifetime(blobs.settings.ttl_s)
        is_tidied = capacity_bytes is not None or lifetime is not None or quotas is not None
        counters = Counters(*COUNTS, *(CAPACITY_COUNTS if is_tidied else ()))
        evictor = None
        if is_tidied:
            most_bytes = MAX_BYTES if capacity_bytes is None else capacity_bytes
            evictor = Evictor(tier, blobs, most_bytes, counters, lifetime, quotas, wall_clock)
        if capacity_bytes is not None:
            self.capacity_blocks = capacity_bytes // block_bytes
        where = name_place(tier, self.place_setting, blobs.settings.list_reach())
        place = BlobSiblings(tier, blobs, has_capacity=capacity_bytes is not None)
        siblings = SiblingNamespaces(tier, place, clock, FIRST_PAUSE_S, where=where)
        store = BlobStore(tier, blobs, rows, siblings, evictor, counters, lifetime, clock, wall_clock)
        self._losses, self._siblings = store.losses, siblings
        super().__init__(
            config,
            primary_kv_view,
            settings,
            block_store=store,
            options=self.plan_threads(blobs.settings, rows.row_bytes),
            clock=clock,
            remove_blocks=blobs.remove_namespace,
        )

    @classmethod
    @abstractmethod
    def open_blobs(cls, own: Mapping[str, object], clock: Callable[[], float], rows: Rows | None) -> Blobs:
        """Return the backend that the tier's own settings describe, without asking it anything.

        Args:
            own: as in a configuration.
            clock: seconds, monotonic.
            rows: the primary's; None for a command without an engine, which makes nothing there.

        Raises:
            ConfigError: a setting that cannot work.
            TierError: there is nothing of that name, where it is not made.
        """

    @classmethod
    def plan_threads(cls, settings: BlobSettings, row_bytes: int) -> ThreadOptions:
        """Return how the threads work; by default each moves one block at a time, as suits one request for each."""
        del row_bytes
        return ThreadOptions(settings.num_threads, 1, POSITIVE_TTL_S)

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> BlobPlace:
        blobs = cls.open_blobs(own, time.monotonic, None)
        if not blobs.can_list:
            remedy = "cannot say what is in it: its blocks cannot be seen without an engine's keys"
            raise ConfigError("PLACE", blobs.where, remedy)
        try:
            blobs.check()
        except TierError:
            blobs.close()
            raise
        return BlobPlace(cls.get_tier_type(), blobs)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        try:
            with closing(cls.open_blobs(own, time.monotonic, None)) as blobs:
                proof = "lets us write" if blobs.check_writing() else "may be read"
        except TierError as error:
            return [TierFinding(is_good=False, text=str(error))]
        return [TierFinding(is_good=True, text=f"{blobs.where} answers and {proof}")]

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        del req_context
        return self.explain_unused(key) or self._losses.explain(key) or self._siblings.explain(key)

    def reset(self, epoch: bytes) -> None:
        super().reset(epoch)
        self._losses.clear()
