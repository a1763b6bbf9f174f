"""What authors implement to put a tier into the storm: the place where its blocks outlive its process.

A place builds the tier, anew after each restart, over what survives: a directory, a server. It knows its own faults by
name, and hurts what lies in it. The storm sets how often each fault happens, and repairs everything before it expects
the tier to work again.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from tests.storm.secrecy import PlainBytes
from tests.storm.threads import SimThreads

from kvtier.base import OffloadKey
from kvtier.config import OffloadingConfig
from kvtier.testing.clock import ManualClock
from kvtier.testing.faults import Faults, FaultyTier
from kvtier.tiering.base import SecondaryTierManager, TierSettings
from kvtier.tiering.example import ExampleSecondaryTier


@dataclass(frozen=True)
class Weather:
    """What a place gets from the storm.

    Attributes:
        rng: where all chance comes from.
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
        threads: the simulated threads; a simulated disk or server calls ``pause`` and ``sleep``.
        plain: watches what is written to places whose tiers encrypt.
    """

    rng: random.Random
    clock: ManualClock
    wall_clock: Callable[[], float]
    threads: SimThreads
    plain: PlainBytes = field(default_factory=PlainBytes)


class StormPlace(ABC):
    """A tier in the storm.

    Args:
        weather: chance, time and threads.

    Attributes:
        ratios: how often each fault happens, from 0 to 1.
        happened: how often each has.
        is_honest: whether the tier may believe every acknowledgement: nothing that lies in the place was hurt, and no
            write was acknowledged that did not happen, since the tier was built.
        is_secret: whether its tier encrypts; what it is given to write then passes ``watch``.
        ttl_s: seconds after its store that the tier may still serve a block; None: for ever. ``build`` sets it.
        stored_s: when each block was stored last, at the latest.
    """

    fault_names: tuple[str, ...] = ()
    """Every fault that ``ratios`` may name."""

    quota_tier: ClassVar[str] = ""
    """The type of its tier where that keeps quotas of tenants."""

    header_bytes: ClassVar[int] = 0
    """What a block takes in it beside its row."""

    can_encrypt: ClassVar[bool] = False
    """Whether its tier can encrypt, and the place calls ``watch``."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.ratios: dict[str, float] = {}
        self.happened: Counter[str] = Counter()
        self.is_honest = True
        self.is_secret = False
        self.ttl_s: float | None = None
        self.stored_s: dict[OffloadKey, float] = {}

    @abstractmethod
    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        """Build the tier over what the place holds; settings of its own are drawn anew.

        Args:
            config: what the engine says of itself.
            view: the primary's rows.
            settings: the settings that every tier has.
        """

    def crash(self) -> None:
        """Keep what survives the death of the process; its threads have not been killed yet."""

    def on_killed(self) -> None:
        """Give back what the dead process held: its threads have ended."""

    def hurt(self) -> None:
        """Damage, lose or mix up something that lies in the place."""

    def close(self) -> None:
        """Remove the place."""

    def watch(self, data: bytes | bytearray) -> None:
        """Look through what the tier writes."""
        if self.is_secret:
            self.weather.plain.watch(data)

    def happens(self, fault: str) -> bool:
        """Return whether a fault happens now."""
        ratio = self.ratios.get(fault)
        if not ratio or self.weather.rng.random() >= ratio:
            return False
        self.happened[fault] += 1
        return True

    def lies(self, fault: str) -> bool:
        """Return whether a fault happens now of which the tier cannot know."""
        does_happen = self.happens(fault)
        self.is_honest &= not does_happen
        return does_happen


class ExamplePlace(StormPlace):
    """The example tier behind faults of a tier itself: it refuses, delays, repeats and invents reports."""

    fault_names = (
        "refuse_ratio",
        "fail_ratio",
        "delay_ratio",
        "unknown_ratio",
        "repeat_ratio",
        "lookup_none_ratio",
        "lookup_raise_ratio",
        "lose_ratio",
    )

    def __init__(self, weather: Weather) -> None:
        super().__init__(weather)
        self._inner: ExampleSecondaryTier | None = None

    def build(
        self, config: OffloadingConfig, view: memoryview, settings: TierSettings
    ) -> SecondaryTierManager:
        max_blocks = self.weather.rng.choice([4, 12, 40])
        self._inner = ExampleSecondaryTier(config, view, max_blocks=max_blocks, settings=settings)
        return _SetFaults(self._inner, self)

    def hurt(self) -> None:
        self.is_honest = False
        if self._inner is not None:
            self._inner.clear()


class _SetFaults(FaultyTier):
    """A faulty tier whose faults are those of its place."""

    def __init__(self, inner: ExampleSecondaryTier, place: StormPlace) -> None:
        super().__init__(inner, Faults(), place.weather.rng)
        self._place = place
        self.get_tier_type = inner.get_tier_type  # type: ignore[method-assign]  # events and counters name the inner tier

    def _happens(self, ratio: float) -> bool:
        return super()._happens(ratio)
