"""LRU and ARC that park every busy block, not only many: what a model of a few blocks would never reach."""

from kvtier.cpu.policies.arc import ARCCachePolicy
from kvtier.cpu.policies.lru import LRUCachePolicy
from kvtier.cpu.policies.registry import CACHE_POLICIES

LRU_PARKING = "lru, every busy block parked"
ARC_PARKING = "arc, every busy block parked"


class ParkingLRU(LRUCachePolicy):
    """LRU."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.parked.min_busy_blocks = 1


class ParkingARC(ARCCachePolicy):
    """ARC."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        for parked in self.parked:
            parked.min_busy_blocks = 1


for name, made in ((LRU_PARKING, ParkingLRU), (ARC_PARKING, ParkingARC)):
    if name not in CACHE_POLICIES:
        CACHE_POLICIES.register(name, f"{__name__}:{made.__name__}")
