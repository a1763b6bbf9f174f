"""The secondary tier on a Mooncake store: memory that many machines lend to each other behind one master.

The rows are registered with the client once, and bytes go straight from and into them. The store has no authentication:
a process that reaches its master or one of its clients may read and write what is in them, so the store belongs on a
network of its own.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar

from kvtier.base import Locality
from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.blobs import BlobPlace, BlobSettings, BlobTier
from kvtier.tiering.kit.place import TierFinding
from kvtier.tiering.kit.threaded_tier import ThreadOptions
from kvtier.tiering.mooncake.blobs import MooncakeBlobs, plan_task_blocks
from kvtier.tiering.mooncake.native import TIER_TYPE, knock
from kvtier.tiering.mooncake.settings import MooncakeSettings

POSITIVE_TTL_S = 2.0
"""Seconds for which "held" is believed. A lookup protects a block from eviction for 5 seconds, so this is
true nearly always; more would promise blocks that are gone, less looks up the same prefix again."""


class MooncakePlace(BlobPlace):
    """The values of a store without an engine.

    The names come from the master's page; the store is joined where there are descriptions, which only a client reads,
    and where values are read or removed.

    Args:
        blobs: the store.
    """

    def __init__(self, blobs: MooncakeBlobs) -> None:
        super().__init__(TIER_TYPE, blobs)
        self._store = blobs

    def end_removal(self, namespaces: Collection[str]) -> None:
        super().end_removal(namespaces)
        if self._store.num_deferred:
            text = "blocks are in use by readers and stay, the others are removed: try again later"
            raise TierError(TIER_TYPE, f"{self._store.num_deferred} {text}")


class MooncakeTier(BlobTier):
    """Blocks in the memory of a Mooncake store; the arguments are those of every ``BlobTier``."""

    own_settings: ClassVar = MooncakeSettings
    keeps_quotas: ClassVar[bool] = False
    no_quotas_reason: ClassVar[str] = (
        "because a store tells its clients neither what is in it nor when a block was used"
    )
    locality: ClassVar[Locality | None] = Locality.REMOTE
    place_setting: ClassVar[str] = "master"

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    @classmethod
    def open_blobs(
        cls, own: Mapping[str, object], clock: Callable[[], float], rows: Rows | None
    ) -> MooncakeBlobs:
        return MooncakeBlobs(parse_settings(MooncakeSettings, own, f"tier {TIER_TYPE!r}"), rows, clock)

    @classmethod
    def plan_threads(cls, settings: BlobSettings, row_bytes: int) -> ThreadOptions:
        return ThreadOptions(
            settings.num_threads,
            max_task_blocks=plan_task_blocks(row_bytes),
            positive_ttl_s=POSITIVE_TTL_S,
            cuts_evenly=True,
            joins_jobs=True,
        )

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> MooncakePlace:
        blobs = cls.open_blobs(own, time.monotonic, None)
        blobs.check()
        return MooncakePlace(blobs)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        settings = parse_settings(MooncakeSettings, own, f"tier {TIER_TYPE!r}")
        try:
            knock(settings.master, settings.timeout_s)  # joining the store would open listeners
        except TierError as error:
            return [TierFinding(is_good=False, text=str(error))]
        return [TierFinding(is_good=True, text=f"the master at {settings.master} answers")]
