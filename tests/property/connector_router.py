"""A router that reads the connector's events after each step, and the law that it is never lied to."""

from collections.abc import Sequence

from kvtier.base import OffloadKey, get_offload_block_hash, get_offload_group_idx
from kvtier.connector.common import BlockRemoved, BlockStored
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.block_table import BlockTable
from kvtier.tiering.example import ExampleSecondaryTier

Block = tuple[int, bytes]
"""KV group and content hash."""


class ConnectorRouter:
    """Believes the events of one engine, and compares what it believes with what the engine holds.

    Args:
        scheduler: publishes the events.
        table: host memory.
        tiers: the secondary tiers, of which events call the second "example.1".

    Attributes:
        num_events: events that were read.
    """

    def __init__(
        self,
        scheduler: OffloadingConnectorScheduler,
        table: BlockTable,
        tiers: Sequence[ExampleSecondaryTier],
    ) -> None:
        self._scheduler = scheduler
        self._table = table
        self._tiers = dict(zip(("example", "example.1"), tiers, strict=False))
        self._believed: dict[str | None, set[Block]] = {None: set()}
        self.num_events = 0

    def read(self) -> None:
        """Read the events of a step; fail when a block is believed to be somewhere where it is not."""
        for event in self._scheduler.take_events():
            self._apply(event)
            self.num_events += 1
        held = self._table.slots.held_blocks(self._table.get_block)
        ready = {block_of(key) for key, block in held.items() if block.ref_cnt >= 0}
        assert self._believed[None] == ready, "the router has a wrong view of host memory"
        for name, tier in self._tiers.items():
            lies = self._believed.get(name, set()) - set(map(block_of, tier.blocks))
            assert not lies, f"{name} is believed to hold {lies}"

    def _apply(self, event: BlockStored | BlockRemoved) -> None:
        believed = self._believed.setdefault(event.tier, set())
        blocks = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
        if isinstance(event, BlockRemoved):
            believed -= blocks
        else:
            believed |= blocks


def block_of(key: OffloadKey) -> Block:
    """Return what events call a block. Pure."""
    return get_offload_group_idx(key), get_offload_block_hash(key)
