"""The secondary tier on a Valkey or Redis server or cluster.

One server serves any number of engines and models; it decides what to evict.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from kvtier.base import Locality
from kvtier.settings import parse_settings
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.kit.blobs import BlobSettings, BlobTier
from kvtier.tiering.kit.threaded_tier import ThreadOptions
from kvtier.tiering.valkey.blobs import ValkeyBlobs
from kvtier.tiering.valkey.errors import TIER_TYPE
from kvtier.tiering.valkey.settings import ValkeySettings

POSITIVE_TTL_S = 2.0
"""Seconds for which a block is believed to be held. Longer promises more blocks that were evicted meanwhile, each of
which costs a load that finds nothing; shorter looks up the same prefix again."""

MAX_TASK_BYTES = 16 * 2**20
"""Bytes of rows that a thread moves at a stretch, as one batch. Less waits more often for the server's answer; more
keeps a load waiting behind a store."""

MAX_TASK_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


class ValkeyTier(BlobTier):
    """Values on a server or cluster that any number of engines may share.

    Its arguments are those of every ``BlobTier``. A thread moves a batch of blocks over one connection, and small jobs
    of several requests share one, as a round trip costs more than a small block.
    """

    own_settings: ClassVar = ValkeySettings
    locality: ClassVar[Locality | None] = Locality.REMOTE
    place_setting: ClassVar[str] = "url"

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    @classmethod
    def open_blobs(
        cls, own: Mapping[str, object], clock: Callable[[], float], rows: Rows | None
    ) -> ValkeyBlobs:
        del rows  # the kernel takes any memory
        return ValkeyBlobs(parse_settings(ValkeySettings, own, f"tier {TIER_TYPE!r}"), clock)

    @classmethod
    def plan_threads(cls, settings: BlobSettings, row_bytes: int) -> ThreadOptions:
        return ThreadOptions(
            settings.num_threads,
            max_task_blocks=min(MAX_TASK_BLOCKS, max(1, MAX_TASK_BYTES // max(1, row_bytes))),
            positive_ttl_s=POSITIVE_TTL_S,
            cuts_evenly=True,
            joins_jobs=True,
        )
