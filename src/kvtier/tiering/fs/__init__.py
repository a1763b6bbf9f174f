"""The tier of local disks: packs of equal slots, each written by one process and read by all."""

from kvtier.tiering.fs.tier import FSTier

__all__ = ["FSTier"]
