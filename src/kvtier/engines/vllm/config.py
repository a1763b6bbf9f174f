"""Translates vLLM's configuration into kvtier's, and refuses unsupported ones at start.

The results in the scheduler's process and in the workers must be equal except for rank and weight fingerprint, so they
depend only on what vLLM gives to both.
"""

from typing import Any

from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

from kvtier.config import OffloadingConfig
from kvtier.engines.vllm import compat
from kvtier.engines.vllm.groups import ALIGN_REMEDY, ALIGNED, first_spec, make_kv_groups, mark_replicated
from kvtier.engines.vllm.host_memory import count_engines, count_host_bytes
from kvtier.engines.vllm.identity import make_model_identity
from kvtier.errors import ConfigError, ModelError

ENGINE_KIND = "vllm"
"""Name of this engine in namespaces; another engine has another layout of bytes."""

LOCAL_EXECUTORS = frozenset({"mp", "uni"})
"""vLLM's executors that start all workers on the scheduler's machine. With Ray they may be anywhere."""

CONFIRMED_DRAFTS = frozenset({"mtp", "ngram"})
"""Methods of drafting with which an engine has confirmed what is stored of recurrent states."""

CONFIRMED_DRAFTED_STATES = frozenset({"GDN_ATTN"})
"""Kinds of recurrent states, by vLLM's name, with which an engine has confirmed drafts. With others vLLM 0.32 itself
answers otherwise with drafts than without on a CPU, so nothing could be compared."""

DRAFTS_REMEDY = (
    "a rejected draft may be part of a state; gated delta nets (Qwen3-Next, Qwen 3.5) are served with the methods "
    "'mtp' and 'ngram'; switch speculative decoding off, or run this model without kvtier"
)


def make_offloading_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: KVConnectorRole
) -> OffloadingConfig:
    """Describe the engine to kvtier.

    Args:
        vllm_config: the engine's configuration.
        kv_cache_config: its KV groups, and the number of device blocks.
        role: the half to build; a worker has a rank.

    Raises:
        ConfigError: a setting cannot work, or a setting of vLLM is not supported.
        UnknownNameError: an unknown setting.
        ModelError: the model is not supported.
        FingerprintError: a file of the model cannot be read.
    """
    check_supported(vllm_config)
    check_drafted_states(vllm_config, kv_cache_config)
    groups = mark_replicated(make_kv_groups(kv_cache_config), vllm_config, kv_cache_config)
    check_zeroing(vllm_config, kv_cache_config, role)
    transfer_config = vllm_config.kv_transfer_config
    parallel_config = vllm_config.parallel_config
    events_config = vllm_config.kv_events_config
    return OffloadingConfig(
        engine_id=str(transfer_config.engine_id),
        # Workers make no keys, so they need no fingerprint; with it every worker would read all weights.
        model=make_model_identity(
            vllm_config,
            outlives_engine=outlives_engine(vllm_config),
            reads_files=role is KVConnectorRole.SCHEDULER,
        ),
        groups=groups,
        hash_block_size=compat.hash_block_size(vllm_config, kv_cache_config),
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        hash_seed=compat.hash_seed(vllm_config),
        kv_layout=compat.page_format(vllm_config, kv_cache_config),
        kv_dtype=describe_kv_dtype(vllm_config, kv_cache_config),
        rank=None if role is KVConnectorRole.SCHEDULER else parallel_config.rank,
        world_size=parallel_config.world_size,
        tensor_parallel_size=parallel_config.tensor_parallel_size,
        pipeline_parallel_size=parallel_config.pipeline_parallel_size,
        context_parallel_size=context_parallel_size(vllm_config),
        num_hosts=parallel_config.nnodes_within_dp,
        has_local_workers=parallel_config.distributed_executor_backend in LOCAL_EXECUTORS,
        enable_events=bool(events_config and events_config.enable_kv_cache_events),
        engine_kind=ENGINE_KIND,
        engine_host_bytes=count_host_bytes(vllm_config, kv_cache_config),
        engines_per_host=count_engines(vllm_config),
        computes_last_token=computes_last_token(vllm_config),
        audits_first_hits=True,
        extra_config=extra_config(vllm_config),
    )


