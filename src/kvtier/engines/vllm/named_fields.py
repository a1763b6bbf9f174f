"""Which fields of vLLM's configuration name an engine's blocks: all of them, less those that cannot change a byte.

``EXCLUDED`` lists what is left out, each with the reason why two engines that differ in it may exchange blocks. A field
that a later release of vLLM adds is part of the name until it is listed here: at worst a miss, never a wrong answer.

Values are canonical: mappings and sets sorted, dtypes and classes by name, the rest by vLLM's own ``normalize_value``.
A value that has no stable form, such as a function, is never described by its ``repr``, which has an address in it:
``NamedFields.unstable`` has its field. Credentials are no part of the name, because its words stand next to the blocks:
fields that hold them are excluded, and of free-form settings and URLs the parts that may be one are dropped.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeGuard

from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import normalize_value

from kvtier.settings import IsDataclass

CREDENTIAL = "may hold a credential, and the name stands next to the blocks"
LAYOUT = "the layout of the blocks has it"
SIZES = "how much is computed or kept at a time, not what"
WEIGHTS = (
    "the weights are named by their bytes; where they cannot be read, name and revision are part of the name"
)
TOKENS = "blocks are named by token ids"
REPORTED = "what is reported"
RETURNED = "what is returned"
SAMPLING = "which token is drawn"
ACCESS = "who may ask for what"
ROUNDING = "another order of the same sums, as with other requests in the batch"
PLACE = "where weights are kept"
READING = "how the same bytes are read"
FREEING = "how memory is freed"
DEVICE = "what the device keeps"
OTHERS = "of another connector"

EXCLUDED: Mapping[str, str] = {
    "model_config.hf_token": CREDENTIAL,
    "kv_transfer_config": f"{CREDENTIAL}; of kvtier's settings the layout has those that decide bytes",
    "ec_transfer_config": CREDENTIAL,
    "weight_transfer_config": "weights that are loaded in place get a name of their own",
    "parallel_config": f"addresses, ranks and processes; {LAYOUT} where it decides what a worker holds",
    "scheduler_config": SIZES,
    "compilation_config": ROUNDING,
    "optimization_level": ROUNDING,
    "performance_mode": ROUNDING,
    "kernel_config.ir_op_priority": ROUNDING,
    "kernel_config.enable_flashinfer_autotune": ROUNDING,
    "kernel_config.enable_rocm_segmented_attn_autotune": ROUNDING,
    "kernel_config.enable_cutedsl_warmup": "when kernels are compiled",
    "kernel_config.enable_jit_warmup": "when kernels are compiled",
    "attention_config.sparse_mla_prefill_workspace_factor": SIZES,
    "attention_config.tokenspeed_mla_min_split_kv": ROUNDING,
    "offload_config": PLACE,
    "observability_config": REPORTED,
    "logging_config": REPORTED,
    "profiler_config": REPORTED,
    "kv_events_config": REPORTED,
    "aux_output_config": RETURNED,
    "structured_outputs_config": SAMPLING,
    "reasoning_config": SAMPLING,
    "watermark_config": SAMPLING,
    "ec_manager_config": SIZES,
    "instance_id": "names one start of the engine",
    "shutdown_timeout": "how the engine ends",
    "quant_config": "made of the model's configuration, its files and --quantization, which are in",
    "device_config.device": "device_type is in",
    "model_config.model": WEIGHTS,
    "model_config.model_weights": WEIGHTS,
    "model_config.revision": WEIGHTS,
    "model_config.seed": "random weights are named by it, others do not depend on it",
    "model_config.hf_config_path": "hf_config is in",
    "model_config.config_format": "hf_config is in",
    "model_config.tokenizer": TOKENS,
    "model_config.tokenizer_mode": TOKENS,
    "model_config.tokenizer_revision": TOKENS,
    "model_config.skip_tokenizer_init": TOKENS,
    "model_config.served_model_name": "what clients call the model",
    "model_config.allowed_local_media_path": ACCESS,
    "model_config.allowed_media_domains": ACCESS,
    "model_config.max_model_len": f"{SIZES}; not excluded where attention depends on it (longrope, NTK, Llama 4)",
    "model_config.spec_target_max_model_len": SIZES,
    "model_config.enforce_eager": ROUNDING,
    "model_config.disable_cascade_attn": ROUNDING,
    "model_config.max_logprobs": RETURNED,
    "model_config.logprobs_mode": RETURNED,
    "model_config.return_sampling_mask": RETURNED,
    "model_config.enable_return_routed_experts": RETURNED,
    "model_config.is_submodel_config": "which settings vLLM checks at its start",
    "model_config.use_fp64_gumbel": SAMPLING,
    "model_config.logits_processors": SAMPLING,
    "model_config.generation_config": f"{SAMPLING}; not excluded for Llama 4, whose attention it decides",
    "model_config.io_processor_plugin": RETURNED,
    "model_config.pooler_config": RETURNED,
    "model_config.renderer_num_workers": SIZES,
    "model_config.enable_trace_replay": REPORTED,
    "model_config.enable_sleep_mode": FREEING,
    "model_config.sleep_mode_backend": FREEING,
    "model_config.sleep_mode_offload_cudagraph": FREEING,
    "model_config.sleep_preserve_parameter_names": FREEING,
    "model_config.enable_cumem_allocator": FREEING,
    "model_config.enable_nccl_comm_suspend": FREEING,
    "model_config.multimodal_config.limit_per_prompt": ACCESS,
    "model_config.multimodal_config.mm_processor_cache_gb": SIZES,
    "model_config.multimodal_config.mm_processor_cache_type": SIZES,
    "model_config.multimodal_config.mm_shm_cache_max_object_size_mb": SIZES,
    "model_config.multimodal_config.mm_ipc_gpu_memory_gb": SIZES,
    "model_config.multimodal_config.skip_mm_profiling": SIZES,
    "model_config.multimodal_config.mm_hasher_algorithm": "images with other hashes are other blocks",
    "model_config.multimodal_config.mm_tensor_ipc": "how processes exchange the same bytes",
    "model_config.multimodal_config.mm_encoder_tp_mode": ROUNDING,
    "cache_config.block_size": LAYOUT,
    "cache_config.user_specified_block_size": LAYOUT,
    "cache_config.user_specified_mamba_block_size": LAYOUT,
    "cache_config.hash_block_size": LAYOUT,
    "cache_config.prefix_match_unit": LAYOUT,
    "cache_config._block_size_resolved": LAYOUT,
    "cache_config.effective_attention_block_size": LAYOUT,
    "cache_config.cache_hit_alignment_tokens": LAYOUT,
    "cache_config.mamba_page_size_padded": LAYOUT,
    "cache_config.skip_page_size_padded": LAYOUT,
    "cache_config.prefix_caching_hash_algo": LAYOUT,
    "cache_config.enable_prefix_caching": DEVICE,
    "cache_config.prefix_cache_retention_interval": DEVICE,
    "cache_config.enable_mamba_shared_prefix_checkpoint": DEVICE,
    "cache_config.enable_mamba_fine_grained_prefix_cache": DEVICE,
    "cache_config.gpu_memory_utilization": SIZES,
    "cache_config.kv_cache_memory_bytes": SIZES,
    "cache_config.num_gpu_blocks": SIZES,
    "cache_config.num_cpu_blocks": SIZES,
    "cache_config.num_gpu_blocks_override": SIZES,
    "cache_config.kv_cache_size_tokens": SIZES,
    "cache_config.kv_cache_max_concurrency": SIZES,
    "cache_config.kv_offloading_size": OTHERS,
    "cache_config.kv_offloading_backend": OTHERS,
    "load_config.download_dir": WEIGHTS,
    "load_config.use_tqdm_on_load": REPORTED,
    "load_config.safetensors_load_strategy": READING,
    "load_config.safetensors_prefetch_num_threads": READING,
    "load_config.safetensors_prefetch_block_size": READING,
    "load_config.device": PLACE,
    "load_config.pt_load_map_location": PLACE,
    "lora_config.max_loras": SIZES,
    "lora_config.max_cpu_loras": SIZES,
    "lora_config.max_lora_rank": SIZES,
    "lora_config.specialize_active_lora": ROUNDING,
    "speculative_config": "drafts that are found in the tokens have no layers; those of a model are in",
    "speculative_config.model": WEIGHTS,
    "speculative_config.revision": WEIGHTS,
    "speculative_config.enforce_eager": ROUNDING,
    "speculative_config.target_model_config": "model_config is in",
    "speculative_config.target_parallel_config": LAYOUT,
    "speculative_config.draft_parallel_config": LAYOUT,
    "speculative_config.draft_model_config.hf_overrides": "a function of vLLM's own; hf_config is in as it made it",
}
"""Why a field, or a whole section, is no part of the name, by its name with dots. Fields of a draft model's
configuration are listed under those of the model."""

VALUES_WITHOUT_FIELD: Mapping[str, object] = {
    "attention_config.indexer_sparse_logits": False,
    "cache_config.swa_bounded_replay": True,
}
"""Fields that some of ``compat.CONFIRMED_RELEASES`` lack, each with the value at which an engine computes what releases
without the field compute. At this value a field is no part of the name, so that such releases find each other's blocks.
``swa_bounded_replay`` is read by DeepSeek-V4.1 alone, whose window's blocks it takes out of the layout."""

