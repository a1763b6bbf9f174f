"""One tier over named bytes: write a ``Blobs`` for a backend, its settings, and a ``BlobTier`` that opens it."""

from kvtier.tiering.kit.blobs.contract import (
    Blob,
    BlobKind,
    BlobName,
    BlobNames,
    Blobs,
    BlockCount,
    FolderNames,
    Got,
    GotKind,
    Lent,
    Listed,
    Put,
    PutKind,
    Size,
    Target,
)
from kvtier.tiering.kit.blobs.place import BlobPlace
from kvtier.tiering.kit.blobs.settings import BlobSettings
from kvtier.tiering.kit.blobs.store import BlobNamespace, BlobStore
from kvtier.tiering.kit.blobs.tier import BlobTier

__all__ = [
    "Blob",
    "BlobKind",
    "BlobName",
    "BlobNames",
    "BlobNamespace",
    "BlobPlace",
    "BlobSettings",
    "BlobStore",
    "BlobTier",
    "Blobs",
    "BlockCount",
    "FolderNames",
    "Got",
    "GotKind",
    "Lent",
    "Listed",
    "Put",
    "PutKind",
    "Size",
    "Target",
]
