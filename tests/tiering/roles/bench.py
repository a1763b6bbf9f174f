"""What the roles of a tier are tested on: tiers that it builds, and its backend, read and changed past them.

A role is a class of cases in a module of this folder; ``every_role.EveryRole`` is all of them. A new tier's
``test_roles.py`` inherits that and supplies:

- ``tier_class``, and ``own_settings``: all tiers and places of one test have the same backend, which begins empty;
- ``get_backend``: a ``RawBackend``, which knows where the backend keeps a block's envelope and row. The backend may be
  a server, a folder of files with a block each, or slots in a file: a name is whatever finds a block there again;
- ``lacks``: what the tier cannot do, by one of ``ABILITIES``, with the reason. The cases that need it are not
  collected, and those that say how it is refused are;
- ``small``, where it says what it evicts; ``renews`` and ``no_ttl``, where blocks expire; its own way for
  ``pass_time``, where the tier keeps times by a clock of the test and not in the backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

import pytest
from tests.tiering.tenant_driver import TenantDriver

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.namespace import make_namespace
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import HANG_GUARD_S, ROW_BYTES, TierDriver, key_of, make_config, make_rows
from kvtier.tiering.base import NO_SETTINGS, PurgeOutcome, SecondaryTierManager, TierSettings
from kvtier.tiering.kit.place import PlaceBlock

Case = TypeVar("Case", bound=Callable[..., None])

MODELS = ("model-a", "model-b", "model-c")

ABILITIES = {
    "raw": "the test can read and change what the backend holds",
    "sharing": "several tiers share a backend",
    "one copy": "a block is there once, whoever stores it",
    "existed": "a store tells what it finds from what it writes",
    "removals": "the test can remove single blocks past the tier, which are then absent and not damaged",
    "emptied": "the tier finds out that its backend was emptied",
    "siblings": "a miss names another namespace that has the block",
    "a line": "an empty namespace next to a full one is said at the start",
    "counts": "that line says how many blocks the other one has",
    "documents": "descriptions of namespaces are kept under names of their own",
    "untouched slots": "a load that fails leaves its slot as it was",
    "removal at once": "a damaged block is removed before its load is reported",
    "whole removals": "a namespace that was removed is gone, although an engine that uses it lives",
    "foreign values": "a value of another version stays where it is",
    "other lengths": "a value in the backend may have another length than a block",
    "empty values": "and may be empty",
    "lengths": "a lookup finds out that a value has another length",
    "encryption": "the tier can encrypt",
    "quotas": "the tier keeps the quotas of tenants",
    "quotas at once": "and while it has room too",
    "quotas of all models": "and over the blocks of all models together",
    "expiry": "blocks have a time to live",
    "remains": "an engine can tell that a block of another one was there and is over",
    "ages": "the test can let time pass for what is stored",
    "single ages": "and for one block alone",
    "evictions": "the tier says which blocks it has evicted",
    "small jobs": "and each small job is stored by itself",
}
"""What a tier may lack."""


def needs(*abilities: str) -> Callable[[Case], Case]:
    """Collect a case only for tiers that lack none of these."""
    return lambda case: _note(case, "needed_abilities", abilities)


def only_without(ability: str) -> Callable[[Case], Case]:
    """Collect a case only for tiers that lack this."""
    return lambda case: _note(case, "missing_ability", ability)


def _note(case: Case, name: str, value: object) -> Case:
    setattr(case, name, value)
    return case


class RawBackend(ABC):
    """What a backend holds under names. Only names of one test are seen, which begins with none.

    What stands under a block's name is its envelope and its row, without what else a backend keeps around them.
    """

    @abstractmethod
    def name_of(self, namespace: str, name: bytes) -> str:
        """Return the name of a block that need not be there; where blocks are plain its key is ``name``."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return every name that has something."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return what is there, None when that is nothing."""

    @abstractmethod
    def write(self, name: str, value: bytes) -> None:
        """Put something in place of what is there."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove what is there."""

    def clear(self) -> None:
        """Remove everything."""
        for name in self.names():
            self.remove(name)

    def dump(self) -> bytes:
        """Return everything that is kept anywhere, names too."""
        return b"\0".join(part for name in self.names() for part in (name.encode(), self.read(name) or b""))

    @abstractmethod
    def strange_names(self, namespace: str) -> list[str]:
        """Return names that look like ours, as far as possible, and are not."""

    def document_name(self, namespace: str) -> str:
        """Return the name of a namespace's description, in a backend that does not lack "documents"."""
        raise NotImplementedError

    def add_age(self, name: str, seconds: float) -> None:
        """Let what is there have been written and used that much earlier, in a backend that does not lack "ages"."""
        raise NotImplementedError