DRAFT_SECTIONS = {
    "speculative_config.draft_model_config.": "model_config.",
    "speculative_config.draft_load_config.": "load_config.",
}
"""Sections of a draft model, and those under which their fields are listed."""

METHODS_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways of drafting that have no model, so that no layer of theirs is in a block."""

UNNAMED_PARTS_OF_HF = frozenset({"transformers_version", "_name_or_path", "name_or_path", "_commit_hash"})
"""Entries of a model's own configuration that do not change what it computes."""

SECRET_KEY = re.compile(
    r"secret|passw|credential|bearer|private_?key|api_?key|(access|account|auth)_?key"
    r"|(hf|auth|access|session|refresh|api|sas|security)_?token|^(token|auth|authorization|cookie)$",
    re.IGNORECASE,
)
"""Keys of free-form settings whose values are dropped. A key too many costs nothing; a model's own entries, such as
``bos_token_id``, must not match."""


class NamedField(NamedTuple):
    """A field of the configuration, or a whole section that is excluded.

    Attributes:
        name: with dots: "model_config.dtype".
        value: what the engine has.
        reason: why it is no part of the name; empty where it is.
    """

    name: str
    value: object
    reason: str


class NamedFields(NamedTuple):
    """What a configuration says of the bytes.

    Attributes:
        words: every field that is part of the name and set, in canonical form, by its name.
        unstable: the fields that have no stable form, so that no other engine can be known to have the same.
    """

    words: Mapping[str, object]
    unstable: Sequence[str]


