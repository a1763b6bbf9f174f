"""The secondary tier on a file system: one file per block in a directory that several engines may share."""

from kvtier.tiering.fs.tier import FSTier

__all__ = ["FSTier"]
