"""Where ``CPUPrimaryTierOffloadingManager`` was: code written for it finds it here."""

from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager

__all__ = ["CPUPrimaryTierOffloadingManager"]
