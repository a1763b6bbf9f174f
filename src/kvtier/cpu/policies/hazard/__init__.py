"""The hazard policy: evicts the block whose slot earns least, by a learned model of when blocks are reused."""

from kvtier.cpu.policies.hazard.policy import HazardCachePolicy

__all__ = ["HazardCachePolicy"]
