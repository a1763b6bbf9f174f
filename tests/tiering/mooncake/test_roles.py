"""The roles of the mooncake tier, and the contract of its place, over a real store."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from tests.tiering.mooncake.conftest import Values
from tests.tiering.mooncake.live import KEPT_CLIENTS, LiveStore
from tests.tiering.roles.every_role import EveryRole

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.damage import flip_bit
from kvtier.testing.place_suite import MODELS, PlaceSuite, name_of
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.kit.backend import Rows
from kvtier.tiering.mooncake import MooncakeTier
from kvtier.tiering.mooncake.blobs import MooncakeBlobs
from kvtier.tiering.mooncake.tier import MooncakePlace

pytestmark = pytest.mark.servers


def reach(store: LiveStore) -> dict[str, object]:
    """Return a tier's settings for the store."""
    return {"master": store.address, "admin_port": store.admin_port, "allow_any_interface": True}


class OfKeptClients(MooncakeTier):
    """The tier, in tests that begin one after another."""

    @classmethod
    def open_blobs(
        cls, own: Mapping[str, object], clock: Callable[[], float], rows: Rows | None
    ) -> MooncakeBlobs:
        return KEPT_CLIENTS.open_blobs(own, clock, rows)

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> MooncakePlace:
        return MooncakePlace(KEPT_CLIENTS.open_blobs(own))


class TestPureClient(EveryRole):
    """In the memory of others."""

    tier_class = OfKeptClients
    lacks: ClassVar = {
        "evictions": "a store evicts by itself and names no block",
        "quotas": "a store tells its clients neither what is in it nor when a block was used",
        "expiry": "a store has no time to live",
        "emptied": "a store is not looked after: what it has lost is found by loads",
        "lengths": "a lookup says that a value is there, not how long it is",
        "removal at once": "what was read is leased, and removed when that has ended",
        "untouched slots": "bytes are checked where they land, in the slot",
        "existed": "a store says the same of a value that it finds and of one that it writes",
        "counts": "clients cannot list",
        "empty values": "a store takes no value without bytes",
        "documents": "clients cannot list: descriptions have 32 names of their own",
    }

    @pytest.fixture(autouse=True)
    def _use_store(self, cleared_store: LiveStore, values: Values) -> None:
        self.store = cleared_store
        self.values = values

    def own_settings(self) -> dict[str, object]:
        return reach(self.store)

    def get_backend(self) -> Values:
        return self.values


class TestPlace(PlaceSuite):
    """What commands without an engine see."""

    tier_class = OfKeptClients

    @pytest.fixture(autouse=True)
    def _use_store(self, cleared_store: LiveStore, values: Values) -> None:
        self.store = cleared_store
        self.values = values

    def own_settings(self, directory: Path) -> Mapping[str, object]:
        return reach(self.store)

    def make_tier(self, config: OffloadingConfig, rows: memoryview, directory: Path) -> SecondaryTierManager:
        return OfKeptClients(config, rows, **reach(self.store))  # type: ignore[arg-type]  # a test's own

    def damage(self, directory: Path, key: OffloadKey) -> None:
        name = self.values.name_of(name_of(MODELS[0]), key)
        damaged = flip_bit(self.values.read(name) or b"", key)
        assert damaged is not None
        self.values.write(name, damaged)