def computes_last_token(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM computes the last token of a prompt again that a load has brought whole. Pure.

    It does so behind every load that ran beside its steps. But the keys that a draft model of the EAGLE kind has for
    the last token of a block depend on the token behind it, which the block's hash does not cover.
    """
    speculative_config = vllm_config.speculative_config
    return speculative_config is None or not speculative_config.use_eagle()


def outlives_engine(vllm_config: VllmConfig) -> bool:
    """Return whether another engine may find the blocks: in secondary tiers, or through a user's own spec. Pure."""
    settings = vllm_config.kv_transfer_config.kv_connector_extra_config
    return any(settings.get(name) for name in ("secondary_tiers", "spec_name", "spec_module_path"))


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse roles, kinds of parallelism and settings that kvtier does not support. Pure.

    Raises:
        ConfigError: one is not supported; the message has the flag, its value and the remedy.
    """
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config.kv_role != "kv_both":
        remedy = 'must be "kv_both": kvtier stores and loads in every engine'
        raise ConfigError("kv_role", transfer_config.kv_role, remedy)
    pipeline_parallel_size = vllm_config.parallel_config.pipeline_parallel_size
    if pipeline_parallel_size != 1:
        remedy = "must be 1: workers that hold different layers are not supported; use tensor parallelism"
        raise ConfigError("pipeline_parallel_size", pipeline_parallel_size, remedy)
    if context_parallel_size(vllm_config) != 1:
        remedy = "must be 1: workers that split the tokens of a sequence are not supported"
        raise ConfigError("context_parallel_size", context_parallel_size(vllm_config), remedy)
    has_prefix_caching = vllm_config.cache_config.enable_prefix_caching
    if not has_prefix_caching:
        # vLLM clears the flag for models whose prefixes cannot be reused, and still hashes their blocks.
        remedy = "must be true: a prefix that cannot be reused on the device cannot be reused from a tier"
        if getattr(vllm_config.model_config, "is_hybrid", False):
            remedy += "; with recurrent states vLLM wants --enable-prefix-caching said"
        cause = compat.why_prefix_caching_is_off(vllm_config)
        raise ConfigError("enable_prefix_caching", has_prefix_caching, f"{remedy}{cause}")
    check_rope(vllm_config.model_config)
    check_states(vllm_config.cache_config)
    check_drafts(vllm_config)


def check_states(cache_config: CacheConfig) -> None:
    """Refuse settings with which a block does not hold the whole recurrent state after its last token. Pure.

    Raises:
        ConfigError: one is set; the message has the flag.
    """
    mode = getattr(cache_config, "mamba_cache_mode", ALIGNED)
    # "none" is that of models without states; a group in it is refused by itself.
    if mode not in (ALIGNED, "none"):
        remedy = f"does not keep recurrent states where kvtier finds them: {ALIGN_REMEDY}"
        raise ConfigError("mamba_cache_mode", mode, remedy)
    for name in ("use_replayssm", "use_kda_recoverssm"):
        value = getattr(cache_config, name, False)
        if value:
            remedy = (
                "must be false: the last tokens of a state are kept apart from it and are not in its block"
            )
            raise ConfigError(name, value, remedy)


def check_drafts(vllm_config: VllmConfig) -> None:
    """Refuse recurrent states together with a way of drafting that no engine has confirmed (docs/adr/0037). Pure.

    Raises:
        ConfigError: both are used; the message has the method, or ``async_scheduling``.
    """
    speculative_config = vllm_config.speculative_config
    # vLLM sets this mode for models with states alone, when it caches prefixes.
    if speculative_config is None or getattr(vllm_config.cache_config, "mamba_cache_mode", "none") != ALIGNED:
        return
    method = getattr(speculative_config, "method", None)
    if method not in CONFIRMED_DRAFTS:
        raise ConfigError(
            "speculative_config", method, f"is not confirmed with recurrent states: {DRAFTS_REMEDY}"
        )
    is_asynchronous = vllm_config.scheduler_config.async_scheduling
    if is_asynchronous:
        remedy = (
            "must be false with drafts beside recurrent states: in tests of vLLM 0.32 without kvtier a pre-empted "
            "request went on from a wrong state, which kvtier would keep; start with --no-async-scheduling"
        )
        raise ConfigError("async_scheduling", is_asynchronous, remedy)


def check_drafted_states(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse speculative decoding together with a kind of recurrent state that no engine has confirmed. Pure.

    Raises:
        ConfigError: both are used; the message has the method of drafting and the kind.
    """
    if vllm_config.speculative_config is None:
        return
    for spec in map(first_spec, kv_cache_config.kv_cache_groups):
        # Releases before 0.32, whose states are refused in any case, have a text here.
        kind = getattr(spec.mamba_type, "name", spec.mamba_type) if isinstance(spec, MambaSpec) else None
        if kind is not None and kind not in CONFIRMED_DRAFTED_STATES:
            method = getattr(vllm_config.speculative_config, "method", None)
            remedy = f"is not confirmed with recurrent states of kind {kind}: {DRAFTS_REMEDY}"
            raise ConfigError("speculative_config", method, remedy)


def count_local_engines(parallel_config: ParallelConfig) -> int:
    """Return how many engines of a server keep all of their memory on this machine; 0: none, or it is not known."""
    is_local = parallel_config.distributed_executor_backend in LOCAL_EXECUTORS
    return int(parallel_config.data_parallel_size_local) if is_local else 0


def check_rope(model_config: ModelConfig) -> None:
    """Refuse a model whose keys depend on the other requests of a step. Pure.

    vLLM's own rotary layers fix their factors at start. Those of transformers choose them by the longest position of
    the call, which behind vLLM's transformers backend is the longest of the batch.

    Raises:
        ConfigError: such a model may have positions beyond its original length.
    """
    if not model_config.using_transformers_backend():
        return
    config = model_config.hf_text_config
    declared = getattr(config, "rope_parameters", None) or {}
    for parameters in (declared, *declared.values()):
        rope_type = str(parameters.get("rope_type", "default")) if isinstance(parameters, dict) else "default"
        original = config.max_position_embeddings
        if rope_type == "longrope":
            original = parameters.get("original_max_position_embeddings", original)
        elif "dynamic" not in rope_type:
            continue
        if model_config.max_model_len > original:
            remedy = (
                f"must be at most {original} with rope_type={rope_type!r} and model_impl='transformers': beyond, a key "
                "depends on the other requests of its batch; use vLLM's own implementation of the model"
            )
            raise ConfigError("max_model_len", model_config.max_model_len, remedy)


def check_zeroing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: KVConnectorRole) -> None:
    """Refuse an engine that zeroes new device blocks before kvtier has stored their old content. Pure.

    The scheduler's process decides which blocks are zeroed. The first model runner calls ``handle_preemptions`` before
    it zeroes. The second one zeroes first, so a store that was deferred to this step would store zeros.

    Raises:
        ModelError: it does; the message names the variable that selects the first runner.
    """
    is_scheduler = role is KVConnectorRole.SCHEDULER
    if is_scheduler and kv_cache_config.needs_kv_cache_zeroing and vllm_config.use_v2_model_runner:
        raise ModelError(
            "the model has KV of several precisions, and vLLM's second model runner zeroes device blocks before "
            "their stores have ended: start vLLM with VLLM_USE_V2_MODEL_RUNNER=0"
        )


