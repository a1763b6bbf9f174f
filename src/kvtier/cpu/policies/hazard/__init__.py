"""Eviction by learned time to reuse: what a block is, when such blocks come back, which one to give up for which."""

from kvtier.cpu.policies.hazard.policy import HazardCachePolicy

__all__ = ["HazardCachePolicy"]
