"""What the engine tells kvtier about itself and its model.

It reads the model's weights once unless their revision is given; see ``fingerprint``.
"""

import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.engines.transformers.block_hash import HASH_ALGORITHM
from kvtier.engines.transformers.config import EngineConfig
from kvtier.engines.transformers.fingerprint import digest_model_config, fingerprint_weights
from kvtier.engines.transformers.model_adapter import ModelAdapter
from kvtier.engines.transformers.paged_cache import KV_LAYOUT, KV_LAYOUT_BY_LAYER

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
