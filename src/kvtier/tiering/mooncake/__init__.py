"""The secondary tier on a Mooncake store: memory of many machines behind one master."""

from kvtier.tiering.mooncake.tier import MooncakeTier

__all__ = ["MooncakeTier"]
