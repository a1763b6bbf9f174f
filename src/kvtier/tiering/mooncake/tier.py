"""The secondary tier on a Mooncake store: memory that many machines lend to each other behind one master.

The rows are registered with the client once, and bytes go straight from and into them. The store has no authentication:
a process that reaches its master or one of its clients may read and write what is in them, so the store belongs on a
network of its own.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from kvtier.base import Locality
from kvtier.errors import TierError
from kvtier.settings import parse_settings
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.blobs import BlobSettings, BlobTier
from kvtier.tiering.kit.place import TierFinding
from kvtier.tiering.kit.threaded_tier import ThreadOptions
from kvtier.tiering.mooncake.blobs import MooncakeBlobs, plan_task_blocks
from kvtier.tiering.mooncake.native import TIER_TYPE, knock
from kvtier.tiering.mooncake.place import MooncakePlace, open_mooncake_place
from kvtier.tiering.mooncake.settings import MooncakeSettings

POSITIVE_TTL_S = 2.0
"""Seconds for which "held" is believed. A lookup protects a block from eviction for 5 seconds, so this is
true nearly always; more would promise blocks that are gone, less looks up the same prefix again."""


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
        return open_mooncake_place(own)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        settings = parse_settings(MooncakeSettings, own, f"tier {TIER_TYPE!r}")
        try:
            knock(settings.master, settings.timeout_s)  # joining the store would open listeners
        except TierError as error:
            return [TierFinding(is_good=False, text=str(error))]
        return [TierFinding(is_good=True, text=f"the master at {settings.master} answers")]
