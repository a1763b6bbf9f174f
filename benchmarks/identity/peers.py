"""The keys of vLLM's own file tier and of LMCache, made by their own code.

Both are given what they take from an engine. Where a peer is not installed its column stays empty.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyFields:
    """What the peers' keys are made from.

    Attributes:
        model_name: name of the model.
        dtype: of the model.
        block_tokens: tokens of a block.
        layer_names: of the one KV group.
        block_hash: content hash of the first block.
        tensor_parallel_size: ranks that share each layer.
        tags: what a client has put into the key, for LMCache.
    """

    model_name: str
    dtype: torch.dtype
    block_tokens: int
    layer_names: Sequence[str]
    block_hash: bytes
    tensor_parallel_size: int = 1
    tags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Peer:
    """Another system.

    Attributes:
        name: heading of its column.
        package: module that must be there.
        make_key: returns the key of a block.
    """

    name: str
    package: str
    make_key: Callable[[KeyFields], str]

    def is_installed(self) -> bool:
        """Return whether its code can be imported."""
        return importlib.util.find_spec(self.package) is not None


def key_of_vllm(fields: KeyFields) -> str:
    """Return the path of a block in vLLM's file tier."""
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.kv_offload.file_mapper import FileMapper

    group = {"tokens_per_block": fields.block_tokens, "layer_names": list(fields.layer_names)}
    mapper = FileMapper(
        root_dir="",
        model_name=fields.model_name,
        tokens_per_hash=fields.block_tokens,
        blocks_per_file=1,
        tp_size=fields.tensor_parallel_size,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        rank=0,
        dtype=str(fields.dtype),
        kv_cache_groups=[group],
    )
    return str(mapper.get_file_name(make_offload_key(fields.block_hash, 0)))


def key_of_lmcache(fields: KeyFields) -> str:
    """Return the name of a chunk in LMCache's stores."""
    from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found,unused-ignore]  # not a requirement

    chunk = int.from_bytes(fields.block_hash[:8], "big")
    tags = {f"lmcache.tag.{name}": value for name, value in fields.tags}
    key = CacheEngineKey(fields.model_name, fields.tensor_parallel_size, 0, chunk, fields.dtype, tags)
    return str(key.to_string())


PEERS = (
    Peer("vLLM's file tier", "vllm", key_of_vllm),
    Peer("LMCache", "lmcache", key_of_lmcache),
)
