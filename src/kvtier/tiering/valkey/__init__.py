"""The secondary tier on a Valkey or Redis server or cluster: one value per block."""

from kvtier.tiering.valkey.tier import ValkeyTier

__all__ = ["ValkeyTier"]
