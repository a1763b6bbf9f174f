"""Names of eviction policies, and the construction of the one that a configuration asks for."""

from kvtier.cpu.policies.base import CachePolicy
from kvtier.errors import KVTierError, NamedClassError
from kvtier.registry import Registry

POLICY = "eviction policy"
"""The kind of its errors."""

CACHE_POLICIES: Registry[type[CachePolicy]] = Registry(
    POLICY,
    {
        "fifo": "kvtier.cpu.policies.fifo:FIFOCachePolicy",
        "lru": "kvtier.cpu.policies.lru:LRUCachePolicy",
        "arc": "kvtier.cpu.policies.arc:ARCCachePolicy",
        "s3fifo": "kvtier.cpu.policies.s3fifo:S3FIFOCachePolicy",
        "sieve": "kvtier.cpu.policies.sieve:SieveCachePolicy",
        "hazard": "kvtier.cpu.policies.hazard:HazardCachePolicy",
        "mq": "kvtier.cpu.policies.mq:MQCachePolicy",
    },
    contract=CachePolicy,
    entry_points="kvtier.policies",
)
"""A policy of your own is named ``"package.module:MyPolicy"``, or by a package's entry point in ``kvtier.policies``."""


def create_cache_policy(name: str, cache_capacity: int) -> CachePolicy:
    """Build the policy that ``name`` stands for.

    Raises:
        UnknownNameError: nobody registered the name.
        NamedClassError: the class that it names cannot be imported, is no policy or cannot be built.
    """
    policy_class = CACHE_POLICIES.resolve(name)
    try:
        return policy_class(cache_capacity)
    except (KVTierError, MemoryError):
        raise
    except Exception as error:  # foreign class: its constructor may raise anything
        reason = f"building it for {cache_capacity} blocks raised {type(error).__name__}: {error}: correct the class"
        raise NamedClassError(POLICY, name, reason) from error
