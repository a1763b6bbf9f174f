"""Names of eviction policies, and the construction of the one that a configuration asks for."""

from kvtier.cpu.policies.base import CachePolicy
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


def create_cache_policy(name: str, cache_capacity: int) -> CachePolicy:
    """Build the policy registered as ``name``.

    Raises:
        UnknownNameError: nobody registered the name.
    """
    return CACHE_POLICIES.resolve(name)(cache_capacity)
