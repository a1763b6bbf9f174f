"""Identity of the bytes: what two instances must have in common to exchange blocks.

Everything that changes the bytes of a row, or their order, goes into one canonical JSON document, and its SHA-256 is
the namespace's digest. The rank is not part of it, because tiers store whole rows. Any difference makes a different
namespace, so a difference costs a miss and is never a guess.
"""

import dataclasses
import hashlib
import json

from kvtier.config import OffloadingConfig
from kvtier.errors import ConfigError

LAYOUT_VERSION = 1
"""Increased when the meaning of a row's bytes changes, so that old data is a miss."""

RANDOM_SEED = "random"
"""The ``hash_seed`` of an engine whose next process would hash the same tokens differently."""


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """The identity of one engine's blocks.

    Attributes:
        document: canonical JSON of everything that determines the bytes, readable by people.
        digest: its SHA-256, 32 bytes.
    """

    document: str
    digest: bytes

    @property
    def name(self) -> str:
        """The first 16 bytes of the digest in hex: short enough for a path, long enough for a key."""
        return self.digest[:16].hex()


def make_namespace(config: OffloadingConfig, row_stride_bytes: int, epoch: bytes = b"") -> Namespace:
    """Derive the namespace of an engine's blocks. Pure.

    Args:
        config: the engine's configuration.
        row_stride_bytes: bytes of one row of the primary tier.
        epoch: 16 random bytes after a reset, empty before the first.
    """
    identity = {
        "layout_version": LAYOUT_VERSION,
        "engine": config.engine_kind,
        "model": dataclasses.asdict(config.model),
        "kv_dtype": config.kv_dtype,
        "kv_layout": config.kv_layout,
        "block_size_factor": config.block_size_factor,
        "hash_block_size": config.hash_block_size,
        "hash_algorithm": config.hash_algorithm,
        "hash_seed": config.hash_seed,
        "groups": [dataclasses.asdict(group) | {"kind": group.kind.value} for group in config.groups],
        "row_stride_bytes": row_stride_bytes,
        "world_size": config.world_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "tenant_salt": hashlib.sha256(config.settings.tenant_salt.encode()).hexdigest(),
        "epoch": epoch.hex(),
    }
    document = json.dumps(identity, sort_keys=True, indent=1)
    return Namespace(document, hashlib.sha256(document.encode()).digest())


def require_stable_hash(config: OffloadingConfig, tier: str) -> None:
    """Refuse a random hash seed where blocks outlive the process.

    Raises:
        ConfigError: the engine hashes differently at every start, so no block would be found again.
    """
    if config.hash_seed == RANDOM_SEED:
        remedy = f"tier {tier!r} outlives the process: give the engine a fixed hash seed (PYTHONHASHSEED=0)"
        raise ConfigError("hash_seed", config.hash_seed, remedy)
