"""A tier of a user, whose place is in memory: what the commands need of a tier, and nothing of kvtier's own tiers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError, TierError
from kvtier.namespace import make_namespace
from kvtier.testing.tier_driver import ROW_BYTES, make_config
from kvtier.tiering.base import NO_SETTINGS, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.kit.place import (
    Amount,
    BlockState,
    Place,
    PlaceBlock,
    PlaceNamespace,
    PlaceSummary,
    TierFinding,
)

NAMESPACES = {
    namespace.name: namespace
    for namespace in (make_namespace(make_config(model), ROW_BYTES) for model in ("model-a", "model-b"))
}
A, B = sorted(NAMESPACES)


class MemoryPlace(Place):
    """Blocks that a test has put down."""

    tier: ClassVar[str] = "tests.cli.place.places:MemoryTier"
    states: ClassVar[dict[str, BlockState]] = {}
    blocks_by_address: ClassVar[dict[str, PlaceBlock]] = {}
    has_owner: ClassVar[bool] = False
    was_forced: ClassVar[bool] = False
    num_ended: ClassVar[int] = 0

    def namespaces(self) -> list[PlaceNamespace]:
        names = {block.namespace for block in self.blocks_by_address.values()}
        return [PlaceNamespace(name, NAMESPACES[name].document) for name in sorted(names)]

    def blocks(self, namespaces: Collection[str] | None = None) -> Iterator[PlaceBlock]:
        for block in list(self.blocks_by_address.values()):
            if namespaces is None or block.namespace in namespaces:
                yield block

    def summary(self) -> PlaceSummary:
        return PlaceSummary(
            capacity_bytes=1000, temporary=Amount(1, 2), foreign=Amount(2, 3), users=("process 1",)
        )

    def check(self, block: PlaceBlock) -> BlockState:
        return self.states.get(block.address, BlockState.WHOLE)

    def begin_removal(self, *, is_forced: bool = False) -> None:
        type(self).was_forced = is_forced
        if self.has_owner and not is_forced:
            raise TierError("memory", "belongs to process 1")

    def remove(self, blocks: Sequence[PlaceBlock], *, unless_changed: bool) -> Amount:
        amount = Amount()
        for block in blocks:
            del self.blocks_by_address[block.address]
            amount = amount.plus(1, block.num_bytes)
        return amount

    def end_removal(self, namespaces: Collection[str]) -> None:
        type(self).num_ended += 1


class MemoryTier(ExampleSecondaryTier):
    """Its tier."""

    own_settings: ClassVar = None
    place_setting: ClassVar[str | None] = "where"

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        where: str,
        settings: TierSettings = NO_SETTINGS,
    ) -> None:
        super().__init__(config, primary_kv_view, settings=settings)
        self.where = where

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> Place:
        if own != {"where": "here"}:
            raise ConfigError("where", own.get("where"), 'must be "here"')
        return MemoryPlace("here")

    @classmethod
    def probe(cls, own: Mapping[str, object]) -> list[TierFinding]:
        if own["where"] == "crash":
            raise RuntimeError("a bug of its author")
        return [TierFinding(own["where"] == "here", "looked", is_note=own["where"] == "here")]


def put_down(
    namespace: str,
    address: str,
    age_s: float,
    now_s: float,
    state: BlockState = BlockState.WHOLE,
    tenant: int | None = None,
) -> None:
    """Put a block of 100 bytes into the place."""
    MemoryPlace.blocks_by_address[address] = PlaceBlock(namespace, address, 100, now_s - age_s, tenant=tenant)
    MemoryPlace.states[address] = state
