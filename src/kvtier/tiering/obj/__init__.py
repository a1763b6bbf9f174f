"""The secondary tier in an object store: S3, Google Cloud Storage, Azure, and for trying out a directory or memory."""

from kvtier.tiering.obj.tier import ObjTier

__all__ = ["ObjTier"]