def name_fields(vllm_config: VllmConfig) -> NamedFields:
    """Return what is part of the name. Pure: other processes, homes and hosts return the same."""
    words: dict[str, object] = {}
    unstable: list[str] = []
    for field in list_fields(vllm_config):
        if field.reason or field.value is None or _computes_as_without(field):
            continue
        try:
            words[field.name] = canonical(field.value)
        except Exception:  # noqa: BLE001 - foreign: what a value of a model's own code raises is its own
            unstable.append(field.name)
    return NamedFields(words, unstable)


def list_fields(config: IsDataclass, start: str = "") -> Iterator[NamedField]:
    """Yield every field of a configuration; a section that is excluded as a whole once. Pure."""
    for field in dataclasses.fields(config):
        name, value = f"{start}{field.name}", getattr(config, field.name, None)
        reason = reason_of(name, value, config)
        if reason or not _is_section(value):
            yield NamedField(name, value, reason)
        else:
            yield from list_fields(value, f"{name}.")


def reason_of(name: str, value: object, section: object) -> str:
    """Return why a field is no part of the name; empty where it is. Pure.

    Args:
        name: with dots.
        value: the field's.
        section: the configuration that has the field.
    """
    if name not in EXCLUDED:
        for draft, listed in DRAFT_SECTIONS.items():
            name = f"{listed}{name.removeprefix(draft)}" if name.startswith(draft) else name
    holds = CONDITIONS.get(name)
    return EXCLUDED.get(name, "") if holds is None or holds(value, section) else ""


