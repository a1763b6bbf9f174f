"""The secondary tier on a Mooncake store: memory that many machines lend to each other behind one master.

Lookups and jobs run on threads, so the scheduler's thread never waits for the store. Bytes go straight from and into
the primary's rows, which are registered with the client once. The store has no authentication: a process that reaches
its master or one of its clients may read and write what is in them, so the store belongs on a network of its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from kvtier.base import Locality, OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.errors import TierError
from kvtier.misses import Miss
from kvtier.settings import parse_settings
from kvtier.tiering.base import NO_SETTINGS, TierSettings
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.place import TierFinding, name_place
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.mooncake.client import MooncakeClient
from kvtier.tiering.mooncake.descriptions import DescriptionBuffer
from kvtier.tiering.mooncake.headers import HeaderPool
from kvtier.tiering.mooncake.native import TIER_TYPE, knock
from kvtier.tiering.mooncake.place import MooncakePlace, open_mooncake_place
from kvtier.tiering.mooncake.settings import MooncakeSettings
from kvtier.tiering.mooncake.store import MooncakeBlockStore, MooncakeNamespace

MAX_TASK_BYTES = 16 * 2**20
"""Bytes that a thread moves in one call. Less pays for the master's answers more often; more keeps a load waiting
behind a store, and the time limit of a transfer is for all of them."""

MAX_TASK_BLOCKS = 64
"""The same for very small blocks."""

POSITIVE_TTL_S = 2.0
"""Seconds for which "held" is believed. A lookup protects a block from eviction for 5 seconds, so this is
true nearly always; more would promise blocks that are gone, less looks up the same prefix again."""


class MooncakeTier(
    ThreadedTier[MooncakeNamespace],
):
    """Blocks in the memory of a Mooncake store.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        settings: the settings that every tier has.
        clock: seconds, monotonic.
        own: the settings of ``MooncakeSettings``, by name.

    Raises:
        ConfigError: a value that cannot work.
    """

    own_settings: ClassVar = MooncakeSettings
    can_encrypt: ClassVar[bool] = True
    no_quotas_reason: ClassVar[str] = (
        "because a store tells its clients neither what is in it nor when a block was used"
    )
    locality: ClassVar[Locality | None] = Locality.REMOTE
    place_setting: ClassVar[str] = "master"

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
        mooncake_settings = parse_settings(MooncakeSettings, own, f"tier {TIER_TYPE!r}")
        task_blocks = min(MAX_TASK_BLOCKS, max(1, MAX_TASK_BYTES // max(1, rows.row_bytes)))
        num_threads = mooncake_settings.num_threads
        is_encrypting = config.settings.encryption is not None and settings.encryption
        headers = HeaderPool(num_threads, task_blocks, rows.row_bytes if is_encrypting else 0)
        descriptions = (DescriptionBuffer(), DescriptionBuffer())
        memories = (rows.flat, headers.memory, *(one.memory for one in descriptions))
        client = MooncakeClient(mooncake_settings, memories, clock)
        store = MooncakeBlockStore(
            client, rows, headers, clock, descriptions, name_place(TIER_TYPE, self.place_setting, own)
        )
        self._losses, self._siblings = store.losses, store.siblings
        super().__init__(
            config,
            primary_kv_view,
            settings,
            block_store=store,
            options=ThreadOptions(
                num_threads,
                max_task_blocks=task_blocks,
                positive_ttl_s=POSITIVE_TTL_S,
                cuts_evenly=True,
                joins_jobs=True,
            ),
            clock=clock,
            remove_blocks=store.remove_all,
        )

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> MooncakePlace:
        return open_mooncake_place(own)

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        settings = parse_settings(MooncakeSettings, own, f"tier {TIER_TYPE!r}")
        try:
            knock(settings.master, settings.timeout_s)
        except TierError as error:
            return [TierFinding(is_good=False, text=str(error))]
        return [TierFinding(is_good=True, text=f"the master at {settings.master} answers")]

    def explain(
        self, key: OffloadKey, req_context: ReqContext, behind: Sequence[OffloadKey] = ()
    ) -> Miss | None:
        del req_context
        return self.explain_unused(key) or self._losses.explain(key) or self._siblings.explain(key)

    def reset(self, epoch: bytes) -> None:
        super().reset(epoch)
        self._losses.clear()
