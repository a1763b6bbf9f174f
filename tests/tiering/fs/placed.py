"""Places of packs for tests: engines that answer while a place waits, and what is done with a place's blocks."""

from collections.abc import Callable
from pathlib import Path

from tests.tiering.fs.engine import HANG_GUARD_S
from tests.tiering.fs.packed import Clock

from kvtier.testing.place_suite import MODELS, name_of
from kvtier.testing.tier_driver import ROW_BYTES, TierDriver, key_of
from kvtier.tiering.base import SecondaryTierManager
from kvtier.tiering.fs import FSTier
from kvtier.tiering.fs.pack_header import SLOTS_OFFSET
from kvtier.tiering.fs.pack_view import stamp_of
from kvtier.tiering.fs.place import PackPlace
from kvtier.tiering.kit.envelope import HEADER_PAGE_BYTES
from kvtier.tiering.kit.place import PlaceBlock

SLOT_BYTES = HEADER_PAGE_BYTES + ROW_BYTES
NAMESPACE = name_of(MODELS[0])
OTHER_NAMESPACE = name_of(MODELS[1])

StartTier = Callable[..., TierDriver]


class Living:
    """Engines whose keepers work while a place waits for them.

    Attributes:
        tiers: the engines.
        clock: the place's.
        num_waits: how often a place has waited.
    """

    def __init__(self) -> None:
        self.tiers: list[SecondaryTierManager] = []
        self.clock = Clock()
        self.num_waits = 0

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self.num_waits += 1
        self.clock.pause(seconds)
        for tier in self.tiers:
            assert isinstance(tier, FSTier)
            tier.keeper.tick(is_due=True)


def end(driver: TierDriver) -> None:
    assert driver.tier.shutdown(HANG_GUARD_S)


def fill(start_tier: StartTier, numbers: list[int], **options: object) -> None:
    """Store blocks with an engine that ends."""
    driver = start_tier(**options)
    assert driver.store(numbers).success
    end(driver)


def abandon(driver: TierDriver) -> None:
    """End an engine like one that is killed: nothing is closed as it should be."""
    tier = driver.tier
    assert isinstance(tier, FSTier)
    tier._catalog.packs.close_in_child()
    tier.keeper.close_in_child()


def numbers_of(blocks: list[PlaceBlock]) -> set[int]:
    """Return the numbers of blocks, which the driver's keys have in them."""
    return {number for number in range(200) for block in blocks if block.key == key_of(number)}


def pack_of(block: PlaceBlock, root: Path) -> Path:
    return root / block.namespace / stamp_of(block).pack_name


def offset_of(block: PlaceBlock) -> int:
    return SLOTS_OFFSET + stamp_of(block).slot * SLOT_BYTES


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def remove(place: PackPlace, blocks: list[PlaceBlock], *, unless_changed: bool = False) -> int:
    place.begin_removal()
    removed = place.remove(blocks, unless_changed=unless_changed)
    place.end_removal(())
    return removed.num


def remove_all(place: PackPlace) -> int:
    place.begin_removal()
    removed = place.remove(list(place.blocks()), unless_changed=False)
    place.end_removal([one.name for one in place.namespaces()])
    return removed.num