def has_no_weights(speculative_config: object) -> bool:
    """Return whether drafts are made without a model. Pure."""
    return getattr(speculative_config, "method", None) in METHODS_WITHOUT_WEIGHTS


def depends_on_length(model_config: ModelConfig) -> bool:
    """Return whether the longest request that a model serves decides how it attends, or may. Pure.

    longrope rotates keys with one of two sets of factors and dynamic NTK by a length. Llama 4 scales queries where more
    than 32,768 tokens are served, unless its generation config says otherwise.
    """
    try:
        return _finds_length(canonical(model_config.hf_config))
    except Exception:  # noqa: BLE001 - foreign: code that came with the model
        return True


CONDITIONS: Mapping[
    str, Callable[[Any, Any], bool]
] = {  # Any: a field's value, and vLLM's section that has it
    "model_config.max_model_len": lambda _, model_config: not depends_on_length(model_config),
    "model_config.generation_config": lambda _, model_config: not depends_on_length(model_config),
    "speculative_config": lambda speculative_config, _: has_no_weights(speculative_config),
}
"""When an exclusion holds, for those that do not always."""


def canonical(value: object) -> object:
    """Return a value in a form that JSON has, and that is equal in every process; without credentials. Pure.

    Raises:
        TypeError: it has none.
    """
    if is_model_configuration(value):
        return _without_unnamed(canonical(value.to_dict()))  # type: ignore[attr-defined]
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        named = {str(key): one for key, one in value.items()}
        if len(named) < len(value):
            raise TypeError("two keys have one text")
        return {key: canonical(one) for key, one in sorted(named.items()) if not SECRET_KEY.search(key)}
    if isinstance(value, Set):
        return sorted((canonical(one) for one in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [canonical(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {normalize_value(type(value)): canonical(fields)}
    return normalize_value(value)


def without_credentials(text: str) -> str:
    """Return a text without a user and password before an @, and if it is a URL without its query. Pure."""
    text = re.sub(r"(\w+://)?[^\s@]*:[^\s@]*@", r"\1", text)
    return re.sub(r"[?#].*", "", text, flags=re.DOTALL) if "://" in text else text


def is_model_configuration(value: object) -> bool:
    """Return whether a value is a model's own configuration, which transformers has defined. Pure."""
    return hasattr(value, "to_dict") and not isinstance(value, type)


def _computes_as_without(field: NamedField) -> bool:
    """Return whether a field has the value at which an engine computes what releases without it compute."""
    return field.name in VALUES_WITHOUT_FIELD and field.value == VALUES_WITHOUT_FIELD[field.name]


def _is_section(value: object) -> TypeGuard[IsDataclass]:
    is_configuration = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_configuration and not is_model_configuration(value)


def _without_unnamed(words: object) -> object:
    """Return a model's own configuration without entries that do not change what it computes, nested ones included."""
    if isinstance(words, list):
        return [_without_unnamed(one) for one in words]
    if not isinstance(words, dict):
        return words
    return {key: _without_unnamed(one) for key, one in words.items() if key not in UNNAMED_PARTS_OF_HF}


def _finds_length(words: object) -> bool:
    """Return whether a model's own configuration has anything that depends on a length, nested ones included."""
    if isinstance(words, list):
        return any(map(_finds_length, words))
    if not isinstance(words, dict):
        return False
    if any("ntk" in key.lower() or key == "attn_temperature_tuning" for key in words):
        return True
    kinds = [str(words.get(key, "")).lower() for key in ("rope_type", "type")]
    is_by_length = any(kind == "su" or "longrope" in kind or "dynamic" in kind for kind in kinds)
    return is_by_length or any(map(_finds_length, words.values()))
