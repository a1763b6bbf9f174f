"""Identity of a model's weights and configuration, for the namespace of its blocks.

The fingerprint of the weights is a SHA-256 over name, dtype, shape and every byte of every tensor of the
model's state, so two models share one only when their weights are equal. It costs about a second per gigabyte
at start; whoever knows the revision of the weights gives ``model_revision`` and skips it.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.engines.transformers.block_hash import HASH_ALGORITHM
from kvtier.engines.transformers.config import EngineConfig
from kvtier.engines.transformers.model_adapter import ModelAdapter
from kvtier.engines.transformers.paged_cache import KV_LAYOUT, KV_LAYOUT_BY_LAYER

FINGERPRINT_THREADS = 4
"""Tensors hashed at once; hashing releases the interpreter's lock. More than the cores gains nothing."""

FINGERPRINT_PREFIX = "sha256-of-all-weights:"
"""Says how the revision was found, so that no fingerprint is taken for a revision that somebody named."""

UNRELATED_SETTINGS = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")
"""Settings of a model's configuration that do not change what it computes."""


def fingerprint_weights(model: PreTrainedModel) -> str:
    """Return a digest that differs when any weight differs. Reads every byte of the model once."""
    names_and_tensors = sorted(model.state_dict().items())
    whole = hashlib.sha256()
    with ThreadPoolExecutor(FINGERPRINT_THREADS, "kvtier-fingerprint") as threads:
        digests = threads.map(_digest_tensor, (tensor for _, tensor in names_and_tensors))
        for (name, _), digest in zip(names_and_tensors, digests, strict=True):
            whole.update(name.encode() + b"\0" + digest)
    return FINGERPRINT_PREFIX + whole.hexdigest()


def digest_model_config(model: PreTrainedModel) -> str:
    """Return the SHA-256 of the model's effective configuration as canonical JSON. Pure."""
    settings = {key: value for key, value in model.config.to_dict().items() if key not in UNRELATED_SETTINGS}
    canonical = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _digest_tensor(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


ENGINE_KIND = "transformers"
"""Names this engine in namespaces: another one lays out its bytes otherwise."""


def make_engine_id() -> str:
    """Return a name that no other start of an engine on this machine has."""
    return f"{ENGINE_KIND}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def make_offloading_config(
    adapter: ModelAdapter,
    config: EngineConfig,
    extra_config: Mapping[str, Any],  # Any: kvtier.config gives the values types
) -> OffloadingConfig:
    """Describe the engine and its model.

    Raises:
        ConfigError: a setting of ``extra_config`` has a value that cannot work.
        UnknownNameError: a setting that nobody reads.
    """
    group = KVGroup(
        block_size_tokens=config.block_size_tokens,
        layer_names=tuple(layer.name for layer in adapter.shape.layers),
        page_size_bytes=config.block_size_tokens * adapter.shape.token_bytes,
    )
    identity = ModelIdentity(
        name=config.model_name or adapter.name,
        revision=config.model_revision or fingerprint_weights(adapter.model),
        dtype=str(adapter.model.dtype),
        config_digest=digest_model_config(adapter.model),
    )
    described = OffloadingConfig(
        engine_id=make_engine_id(),
        model=identity,
        groups=(group,),
        hash_block_size=config.block_size_tokens,
        hash_algorithm=HASH_ALGORITHM,
        kv_layout=KV_LAYOUT,
        kv_dtype=str(adapter.shape.dtype),
        rank=0,
        enable_events=config.enable_events,
        engine_kind=ENGINE_KIND,
        extra_config=extra_config,
    )
    if described.settings.layerwise_load and described.block_size_factor > 1:
        return replace(described, kv_layout=KV_LAYOUT_BY_LAYER)
    return described
