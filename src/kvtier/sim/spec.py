"""The offloading back end of a simulated engine: production managers over rows without bytes, and no handlers.

It moves nothing. The primary's rows are one byte each: managers and budgets only compare shares of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvtier.base import CanonicalKVCaches, HandlerEntry, OffloadingSpec
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.tier import SimulatedTier, make_tier
from kvtier.sim.timeline import Timeline
from kvtier.tiering.manager import TieringOffloadingManager
from kvtier.tiering.primary import CPUPrimaryTierOffloadingManager

ROOM = 2
"""Books for so many times the blocks of a trace behave as any larger ones: nothing ever has to leave, and more than an
eighth stays free, below which write-back begins. One would write back what never leaves; more costs memory."""


class RowsWithoutBytes:
    """One byte for each block, and the same one for all, in place of host memory.

    Args:
        num_blocks: rows.
    """

    def __init__(self, num_blocks: int) -> None:
        self._rows = as_strided(np.zeros(1, np.int8), (num_blocks, 1), (0, 1))

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows."""
        return self._rows.data

    def cleanup(self) -> None:
        """Do nothing."""


class SimulatedSpec(OffloadingSpec):
    """Builds what the production connector drives.

    Args:
        engine: the engine.
        host: the primary tier and what is behind it.
        timeline: the clock of the managers and tiers.
        wake: called when a tier has a job to report.
        num_keys: blocks that the trace has, at most. Books are kept for ROOM times as many, whatever the capacities;
            budgets stay shares of the capacity.

    Attributes:
        tiers: the secondary tiers, in the order in which they are asked.
    """

    def __init__(
        self,
        engine: EngineModel,
        host: HostModel,
        timeline: Timeline,
        wake: Callable[[], object],
        num_keys: int | None = None,
    ) -> None:
        group = KVGroup(engine.block_tokens, ("all",), engine.block_bytes)
        super().__init__(
            OffloadingConfig(
                "simulation",
                ModelIdentity("simulation"),
                (group,),
                hash_block_size=engine.block_tokens,
                extra_config={"load_if": host.load_if.value},
            )
        )

        def bounded(num_blocks: int) -> int:
            return num_blocks if num_keys is None else min(num_blocks, max(1, ROOM * num_keys))

        primary = CPUPrimaryTierOffloadingManager(
            bounded(host.num_blocks),
            RowsWithoutBytes(host.num_blocks),
            host.cache_policy,
            store_threshold=host.store_threshold,
            max_tracker_size=host.max_tracker_size,
            clock=timeline,
        )
        view = primary.get_kv_memoryview()
        self.tiers: list[SimulatedTier] = [
            make_tier(
                self.config,
                view,
                replace(model, num_blocks=bounded(model.num_blocks)),
                timeline,
                engine.block_bytes,
                wake,
            )
            for model in host.tiers
        ]
        self._manager = TieringOffloadingManager(
            primary,
            self.tiers,
            lookup_deadline_s=host.lookup_deadline_s,
            clock=timeline,
            make_epoch=lambda: bytes(16),
        )

    def get_manager(self) -> TieringOffloadingManager:
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        del kv_caches
        yield from ()
