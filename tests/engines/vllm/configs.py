"""vLLM's own configuration objects, made by hand: a tiny Llama's, and KV caches of any kind and layout.

Nothing here starts an engine. Entries of the tensor layout are made in the form of the installed release.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

BLOCK_TOKENS = 16
NUM_BLOCKS = 12

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What is in the ``config.json`` of a model whose configuration vLLM accepts."""

HAS_LAYER_STRIDES = "layer_stride" in KVCacheTensor.__dataclass_fields__
"""Whether an entry of the layout names several layers of one specification, as from 0.29 on."""


def full(heads: int = 2, head_size: int = 8, **fields: object) -> FullAttentionSpec:
    """Return a full-attention layer."""
    common = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": heads,
        "head_size": head_size,
        "dtype": torch.float32,
    }
    return FullAttentionSpec(**(common | fields))


def window(tokens: int = 40, **fields: object) -> SlidingWindowSpec:
    """Return a sliding-window layer."""
    common = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    return SlidingWindowSpec(**(common | {"sliding_window": tokens} | fields))


def mla(head_size: int = 24, **fields: object) -> MLAAttentionSpec:
    """Return a layer that keeps one latent vector a token."""
    common = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": head_size, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**(common | fields))


def state(**fields: object) -> MambaSpec:
    """Return a layer with a recurrent state: a convolution in bfloat16, sums in float32."""
    common = {
        "block_size": BLOCK_TOKENS,
        "shapes": ((3, 32), (2, 8, 8)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**(common | fields))


def group(spec: KVCacheSpec, *names: str) -> KVCacheGroupSpec:
    """Return layers that share a specification and a block table."""
    return KVCacheGroupSpec(list(names), spec)


def uniform(specs: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    """Return layers that share a block table but not a specification, as workers are told."""
    return KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(BLOCK_TOKENS, dict(specs)))


def flattened(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """Return what the scheduler's process is told of a configuration."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    return generate_scheduler_kv_cache_config([kv_cache_config])


def separate_tensors(kv_groups: Sequence[KVCacheGroupSpec]) -> list[KVCacheTensor]:
    """Return the layout in which layers have a region each, and layers of different groups share them."""
    return _new_tensors(kv_groups) if HAS_LAYER_STRIDES else _old_tensors(kv_groups)


def cache_config(
    *kv_groups: KVCacheGroupSpec, tensors: Sequence[KVCacheTensor] | None = None
) -> KVCacheConfig:
    """Return a configuration of KV caches, with separate regions unless a layout is given."""
    layout = separate_tensors(kv_groups) if tensors is None else list(tensors)
    return KVCacheConfig(NUM_BLOCKS, layout, list(kv_groups))


def with_kvtier(vllm_config: VllmConfig, **settings: object) -> VllmConfig:
    """Return a copy of an engine's configuration that selects kvtier with ``settings``."""
    copied = copy.deepcopy(vllm_config)
    copied.kv_transfer_config = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_connector_module_path="kvtier.engines.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": "1MiB", **settings},
    )
    return copied


def find_spec_class(name: str) -> type[KVCacheSpec] | None:
    """Return one of vLLM's specifications by name, None where the release lacks it."""
    found: type[KVCacheSpec] | None = getattr(kv_cache_interface, name, None)
    return found


def _layers_of(kv_group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    spec = kv_group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(kv_group.layer_names, spec)


def _new_tensors(kv_groups: Sequence[KVCacheGroupSpec]) -> list[KVCacheTensor]:
    size = NUM_BLOCKS * max(
        sum(spec.page_size_bytes for spec in _layers_of(kv_group).values()) for kv_group in kv_groups
    )
    tensors = []
    for kv_group in kv_groups:
        layers_by_spec: dict[KVCacheSpec, list[str]] = {}
        for name, spec in _layers_of(kv_group).items():
            layers_by_spec.setdefault(spec, []).append(name)
        offset = 0
        for spec, names in layers_by_spec.items():
            region_bytes = spec.page_size_bytes * NUM_BLOCKS
            tensors.append(
                KVCacheTensor(
                    size, names, layer_stride=region_bytes, block_stride=spec.page_size_bytes, offset=offset
                )
            )
            offset += region_bytes * len(names)
    return tensors


def _old_tensors(kv_groups: Sequence[KVCacheGroupSpec]) -> list[KVCacheTensor]:
    layers = [list(_layers_of(kv_group).items()) for kv_group in kv_groups]
    tensors = []
    for position in range(max(map(len, layers))):
        here = [own[position] for own in layers if position < len(own)]
        page_bytes = max(spec.page_size_bytes for _, spec in here)
        tensors.append(KVCacheTensor(size=page_bytes * NUM_BLOCKS, shared_by=[name for name, _ in here]))
    return tensors
