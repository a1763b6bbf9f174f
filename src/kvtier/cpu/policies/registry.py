"""Names of eviction policies and of reuse forecasters, and their construction by name."""

from collections.abc import Callable

from kvtier.cpu.policies.base import CachePolicy
from kvtier.cpu.policies.learning import ReuseForecaster
from kvtier.registry import Registry

CACHE_POLICIES: Registry[type[CachePolicy]] = Registry(
    "eviction policy",
    {
        "fifo": "kvtier.cpu.policies.fifo:FIFOCachePolicy",
        "lru": "kvtier.cpu.policies.lru:LRUCachePolicy",
        "arc": "kvtier.cpu.policies.arc:ARCCachePolicy",
        "s3fifo": "kvtier.cpu.policies.s3fifo:S3FIFOCachePolicy",
        "sieve": "kvtier.cpu.policies.sieve:SieveCachePolicy",
        "hazard": "kvtier.cpu.policies.hazard:HazardCachePolicy",
        "mq": "kvtier.cpu.policies.mq:MQCachePolicy",
    },
)
"""Add a policy of your own with ``CACHE_POLICIES.register("mine", "package.module:MyPolicy")``."""

REUSE_FORECASTERS: Registry[Callable[[int], ReuseForecaster]] = Registry(
    "reuse forecaster", {"hazard": "kvtier.cpu.policies.hazard.forecaster:HazardForecaster"}
)
"""What estimates reuse for tiers with ``admission`` when the primary's policy does not."""

DEFAULT_FORECASTER = "hazard"


def create_cache_policy(name: str, cache_capacity: int) -> CachePolicy:
    """Build the policy registered as ``name``.

    Raises:
        UnknownNameError: the name is not registered.
    """
    return CACHE_POLICIES.resolve(name)(cache_capacity)


def create_reuse_forecaster(max_blocks: int, name: str = DEFAULT_FORECASTER) -> ReuseForecaster:
    """Build the forecaster registered as ``name``, which remembers at most ``max_blocks`` blocks.

    Raises:
        UnknownNameError: the name is not registered.
    """
    return REUSE_FORECASTERS.resolve(name)(max_blocks)
