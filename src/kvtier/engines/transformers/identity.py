"""Identity of a model's weights and configuration, for the namespace of its blocks.

The fingerprint is a SHA-256 over name, dtype, shape and every byte of every parameter and buffer in memory, including
buffers that no checkpoint has (the frequencies of rotary embeddings), and of code that came with the model. It costs
about a second for each gigabyte at start; ``model_revision`` replaces it when the revision is known.
"""

import hashlib
import json
import os
import sys
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig, StatePart
from kvtier.cpu.auto_size import PROCESS_BYTES
from kvtier.engines.transformers.block_sizes import BlockSizes, choose_block_sizes, page_bytes
from kvtier.engines.transformers.config import EngineConfig
from kvtier.engines.transformers.model_adapter import KVShape, ModelAdapter
from kvtier.engines.transformers.paged_cache import KV_LAYOUT, KV_LAYOUT_BY_LAYER, STATE_LAYOUT
from kvtier.engines.transformers.request import HASH_ALGORITHM
from kvtier.errors import ConfigError, ModelError

FINGERPRINT_THREADS = 4
"""Tensors hashed at once; hashing releases the interpreter's lock. More than the cores are no faster."""

FINGERPRINT_PREFIX = "sha256-of-all-weights:"
"""Marks a fingerprint, so that it never equals a revision that a user has named."""

OWN_CODE = "transformers_modules"
"""The package in which transformers puts code that came with a model."""

UNRELATED_SETTINGS = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")
"""Settings of a model's configuration that do not change what it computes."""

ENGINE_KIND = "transformers"
"""Name of this engine in namespaces; another engine has another layout of bytes."""


def make_offloading_config(
    adapter: ModelAdapter,
    config: EngineConfig,
    extra_config: Mapping[str, Any],  # Any: kvtier.config gives the values types
) -> OffloadingConfig:
    """Describe the engine and its model.

    Raises:
        ConfigError: a setting of ``extra_config`` has a value that cannot work.
        UnknownNameError: an unknown setting.
    """
    sizes = choose_block_sizes(config, adapter.shape)
    settings_json = describe_model_config(adapter.model)
    identity = ModelIdentity(
        name=config.model_name or adapter.name,
        revision=config.model_revision or fingerprint_weights(adapter.model),
        dtype=str(adapter.model.dtype),
        config_digest=hashlib.sha256(settings_json.encode()).hexdigest(),
        config_json=settings_json,
    )
    described = OffloadingConfig(
        engine_id=make_engine_id(),
        model=identity,
        groups=make_groups(adapter.shape, sizes),
        hash_block_size=sizes.block_size_tokens,
        hash_algorithm=HASH_ALGORITHM,
        kv_layout=f"{KV_LAYOUT};{STATE_LAYOUT}" if adapter.shape.states else KV_LAYOUT,
        kv_dtype=str(adapter.shape.dtype),
        rank=0,
        enable_events=config.enable_events,
        engine_kind=ENGINE_KIND,
        engine_host_bytes=count_host_bytes(adapter, config),
        computes_last_token=True,
        extra_config=extra_config,
    )
    if described.settings.layerwise_load and adapter.shape.states:
        remedy = "a model with recurrent states needs all of them before it computes: leave it out"
        raise ConfigError("layerwise_load", True, remedy)  # noqa: FBT003 - the value that was given
    if described.settings.layerwise_load and described.block_size_factor > 1:
        return replace(described, kv_layout=KV_LAYOUT_BY_LAYER)
    return described


def make_groups(shape: KVShape, sizes: BlockSizes) -> tuple[KVGroup, ...]:
    """Return the KV groups: keys and values, recurrent states, or both in this order. Pure."""
    groups = []
    if shape.layers:
        names = tuple(layer.name for layer in shape.layers)
        groups.append(KVGroup(sizes.block_size_tokens, names, sizes.block_size_tokens * shape.token_bytes))
    if sizes.state_interval_tokens is not None:
        # The names have type and size of each state: other states of as many bytes are another namespace.
        names = tuple(state.name for state in shape.states)
        parts = tuple(
            StatePart(str(state.dtype).removeprefix("torch."), state.nbytes) for state in shape.states
        )
        interval, num_bytes = sizes.state_interval_tokens, shape.state_bytes
        groups.append(KVGroup(interval, names, num_bytes, GroupKind.STATE, state_parts=parts))
    return tuple(groups)


def count_host_bytes(adapter: ModelAdapter, config: EngineConfig) -> int:
    """Return the host memory of the engine: its process, and what of weights and device pool is on the CPU. Pure."""
    # Tied weights are one memory under two names.
    tensors = [*adapter.model.parameters(), *adapter.model.buffers()]
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.device.type == "cpu"}
    pool_bytes = config.num_device_blocks * page_bytes(
        adapter.shape, choose_block_sizes(config, adapter.shape)
    )
    # The sequence that is being computed is in the pool and, contiguous, in the model's own cache.
    pool_bytes = 2 * pool_bytes if adapter.shape.device.type == "cpu" else 0
    return PROCESS_BYTES + sum(weights.values()) + pool_bytes


def make_engine_id() -> str:
    """Return a name that is unique to this start of an engine on this machine."""
    return f"{ENGINE_KIND}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def fingerprint_weights(model: PreTrainedModel) -> str:
    """Return a digest that differs when any weight differs; reads every byte of the model once.

    Raises:
        ModelError: the bytes of a tensor are not in memory.
    """
    # Non-persistent buffers are not in state_dict(), but keys are rotated with them.
    buffers = dict(model.named_buffers(remove_duplicate=False))
    names_and_tensors = sorted((buffers | dict(model.state_dict())).items())
    for name, tensor in names_and_tensors:
        if tensor.is_meta:
            raise ModelError(
                f"the bytes of {name} are not in memory, so the model has no fingerprint: "
                "load the whole model, or give model_revision"
            )
    whole = hashlib.sha256(_digest_own_code(model))
    with ThreadPoolExecutor(FINGERPRINT_THREADS, "kvtier-fingerprint") as threads:
        digests = threads.map(_digest_tensor, (tensor for _, tensor in names_and_tensors))
        for (name, _), digest in zip(names_and_tensors, digests, strict=True):
            whole.update(name.encode() + b"\0" + digest)
    return FINGERPRINT_PREFIX + whole.hexdigest()


def describe_model_config(model: PreTrainedModel) -> str:
    """Return the model's effective configuration as canonical JSON. Pure."""
    settings = {key: value for key, value in model.config.to_dict().items() if key not in UNRELATED_SETTINGS}
    # Each way to compute attention rounds in its own way, and the values of the next layer follow.
    settings["attn_implementation"] = getattr(model.config, "_attn_implementation", None)
    return json.dumps(settings, sort_keys=True, default=str)


def _digest_own_code(model: PreTrainedModel) -> bytes:
    """Return a digest of the code files that transformers took from the model's repository; usually there are none."""
    folders = {module.__module__.rpartition(".")[0] for module in model.modules()}
    own = sorted(folder for folder in folders if folder.partition(".")[0] == OWN_CODE)
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and name.rpartition(".")[0] in own:
            digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.digest()


def _digest_tensor(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
