"""An engine's tier of packs whose keeper is the test's: it looks at others before each call, not in between."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from weakref import WeakSet

from kvtier.base import OffloadKey, ReqContext
from kvtier.config import OffloadingConfig
from kvtier.testing.tier_driver import ROW_BYTES, TierDriver, make_rows
from kvtier.tiering.base import NO_SETTINGS, JobMetadata, TierSettings
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.pack_header import PackGeometry, disk_bytes_of
from kvtier.tiering.fs.place import PackPlace

HANG_GUARD_S = 60.0

NUM_PACK_SLOTS = 4
"""Slots of a pack, unless a test says otherwise: few, so that a tier has several packs."""


def bytes_of_packs(num_packs: int, num_slots: int = NUM_PACK_SLOTS, row_bytes: int = ROW_BYTES) -> int:
    """Return the capacity that gives a directory so many packs of so many slots."""
    return num_packs * disk_bytes_of(PackGeometry(row_bytes, num_slots))


class AwakeTier(FSTier):
    """A tier that learns what others have done whenever it is used.

    Attributes:
        living: the tiers that have not ended.
    """

    living: ClassVar[WeakSet[FSTier]] = WeakSet()

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        settings: TierSettings = NO_SETTINGS,
        **own: object,
    ) -> None:
        super().__init__(config, primary_kv_view, settings, **{"has_thread": False, **own})  # type: ignore[arg-type]  # the tier's own
        self.living.add(self)
        self.look()

    def look(self) -> None:
        """Look at what others have done."""
        self.keeper.tick()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.look()
        answer = super().lookup(key, req_context)
        if answer is False:
            self.keeper.tick(is_due=True)  # it looks whether another namespace holds the block
        return answer

    def submit_store(self, job: JobMetadata) -> None:
        self.look()
        super().submit_store(job)

    def submit_load(self, job: JobMetadata) -> None:
        self.look()
        super().submit_load(job)

    def reset(self, epoch: bytes) -> None:
        super().reset(epoch)
        self.look()

    def drain_evicted(self) -> Collection[OffloadKey] | None:
        self.look()
        return super().drain_evicted()

    def shutdown(self, timeout_s: float) -> bool:
        self.living.discard(self)
        return super().shutdown(timeout_s)


class EagerTier(AwakeTier):
    """One on whose every call all tiers of the process do everything that is due, as a while later."""

    def look(self) -> None:
        self.keep_all()

    def stats(self) -> dict[str, float]:
        self.look()
        return super().stats()

    @classmethod
    def keep_all(cls) -> None:
        """Let every tier do everything."""
        for tier in list(cls.living):
            tier.keeper.tick(is_due=True)

    @classmethod
    def open_place(cls, own: Mapping[str, object]) -> PackPlace:
        root = Path(str(own["root_dir"]))
        root.mkdir(mode=0o700, exist_ok=True)
        cls.keep_all()
        return PackPlace(root, pause=lambda _: cls.keep_all())


def start_driver(config: OffloadingConfig, row_bytes: int = ROW_BYTES, **options: object) -> TierDriver:
    """Return a tier with something that drives it; one thread gives slots in the order of the keys."""
    arguments: Mapping[str, object] = {
        "capacity_bytes": bytes_of_packs(16, row_bytes=row_bytes),
        "pack_bytes": bytes_of_packs(1, row_bytes=row_bytes),
        "num_threads": 1,
    }
    rows = make_rows(row_bytes=row_bytes)
    return TierDriver(AwakeTier(config, rows, **(dict(arguments) | options)), rows)  # type: ignore[arg-type]  # a test's own options


def tick(drivers: Sequence[TierDriver]) -> None:
    """Let each tier do what is due."""
    for driver in drivers:
        assert isinstance(driver.tier, FSTier)
        driver.tier.keeper.tick()
