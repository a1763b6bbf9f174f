"""Every difference between vLLM 0.28 and 0.33 that affects kvtier, each with its release and reason.

Features are detected by looking for them, not by comparing version numbers, so development builds and patched releases
work too.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base as connector_base
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from kvtier.namespace import RANDOM_SEED

HAS_FAILED_RECVING = hasattr(connector_base, "KVConnectorTransferResults")
"""From 0.30 a worker can report requests whose load failed. Before, it can only report device blocks. With several KV
groups these crash the engine, and with a sliding window it goes on from blocks that were never filled."""


NAMES_KEPT_STATES = "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
"""From 0.32 on each step names the device blocks that hold a recurrent state at the end of a block."""


CONFIRMED_RELEASES: Mapping[str, frozenset[str]] = {
    "cpu CpuArchEnum.X86 avx512": frozenset({"0.30", "0.31", "0.32"}),
}
"""Minor releases that store the same bytes for the same block, by ``device_kind``: engines of any two of them find each
other's blocks. A release or device that is not here has pages of its own.

A release gets in when ``python -m scripts.compare_releases`` finds its pages equal to those of one that is listed, on
such a device; docs/guide/vllm.md says with which models. Sources are no proof: kernels write the pages. No GPU is here,
because nothing was compared on one."""


HitSources = dict[Any, int]  # Any: an enum that releases before 0.32 lack
"""Tokens by vLLM's name of the tier that they came from."""


@dataclass(frozen=True, slots=True)
class OwnTransferResults:
    """Stands in for ``KVConnectorTransferResults`` before 0.30, where vLLM reads only the first two fields."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


TransferResults: Any = getattr(connector_base, "KVConnectorTransferResults", OwnTransferResults)
"""Class of the result of ``get_transfer_results``: vLLM's where it exists."""


def name_hit_sources(tokens_by_medium: Mapping[str, int]) -> HitSources:
    """Return tokens by vLLM's own names of tiers, which exist from 0.32 on: host memory, disk, or another."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    known = {"CPU": CacheHitSource.HOST, "fs": CacheHitSource.DISK}
    named: HitSources = {}
    for medium, num_tokens in tokens_by_medium.items():
        source = known.get(medium, CacheHitSource.EXTERNAL_UNSPECIFIED)
        named[source] = named.get(source, 0) + num_tokens
    return named


def release() -> str:
    """Return vLLM's major and minor number, such as "0.32"."""
    return ".".join(vllm.__version__.split(".")[:2])


def has_content_hashes(group: KVCacheGroupSpec) -> bool:
    """Return whether the blocks of a KV group have content hashes and are in device memory. Pure.

    From 0.29 on a model can have groups that are rebuilt and never looked up, from 0.30 on groups whose blocks are in
    vLLM's own host memory.
    """
    return (
        getattr(group.kv_cache_spec, "prefix_cacheable", True)
        and getattr(group, "enable_kv_transfer", True)
        and not getattr(group, "host_resident", False)
    )


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens covered by one content hash.

    From 0.32 on the configuration has it; before, it is computed where it is needed.
    """
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is None:
        _, resolved = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(resolved)


def hash_seed(vllm_config: VllmConfig) -> str:
    """Return the seed of the content hashes, or ``RANDOM_SEED`` when each process draws its own.

    From 0.29 on cryptographic hashes have a fixed seed; before, and for other hashes, only PYTHONHASHSEED fixes it.
    """
    from_environment = os.environ.get("PYTHONHASHSEED")
    if from_environment is not None:
        # PYTHONHASHSEED=random has a meaning to Python; vLLM takes it as a seed like any other.
        return f"PYTHONHASHSEED={from_environment}"
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if resolve is None:
        return RANDOM_SEED
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = str(resolve(hash_function))
    return seed if seed == resolve(hash_function) else RANDOM_SEED


def hash_prompt(
    vllm_config: VllmConfig,
    hash_block_tokens: int,
    token_ids: Sequence[int],
    cache_salt: str | None = None,
    lora_request: object = None,
) -> list[bytes]:
    """Return the content hashes of a prompt of text, as vLLM's own requests have them."""
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    # What vLLM reads of a request, in every release that is supported.
    request: Any = SimpleNamespace(
        mm_features=[],
        lora_request=lora_request,
        cache_salt=cache_salt,
        prompt_embeds=None,
        num_prompt_tokens=len(token_ids),
    )
    hashes: list[Any] = []  # Any: vLLM's name for bytes
    for first in range(0, len(token_ids) - hash_block_tokens + 1, hash_block_tokens):
        block = list(token_ids[first : first + hash_block_tokens])
        parent = hashes[-1] if hashes else None
        end = first + hash_block_tokens
        extra_keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, first, end, 0)
        hashes.append(kv_cache_utils.hash_block_tokens(hash_function, parent, block, extra_keys))
    return [bytes(block_hash) for block_hash in hashes]


