"""Eviction policies of the primary tier, one algorithm a file; ``registry`` finds them by name."""

from kvtier.cpu.policies.base import BlockStatus, CachePolicy
from kvtier.cpu.policies.registry import CACHE_POLICIES, create_cache_policy

__all__ = ["CACHE_POLICIES", "BlockStatus", "CachePolicy", "create_cache_policy"]