def context_parallel_size(vllm_config: VllmConfig) -> int:
    """Return how many workers split the tokens of one sequence, in prefill and decode together. Pure."""
    parallel_config = vllm_config.parallel_config
    return int(parallel_config.prefill_context_parallel_size * parallel_config.decode_context_parallel_size)


def describe_kv_dtype(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return the data type of keys and values, as configured and as each group has it. Pure.

    A checkpoint can have another type than the model's, and settings can exclude layers.
    """
    cache_config = vllm_config.cache_config
    specs = [first_spec(group) for group in kv_cache_config.kv_cache_groups]
    of_groups = ", ".join(map(describe_contents, specs))
    skipped = ",".join(getattr(cache_config, "kv_cache_dtype_skip_layers", None) or ())
    return f"{cache_config.cache_dtype}: {of_groups}" + (f" without {skipped}" if skipped else "")


def describe_contents(spec: KVCacheSpec) -> str:
    """Return the data type of a layer's page, for a recurrent state the shape and type of each part. Pure."""
    if isinstance(spec, MambaSpec):
        parts = zip(spec.shapes, spec.dtypes, strict=True)
        described = " ".join(f"{'x'.join(map(str, shape))} {dtype}" for shape, dtype in parts)
        return f"{spec.mamba_type.name} state {described}".replace("torch.", "")
    return f"{spec.dtype} {spec.kv_quant_mode.name}".removeprefix("torch.")


def extra_config(vllm_config: VllmConfig) -> dict[str, Any]:  # Any: kvtier.config gives the values types
    """Return the user's settings; each data-parallel replica gets an instance id, and so a region, of its own."""
    settings = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
    replica = vllm_config.parallel_config.data_parallel_index
    instance_id = settings.get("instance_id")
    # Not the size: vLLM resets it to 1 in replicas of a model that shares no experts, but leaves the index.
    if isinstance(instance_id, str) and replica:
        settings["instance_id"] = f"{instance_id}-dp{replica}"
    return settings
