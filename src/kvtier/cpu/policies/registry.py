"""Names of eviction policies and of reuse forecasters, and their construction by name."""

from collections.abc import Callable

from kvtier.cpu.policies.base import CachePolicy
from kvtier.cpu.policies.learning import ReuseForecaster
from kvtier.errors import KVTierError, NamedClassError
from kvtier.registry import CLASS_FORM, Registry

POLICY = "eviction policy"
"""The kind of its errors."""

REMOVED_POLICIES = dict.fromkeys(
    ("fifo", "mq", "s3fifo", "sieve"),
    f'no longer comes with kvtier: write "lru" or "hazard", or name a class of your own, {CLASS_FORM}',
)
"""Names that earlier releases had -> what to write instead."""

CACHE_POLICIES: Registry[type[CachePolicy]] = Registry(
    POLICY,
    {
        "lru": "kvtier.cpu.policies.lru:LRUCachePolicy",
        "arc": "kvtier.cpu.policies.arc:ARCCachePolicy",
        "hazard": "kvtier.cpu.policies.hazard:HazardCachePolicy",
    },
    contract=CachePolicy,
    entry_points="kvtier.policies",
    removed=REMOVED_POLICIES,
)
"""A policy of your own is named ``"package.module:MyPolicy"``, or by a package's entry point in ``kvtier.policies``."""

REUSE_FORECASTERS: Registry[Callable[[int], ReuseForecaster]] = Registry(
    "reuse forecaster", {"hazard": "kvtier.cpu.policies.hazard.forecaster:HazardForecaster"}
)
"""What estimates reuse for tiers with ``admission`` when the primary's policy does not."""

DEFAULT_FORECASTER = "hazard"


def create_cache_policy(name: str, cache_capacity: int) -> CachePolicy:
    """Build the policy that ``name`` stands for.

    Raises:
        UnknownNameError: the name is not registered.
        NamedClassError: the class that it names cannot be imported, is no policy, cannot be built or no longer comes
            with kvtier.
    """
    policy_class = CACHE_POLICIES.resolve(name)
    try:
        return policy_class(cache_capacity)
    except (KVTierError, MemoryError):
        raise
    except Exception as error:  # foreign class: its constructor may raise anything
        reason = f"building it for {cache_capacity} blocks raised {type(error).__name__}: {error}: correct the class"
        raise NamedClassError(POLICY, name, reason) from error


def create_reuse_forecaster(max_blocks: int, name: str = DEFAULT_FORECASTER) -> ReuseForecaster:
    """Build the forecaster registered as ``name``, which remembers at most ``max_blocks`` blocks.

    Raises:
        UnknownNameError: the name is not registered.
    """
    return REUSE_FORECASTERS.resolve(name)(max_blocks)
