"""Every difference between vLLM 0.28 and 0.32 that kvtier meets, each with its release and reason.

It decides nothing about caching. What a release offers is found by looking for it, not by comparing numbers,
so a development build or a patched release is taken for what it is.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from kvtier.namespace import RANDOM_SEED

HAS_FAILED_RECVING = hasattr(connector_base, "KVConnectorTransferResults")
"""From 0.30 a worker can name requests whose load failed. Before, it can only name device blocks. With several KV
groups the engine dies of those, and with a sliding window it goes on from blocks that were never filled."""


HAS_BLOCK_POOL_HOOK = hasattr(connector_base.KVConnectorBase_V1, "bind_gpu_block_pool")
"""Whether a connector is handed the pool of device blocks. Without it, blocks that a failed load has spoiled while
their request computed stay in vLLM's prefix cache."""


HitSources = dict[Any, int]  # Any: an enum that releases before 0.32 lack
"""Tokens by vLLM's name of the tier they came from."""


@dataclass(frozen=True, slots=True)
class OwnTransferResults:
    """What ``KVConnectorTransferResults`` is from 0.30 on; before, only two of its fields are asked for."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


TransferResults: Any = getattr(connector_base, "KVConnectorTransferResults", OwnTransferResults)
"""The answer of ``get_transfer_results``, in vLLM's class where there is one."""


def name_hit_sources(tokens_by_medium: Mapping[str, int]) -> HitSources:
    """Return tokens by vLLM's own names of tiers: host memory, disk, or another; these names came with 0.32."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    known = {"CPU": CacheHitSource.HOST, "fs": CacheHitSource.DISK, "slab": CacheHitSource.DISK}
    named: HitSources = {}
    for medium, num_tokens in tokens_by_medium.items():
        source = known.get(medium, CacheHitSource.EXTERNAL_UNSPECIFIED)
        named[source] = named.get(source, 0) + num_tokens
    return named


def release() -> str:
    """Return vLLM's major and minor number, such as "0.32": the bytes of a page may change between these."""
    return ".".join(vllm.__version__.split(".")[:2])


def has_content_hashes(group: KVCacheGroupSpec) -> bool:
    """Return whether the blocks of a KV group are named by hashes and live in device memory. Pure.

    From 0.29 a model can have groups that are rebuilt and never looked up, from 0.30 groups whose blocks are in
    host memory of vLLM's own; before, neither exists.
    """
    return (
        getattr(group.kv_cache_spec, "prefix_cacheable", True)
        and getattr(group, "enable_kv_transfer", True)
        and not getattr(group, "host_resident", False)
    )


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens covered by one content hash.

    From 0.32 the engine core writes it down; before, it is computed where it is needed.
    """
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is None:
        _, resolved = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(resolved)


def hash_seed(vllm_config: VllmConfig) -> str:
    """Return the seed of the content hashes, or ``RANDOM_SEED`` when each process draws its own.

    From 0.29 cryptographic hashes have a fixed seed; before, and for other hashes, only PYTHONHASHSEED fixes one.
    """
    from_environment = os.environ.get("PYTHONHASHSEED")
    if from_environment is not None:
        # PYTHONHASHSEED=random is Python's own word, and for vLLM a seed like any other.
        return f"PYTHONHASHSEED={from_environment}"
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if resolve is None:
        return RANDOM_SEED
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = str(resolve(hash_function))
    return seed if seed == resolve(hash_function) else RANDOM_SEED


def stored_page_bytes(
    kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec, spec: KVCacheSpec
) -> dict[str, int] | None:
    """Return the bytes that each layer of a group has in a device block, as the tensors are laid out. Pure.

    The scheduler's process is told one layer's specification for a whole group, though others may have larger
    or smaller pages; the layout of the tensors is told to all processes alike.

    Args:
        kv_cache_config: the layout.
        group: whose layers.
        spec: the specification of its first layer.

    Returns:
        Page sizes by layer, padding included; None when all layers are like the first.
    """
    names = set(group.layer_names)
    tensors = kv_cache_config.kv_cache_tensors
    if tensors and hasattr(
        tensors[0], "layer_stride"
    ):  # from 0.29: one entry for layers of one specification
        own = [tensor for tensor in tensors if names.intersection(tensor.layers)]
        if len(own) <= 1:
            return None
        return {
            name: min(tensor.layer_stride, tensor.block_stride) for tensor in own for name in tensor.layers
        }
    if any(tensor.block_stride for tensor in tensors):  # 0.28: a packed entry names no page size
        return None
    pages = {
        name: tensor.size // kv_cache_config.num_blocks for tensor in tensors for name in tensor.shared_by
    }
    is_uniform = all(pages.get(name, spec.page_size_bytes) == spec.page_size_bytes for name in names)
    return None if is_uniform else pages


def page_format(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return everything but sizes that decides what the bytes of a page mean.

    Attention backends order a page as their kernels like it, and are chosen by release, device and settings. From
    0.29 the resolved layout is part of the configuration; before, each worker resolves it from these same inputs.
    """
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or os.environ.get(
        "VLLM_KV_CACHE_LAYOUT", "default"
    )
    attention = vllm_config.attention_config
    chosen = [attention.backend, *sorted(getattr(attention, "backend_per_kind", {}).items())]
    if os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"):
        chosen.append("shuffled")
    backends = " ".join(str(part) for part in chosen if part is not None) or "default"
    return f"{layout} layout, {backends} attention, {_device_kind()}, vLLM {release()}"


def _device_kind() -> str:
    """Return the instruction set: on a CPU, keys are packed for its matrix instructions."""
    if current_platform.is_cpu():
        extensions = {
            "amx": torch.cpu._is_amx_tile_supported(),  # noqa: SLF001 - what vLLM's CPU backend asks too
            "avx512": torch.cpu._is_avx512_supported(),  # noqa: SLF001
        }
        names = [
            str(current_platform.get_cpu_architecture()),
            *(name for name, has in extensions.items() if has),
        ]
        return " ".join(["cpu", *names])
    capability = current_platform.get_device_capability()
    return f"{current_platform.device_type} {'.'.join(str(part) for part in capability or ('any',))}"
