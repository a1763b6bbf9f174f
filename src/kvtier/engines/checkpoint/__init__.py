"""Fingerprints of models on disk, over every byte that decides what they compute; for engines that load files."""

from kvtier.engines.checkpoint.digest_cache import DigestCache, default_cache_path
from kvtier.engines.checkpoint.files import (
    CheckpointFile,
    FileStamp,
    find_files,
    has_weights,
    require_started_after,
    require_unchanged,
)
from kvtier.engines.checkpoint.fingerprint import (
    Fingerprint,
    FingerprintJob,
    digest_buffers,
    fingerprint_checkpoint,
)

__all__ = [
    "CheckpointFile",
    "DigestCache",
    "FileStamp",
    "Fingerprint",
    "FingerprintJob",
    "default_cache_path",
    "digest_buffers",
    "find_files",
    "fingerprint_checkpoint",
    "has_weights",
    "require_started_after",
    "require_unchanged",
]