class RoleSuite(ABC):
    """A tier under test.

    Attributes:
        tier_class: the tier.
        lacks: what it cannot do, by the name that cases give it, with the reason.
    """

    tier_class: ClassVar[type[SecondaryTierManager]]
    lacks: ClassVar[Mapping[str, str]] = {}
    clock: ManualClock
    drivers: list[TenantDriver]

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("Test"):
            return
        assert cls.lacks.keys() <= ABILITIES.keys(), "each ability is explained"
        for name in dir(cls):
            case = getattr(cls, name, None)
            missing = getattr(case, "missing_ability", None)
            if not cls.lacks.keys().isdisjoint(getattr(case, "needed_abilities", ())) or (
                missing is not None and missing not in cls.lacks
            ):
                setattr(cls, name, None)

    @abstractmethod
    def own_settings(self) -> dict[str, object]:
        """Return the tier's own settings; all tiers of one test have the same backend."""

    def get_backend(self) -> RawBackend:
        """Return the backend of a tier that does not lack "raw"."""
        raise NotImplementedError(self.lacks["raw"])

    def build(
        self, config: OffloadingConfig, rows: memoryview, settings: TierSettings, **own: object
    ) -> SecondaryTierManager:
        """Build a tier over ``rows``."""
        made = self.own_settings() | own
        return self.tier_class(config, rows, settings=settings, **made)

    @pytest.fixture(autouse=True)
    def _end_tiers(self) -> Iterator[None]:
        self.clock = ManualClock()
        self.drivers = []
        yield
        for driver in self.drivers:
            assert driver.tier.shutdown(HANG_GUARD_S), "the tier's threads did not end"

    def start(
        self,
        model: str = MODELS[0],
        extra: Mapping[str, object] | None = None,
        settings: TierSettings = NO_SETTINGS,
        **own: object,
    ) -> TenantDriver:
        """Return a tier with something that drives it; it ends with the test.

        Args:
            model: of the engine.
            extra: settings of the engine beyond its tiers.
            settings: those that every tier has.
            own: the tier's own, beyond those of ``own_settings``.
        """
        rows = make_rows()
        config = replace(make_config(model), extra_config=dict(extra or {}))
        self.drivers.append(TenantDriver(self.build(config, rows, settings, **own), rows))
        return self.drivers[-1]

    def namespace_of(self, model: str = MODELS[0]) -> str:
        """Return the name of a plain engine's namespace."""
        return make_namespace(make_config(model), ROW_BYTES).name

    def name_of(self, number: int, model: str = MODELS[0]) -> str:
        """Return the name under which the backend has a block of a plain engine."""
        return self.get_backend().name_of(self.namespace_of(model), key_of(number))

    def list_blocks(self) -> list[PlaceBlock]:
        """Return what a command without an engine sees."""
        place = self.tier_class.open_place(self.own_settings())
        try:
            return list(place.blocks())
        finally:
            place.close()

    def held_keys(self) -> list[OffloadKey]:
        """Return the names of blocks of whatever namespace, which are keys where blocks are plain."""
        return [OffloadKey(block.name) for block in self.list_blocks() if block.name is not None]

    def count_foreign(self) -> int:
        """Return how many names a place has that are not ours."""
        place = self.tier_class.open_place(self.own_settings())
        try:
            list(place.blocks())
            return place.summary().foreign.num
        finally:
            place.close()

    def remove_blocks(self, *numbers: int) -> None:
        """Remove blocks of the first model past the tier."""
        for number in numbers:
            self.get_backend().remove(self.name_of(number))

    def remove_namespace(self, name: str) -> int:
        """Remove a namespace without its engine; return how many blocks that was."""
        place = self.tier_class.open_place(self.own_settings())
        try:
            place.begin_removal()
            removed = place.remove(list(place.blocks([name])), unless_changed=False)
            place.end_removal([name])
        finally:
            place.close()
        return removed.num


def purge(driver: TierDriver) -> PurgeOutcome:
    """Let a tier drop what its engine has; return how that ended."""
    outcome = driver.tier.purge()
    ended = [] if outcome is None else [outcome]

    def poll() -> bool:
        if not ended and isinstance(progress := driver.tier.poll_purge(), PurgeOutcome):
            ended.append(progress)
        return bool(ended)

    driver.poll_until(poll)
    return ended[0]
