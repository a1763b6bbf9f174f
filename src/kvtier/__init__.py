"""kvtier keeps the KV cache of a large language model alive after device memory runs out.

These are the names that an engine, a tier or a policy needs first. Importing them loads numpy and nothing
else; the halves that move bytes (``kvtier.cpu``, ``kvtier.connector``, ``kvtier.engines``) are imported where
they are used.
"""

from kvtier.base import (
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.errors import KVTierError
from kvtier.factory import OffloadingSpecFactory
from kvtier.operating import __version__

__all__ = [
    "GroupKind",
    "KVGroup",
    "KVTierError",
    "ModelIdentity",
    "OffloadKey",
    "OffloadingConfig",
    "OffloadingEvent",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingSpecFactory",
    "ReqContext",
    "__version__",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
]