def stored_page_bytes(
    kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec, spec: KVCacheSpec
) -> dict[str, int] | None:
    """Return the bytes of each layer of a group in a device block, from the layout of the tensors. Pure.

    vLLM gives the scheduler's process one layer's specification for a whole group, although other layers may have
    larger or smaller pages. It gives the layout of the tensors to all processes.

    Args:
        kv_cache_config: the layout.
        group: the KV group.
        spec: the specification of its first layer.

    Returns:
        Page sizes by layer, with padding; None when all layers equal the first.
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
    """Return everything except sizes that decides the meaning of a page's bytes.

    The order of a page depends on the attention backend, which depends on release, device and settings. The release is
    not named where it is one of ``CONFIRMED_RELEASES``. From 0.29 on the resolved layout is part of the configuration;
    before, each worker resolves it from these same inputs.
    """
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or os.environ.get(
        "VLLM_KV_CACHE_LAYOUT", "default"
    )
    attention = vllm_config.attention_config
    chosen = [attention.backend, *sorted(getattr(attention, "backend_per_kind", {}).items())]
    if os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"):
        chosen.append("shuffled")
    backends = " ".join(str(part) for part in chosen if part is not None) or "default"
    parts = [f"{layout} layout", f"{backends} attention", *_state_format(vllm_config, kv_cache_config)]
    return ", ".join([*parts, device_kind(), *_own_release()])


def _state_format(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """Return what decides the order and the rounding of recurrent states; nothing without such layers. Pure."""
    if not getattr(kv_cache_config, "has_mamba_layers", False):
        return []
    mamba = getattr(vllm_config, "mamba_config", None)
    kernels = [getattr(mamba, "backend", None), getattr(mamba, "ssu_algorithm", None)]
    chosen = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    kernels += [chosen[name] for name in sorted(chosen) if name.endswith("_prefill_backend")]
    names = [str(getattr(kernel, "name", kernel)).lower() for kernel in kernels if kernel is not None]
    if getattr(mamba, "enable_stochastic_rounding", False):
        names.append("stochastic rounding")
    order = os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    return [f"{' '.join(names) or 'default'} states, {order} convolution"]


def is_on_cpu() -> bool:
    """Return whether the engine computes on the CPU, so that its weights and KV cache are in host memory."""
    return bool(current_platform.is_cpu())


def reserved_for_connector(vllm_config: VllmConfig) -> int:
    """Return how many cores vLLM takes from the workers of a CPU host because there is a connector.

    It does so for connectors with a busy thread of their own, and kvtier has none: before 0.31 one core, from then on
    one for each worker, on top of one for each worker that it reserves anyway. Only its own binding does so.
    """
    if not is_on_cpu() or envs.VLLM_CPU_OMP_THREADS_BIND != "auto":
        return 0
    if getattr(envs, "VLLM_CPU_NUM_OF_RESERVED_CPU", None) is not None:
        return 0
    return int(vllm_config.parallel_config.local_world_size)


def why_prefix_caching_is_off(vllm_config: VllmConfig) -> str:
    """Return, for the end of a message, why vLLM has switched prefix caching off by itself; empty if it has not.

    On CPUs it does so for MLA without AMX tiles or with the reference backend, and for every model on RISC-V.
    """
    if not current_platform.is_cpu():
        return ""
    if str(getattr(current_platform.get_cpu_architecture(), "name", "")) == "RISCV":
        return ". vLLM has switched it off by itself: it does so for every model on a RISC-V CPU"
    if getattr(vllm_config.model_config, "use_mla", False):
        return (
            ". vLLM has switched it off by itself: its attention for MLA on a CPU reuses no prefix unless it has AMX "
            "tiles and its own backend; serve the model on a CPU with AMX or on a GPU, or leave kvtier out"
        )
    return ""


def offloaded_weight_bytes(vllm_config: VllmConfig) -> int:
    """Return the bytes of weights that --cpu-offload-gb keeps in host memory, for each worker. Pure.

    From 0.30 on it is in a configuration of its own.
    """
    offload_config = getattr(getattr(vllm_config, "offload_config", None), "uva", vllm_config.cache_config)
    return int(getattr(offload_config, "cpu_offload_gb", 0) * 2**30)


def device_kind() -> str:
    """Return device type and instruction set: on a CPU keys are packed for its matrix instructions."""
    if current_platform.is_cpu():
        extensions = {
            "amx": torch.cpu._is_amx_tile_supported(),  # noqa: SLF001 - as in vLLM's CPU backend
            "avx512": torch.cpu._is_avx512_supported(),  # noqa: SLF001
        }
        names = [
            str(current_platform.get_cpu_architecture()),
            *(name for name, has in extensions.items() if has),
        ]
        return " ".join(["cpu", *names])
    capability = current_platform.get_device_capability()
    return f"{current_platform.device_type} {'.'.join(str(part) for part in capability or ('any',))}"


def _own_release() -> list[str]:
    """Return the release as a part of the format; nothing where its pages are confirmed to be those of others."""
    return [] if release() in CONFIRMED_RELEASES.get(device_kind(), ()) else [f"vLLM {release()}"]
