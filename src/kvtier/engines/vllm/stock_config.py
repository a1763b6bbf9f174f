"""Translates the configuration that vLLM's stock offloading connector gives to a tier into kvtier's.

A tier does not get a VllmConfig but a digest of it, which leaves out the identity of the weights and every flag that
changes what they compute (quantisation, overrides, adapters merged at start). Blocks of two such engines could not be
distinguished. So kvtier's entry point keeps the VllmConfig while vLLM builds the connector, and the identity is that of
kvtier's own connector. Where the entry point is not loaded, or the weights have no identity, the user names both with
``model_identity``, and a start without either is refused. The rest is part of the namespace too: every byte of a
checkpoint on the local disk, so that other weights under the same path have other blocks, and the same weights under
another path have the same. vLLM's hash of an image contains the path, so prompts with images are not found from another
folder.
"""

import hashlib
import os
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload import base as stock_base
from vllm.v1.kv_offload.config import OffloadingConfig as StockConfig

from kvtier.base import make_offload_key
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.engines.checkpoint import fingerprint_checkpoint
from kvtier.engines.vllm.compat import release
from kvtier.engines.vllm.identity import make_model_identity
from kvtier.engines.vllm.named_fields import without_credentials
from kvtier.errors import ConfigError
from kvtier.namespace import RANDOM_SEED

ENGINE_KIND = "vllm-stock-offloading"
"""Name of this layout of rows in namespaces; kvtier's own connector has another."""

MIN_CRYPTOGRAPHIC_HASH_BYTES = 32
"""Length of SHA-256. vLLM's shorter hashes are not cryptographic, and it draws their seed anew in each process."""


def make_stock_config(
    stock: StockConfig,
    *,
    vllm_config: VllmConfig | None = None,
    model_identity: str = "",
    tenant_salt: str = "",
    encryption: object = None,
) -> OffloadingConfig:
    """Describe the engine to kvtier. Reads every file of a local checkpoint.

    Args:
        stock: the engine's configuration as vLLM's connector gives it.
        vllm_config: the engine's whole configuration; None where kvtier's entry point is not loaded.
        model_identity: the user's name of the weights and of the flags that change what they compute; empty: they are
            named as in kvtier's own connector.
        tenant_salt: separates tenants that must not share blocks.
        encryption: the setting of that name, for the one tier.

    Raises:
        ConfigError: a value on which the bytes depend is unknown.
        FingerprintError: a file of the checkpoint cannot be read.
    """
    if stock.worker_kv_bytes_per_block < 1:
        remedy = "vLLM has no KV cache, so a block has no size: give the engine device memory"
        raise ConfigError("worker_kv_bytes_per_block", stock.worker_kv_bytes_per_block, remedy)
    parallel = stock.parallel
    return OffloadingConfig(
        engine_id=str(stock.engine_id),
        model=_identify(stock, vllm_config, model_identity),
        groups=_make_groups(stock),
        hash_block_size=stock.cache.tokens_per_hash,
        hash_algorithm="",  # unknown; blocks with another hash have other keys
        hash_seed=_hash_seed(),
        kv_layout=_describe_layout(stock),
        kv_dtype=str(stock.model.dtype),
        world_size=parallel.world_size,
        tensor_parallel_size=parallel.tp_size,
        pipeline_parallel_size=parallel.pp_size,
        context_parallel_size=parallel.pcp_size * parallel.dcp_size,
        enable_events=stock.enable_kv_cache_events,
        engine_kind=ENGINE_KIND,
        extra_config={"tenant_salt": tenant_salt, "encryption": encryption},
    )


def require_same_keys() -> None:
    """Refuse a release whose keys are not made of hash and group index like kvtier's.

    Raises:
        ConfigError: they are not, so a key could stand for a block of another group.
    """
    block_hash, group_idx = bytes(range(32)), 200
    key = stock_base.make_offload_key(block_hash, group_idx)
    if key != make_offload_key(block_hash, group_idx):
        remedy = f"vLLM {release()} makes keys in an unknown way: use KVTierConnector"
        raise ConfigError("OffloadKey", key.hex(), remedy)


def is_reproducible(key: bytes) -> bool:
    """Return whether the same block has the same key in a later process."""
    hash_bytes = len(stock_base.get_offload_block_hash(key))
    return hash_bytes >= MIN_CRYPTOGRAPHIC_HASH_BYTES or "PYTHONHASHSEED" in os.environ


def _identify(stock: StockConfig, vllm_config: VllmConfig | None, model_identity: str) -> ModelIdentity:
    """Return the identity that is found, or the one that the user has given.

    Raises:
        ConfigError: there is neither, or what is found is ambiguous.
    """
    if model_identity:
        return _named_by_user(str(stock.model.name), str(stock.model.dtype), model_identity)
    if vllm_config is not None:
        return make_model_identity(vllm_config, outlives_engine=True)
    remedy = (
        "vLLM's stock connector does not give a tier the identity of its weights. It is found where kvtier's entry "
        "point is loaded: let VLLM_PLUGINS name kvtier, or leave it unset. Otherwise name the revision of the weights "
        'and every flag that changes what they compute, such as "main@8cde5ca8, fp8"'
    )
    raise ConfigError("model_identity", model_identity, remedy)


def _named_by_user(name: str, dtype: str, model_identity: str) -> ModelIdentity:
    place = Path(name)
    settings = place / "config.json"
    weights = fingerprint_checkpoint(place, name).text if place.exists() else ""
    config_bytes = settings.read_bytes() if settings.is_file() else b""
    config_digest = hashlib.sha256(config_bytes).hexdigest() if settings.is_file() else ""
    config_json = config_bytes.decode(errors="replace")
    named = f"{model_identity}; {weights}" if weights else ""
    return ModelIdentity(
        without_credentials(name), model_identity, dtype, config_digest, config_json, weights=named
    )


def _make_groups(stock: StockConfig) -> tuple[KVGroup, ...]:
    """Return the groups; vLLM does not report the bytes of each, so each has the size of the whole block."""
    return tuple(
        KVGroup(group.tokens_per_block, tuple(group.layer_names), stock.worker_kv_bytes_per_block)
        for group in stock.groups
    )


def _describe_layout(stock: StockConfig) -> str:
    """Return a description of the order of bytes in a row.

    Raises:
        ConfigError: vLLM does not report it; up to 0.28 it never does.
    """
    page_layout = getattr(stock, "kv_cache_layout", None)
    if not page_layout:
        remedy = f"vLLM {release()} does not give a tier the layout of its pages: use KVTierConnector"
        raise ConfigError("kv_cache_layout", page_layout, remedy)
    group_ids = [getattr(group, "group_id", None) for group in stock.groups]  # from 0.30; before, all of them
    parts = {
        "pages": page_layout,
        "release": release(),
        "blocks_per_chunk": stock.cache.blocks_per_chunk,
        "group_ids": group_ids,
        "one_copy_for_all_workers": getattr(stock, "replicated_layout", False),
        "canonical_pages": getattr(stock, "canonical_layout", False),
    }
    return ", ".join(f"{name}={value}" for name, value in parts.items())


def _hash_seed() -> str:
    """Return the seed of the content hashes; before 0.29 each process draws one unless PYTHONHASHSEED is set.

    For hashes that are not cryptographic later releases draw one too; a key shows whether vLLM uses such a hash.
    """
    default = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", RANDOM_SEED)
    return os.environ.get("PYTHONHASHSEED", str(default))
