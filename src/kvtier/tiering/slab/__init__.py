"""The secondary tier in one preallocated file of fixed-size slots, which one engine owns."""

from kvtier.tiering.slab.tier import SlabTier

__all__ = ["SlabTier"]
