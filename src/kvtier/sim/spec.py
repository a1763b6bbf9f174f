"""The offloading back end of a simulated engine: production managers over one-byte rows, and no handlers.

Managers and byte budgets only compare shares of the rows, so a row needs no real size.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvtier.base import CanonicalKVCaches, HandlerEntry, OffloadingSpec
from kvtier.config import GroupKind, KVGroup, LoadIf, ModelIdentity, OffloadingConfig
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.tier import SimulatedTier, make_tier
from kvtier.sim.timeline import Timeline
from kvtier.tiering.manager import TieringOffloadingManager

ROOM = 2
"""The tables hold at most this many times the blocks of a trace, which behaves like any larger capacity: nothing is
evicted, and more than an eighth stays free, below which write-back begins. A factor of one would write back blocks that
are never evicted; a larger one takes memory."""


class RowsWithoutBytes:
    """Stands for host memory: one shared byte as every block's row.

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
    """Builds the managers and tiers that the production connector drives.

    Args:
        engine: the engine.
        host: the primary tier and the tiers behind it.
        timeline: the clock of the managers and tiers.
        wake: called when a tier has a finished job.
        num_keys: blocks of the trace, at most. Tables are sized for ROOM times as many, whatever the capacities;
            budgets stay shares of the capacity.

    Attributes:
        tiers: the secondary tiers, in the order of lookups.
    """

    def __init__(
        self,
        engine: EngineModel,
        host: HostModel,
        timeline: Timeline,
        wake: Callable[[], object],
        num_keys: int | None = None,
    ) -> None:
        groups = [KVGroup(engine.block_tokens, ("all",), engine.block_bytes)]
        if engine.states is not None:
            groups.append(KVGroup(engine.block_tokens, ("states",), engine.block_bytes, kind=GroupKind.STATE))
        super().__init__(
            OffloadingConfig(
                "simulation",
                ModelIdentity("simulation"),
                tuple(groups),
                hash_block_size=engine.block_tokens,
                computes_last_token=True,
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
            measures_loads=host.load_if is LoadIf.FASTER,
            clock=timeline,
            make_epoch=lambda: bytes(16),
        )

    def get_manager(self) -> TieringOffloadingManager:
        return self._manager

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> Iterator[HandlerEntry]:
        del kv_caches
        yield from ()
