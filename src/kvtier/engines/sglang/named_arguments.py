"""Which of SGLang's arguments name an engine's pages: all of them, less those that cannot change a byte.

``EXCLUDED`` lists what is left out, each group with the reason why two engines that differ in it may exchange pages. An
argument that a later release adds is part of the name until it is listed here: at worst a miss, never wrong bytes.
``tests/engines/sglang/test_named_arguments.py`` changes each in turn, in both directions.

Values are canonical: mappings and sets sorted, dtypes, enums and classes by name. A value without a stable form, such
as a function, is never described by its ``repr``, which has an address in it: ``NamedArguments.unstable`` has its name.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch

PRIVATE = "may hold a credential or an address"
WEIGHTS = "weights are named by their bytes; where they cannot be read, `model_revision` is part of the name"
ADAPTERS = "SGLang's keys have the adapter's name, and `adapters_revision` stands for its bytes"
LAYOUT = "the pool or the rank says it"
TOKENS = "pages are named by token ids: how a server gets and returns them does not matter"
WHEN = "when and how much is computed or kept at a time, not what"
ROUNDING = "another order of the same sums, as with other requests in the batch"
REPORTED = "what is logged or measured"
MEDIA = "how media are fetched and handed over; the processor and its settings are part of the name"
DRAFTS = "which drafts are tried; the target verifies each, and its keys and values are its own"
READING = "how the same bytes are read"
PROCESSES = "processes, addresses and devices"

_NAMES: Mapping[str, str] = {
    PRIVATE: (
        "api_key admin_api_key ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh "
        "watermark_key watermark_key_b hicache_storage_backend_extra_config unified_cache_external_linker_config "
        "kv_events_config modelexpress_config encoder_urls encoder_register_urls load_publish_endpoint "
        "otlp_traces_endpoint lmcache_config_file flexkv_config_file"
    ),
    WEIGHTS: (
        "model_path revision download_dir served_model_name weight_version trust_remote_code model_checksum "
        "delete_ckpt_after_loading modelopt_checkpoint_save_path modelopt_export_path speculative_draft_model_path "
        "speculative_draft_model_revision kt_weight_path"
    ),
    ADAPTERS: (
        "enable_lora lora_paths enable_lora_overlap_loading max_loaded_loras max_loras_per_batch lora_eviction_policy "
        "lora_drain_wait_threshold lora_strict_loading"
    ),
    LAYOUT: "tp_size pp_size attn_cp_size dcp_size page_size hicache_mem_layout",
    TOKENS: (
        "enable_response_store tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num "
        "detokenizer_worker_num skip_tokenizer_init host port fastapi_root_path enable_http_worker_reuseport "
        "smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args "
        "skip_server_warmup warmups enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size "
        "chat_template trust_request_chat_template hf_chat_template_name completion_template file_storage_path "
        "enable_cache_report return_input_ids return_output_ids reasoning_parser default_chat_template_kwargs "
        "strip_thinking_cache enable_strict_thinking tool_call_parser tool_server sampling_defaults "
        "asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params allow_auto_truncate "
        "stream_interval batch_notify_size stream_response_default_include_usage incremental_streaming_output "
        "enable_streaming_session constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
        "constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
        "dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode "
        "sampling_backend grammar_backend sampling_mask_max_tokens enable_custom_logit_processor "
        "disable_outlines_disk_cache enable_watermark watermark_config watermark_context_window "
        "watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all "
        "enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts enable_return_indexer_topk"
    ),
    WHEN: (
        "mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size "
        "prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens "
        "prefill_max_requests schedule_policy enable_priority_scheduling disable_priority_preemption "
        "default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first "
        "priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness swa_full_tokens_ratio "
        "_swa_full_tokens_ratio_explicitly_set disable_overlap_schedule num_continuous_decode_steps "
        "scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size mamba_full_memory_ratio "
        "enable_prefill_delayer prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark "
        "prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio "
        "prefill_delayer_max_delay_ms min_free_slots_delay radix_eviction_policy "
        "_radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_radix_cache "
        "enable_session_radix_cache enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size "
        "hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_storage_backend "
        "hicache_storage_prefetch_policy hicache_storage_prefetch_retry_poll_interval "
        "hicache_storage_prefetch_retry_max_attempts cpu_offload_gb offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_mode enable_memory_saver enable_weights_cpu_backup "
        "enable_draft_weights_cpu_backup enable_two_batch_overlap enable_single_batch_overlap "
        "tbo_token_distribution_threshold"
    ),
    ROUNDING: (
        "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode "
        "cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill "
        "cuda_graph_prefill_max_context disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph "
        "disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph "
        "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs disable_flashinfer_autotune "
        "flashinfer_autotune_skip_ops enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp "
        "enable_torch_symm_mem pre_warm_nccl enable_flashinfer_allreduce_fusion "
        "enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion "
        "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode"
    ),
    REPORTED: (
        "log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target "
        "uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port "
        "enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval "
        "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels "
        "bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
        "generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging "
        "enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace "
        "trace_modules otlp_service_name export_metrics_to_file export_metrics_to_file_dir stat_loggers "
        "enable_layerwise_nvtx_marker expert_distribution_recorder_mode expert_distribution_recorder_buffer_size "
        "expert_balancedness_report_mode spec_trace_dir"
    ),
    MEDIA: (
        "enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_processor_worker_num mm_io_worker_num "
        "allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb enable_mm_global_cache "
        "mm_global_cache_backend mm_feature_transport"
    ),
    DRAFTS: (
        "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth speculative_ngram_match_type "
        "speculative_ngram_max_trie_depth speculative_ngram_capacity speculative_ngram_external_corpus_path "
        "speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens "
        "speculative_accept_threshold_single speculative_accept_threshold_acc"
    ),
    READING: (
        "weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
        "weight_loader_drop_cache_after_load weight_cache_socket weight_cache_timeout "
        "checkpoint_engine_wait_weights_before_ready engine_info_bootstrap_port "
        "remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports"
    ),
    PROCESSES: (
        "base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler "
        "numa_node gc_threshold nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank dp_size "
        "load_balance_method pp_max_micro_batch_size pp_async_batch_depth enable_p2p_check "
        "enable_dp_attention_local_control_broadcast disaggregation_mode disaggregation_decode_allocation_policy "
        "disaggregation_transfer_backend disaggregation_enable_kv_checksum disaggregation_bootstrap_port "
        "disaggregation_ib_device disaggregation_decode_enable_radix_cache "
        "disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup "
        "num_reserved_decode_tokens disaggregation_decode_extra_slots disaggregation_decode_polling_interval "
        "enable_pd_role_switch optimistic_prefill_attempts encoder_transfer_backend encoder_bootstrap_port "
        "enable_adaptive_dispatch_to_encoder disaggregation_decode_host_receive_threshold mooncake_ib_device "
        "elastic_ep_scale_timeout decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank "
        "kt_cpuinfer kt_threadpool_count"
    ),
}

EXCLUDED: Mapping[str, str] = {name: reason for reason, names in _NAMES.items() for name in names.split()}
"""Argument -> why two engines that differ in it may exchange pages."""

LENGTH = "context_length"
SEED = "random_seed"
RANDOM_WEIGHTS = "dummy"

CONDITIONS: Mapping[str, str] = {
    LENGTH: "how long a sequence may be; part of the name where RoPE's factors depend on it (dynamic, longrope)",
    SEED: "which token is drawn; part of the name with random weights",
}
"""Arguments that are left out under a condition."""

_OF_LENGTH = re.compile(r"dynamic|longrope|\bsu\b", re.IGNORECASE)


class NamedArguments(NamedTuple):
    """What an engine's arguments say of its pages.

    Attributes:
        words: the arguments that name them, with canonical values.
        unstable: those whose value has no form that another process could compare.
    """

    words: dict[str, object]
    unstable: tuple[str, ...]


def name_arguments(engine: object, model_config: object) -> NamedArguments:
    """Return which arguments name the pages, and with which values. Pure.

    Args:
        engine: SGLang's ``ServerArgs``, of any release.
        model_config: the model's configuration as its file has it; empty where it is not known.
    """
    words: dict[str, object] = {}
    unstable: list[str] = []
    for name in sorted(list_arguments(engine)):
        if name in EXCLUDED or _is_left_out(name, engine, model_config):
            continue
        try:
            words[name] = canonical(getattr(engine, name))
        except ValueError:
            unstable.append(name)
    return NamedArguments(words, tuple(unstable))


def list_arguments(engine: object) -> Iterator[str]:
    """Yield the names of an engine's arguments: the fields of a structure or a dataclass, or what an object has."""
    fields = getattr(type(engine), "__struct_fields__", None)  # msgspec's
    if fields is None and dataclasses.is_dataclass(engine):
        fields = [one.name for one in dataclasses.fields(engine)]
    yield from vars(engine) if fields is None else fields


def canonical(value: object) -> object:
    """Return a value as JSON has it, the same in every process. Pure.

    Raises:
        ValueError: it has no such form.
    """
    if isinstance(value, Enum):  # before text: some are both
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return {str(key): canonical(one) for key, one in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, set | frozenset):
        return sorted((canonical(one) for one in value), key=str)
    if isinstance(value, list | tuple):
        return [canonical(one) for one in value]
    if dataclasses.is_dataclass(value) or hasattr(type(value), "__struct_fields__"):
        return {name: canonical(getattr(value, name)) for name in list_arguments(value)}
    raise ValueError(f"a {type(value).__name__} has no form that another process can compare")


def _is_left_out(name: str, engine: object, model_config: object) -> bool:
    if name == SEED:
        load_format = str(getattr(engine, "load_format", None) or "")
        return load_format.rpartition(".")[2].lower() != RANDOM_WEIGHTS
    if name != LENGTH:
        return False
    overrides: Any = getattr(engine, "json_model_override_args", None) or ""  # Any: of any release
    told = f"{model_config} {overrides}"
    return bool(model_config) and "rope" not in str(overrides) and _OF_LENGTH.search(told) is None
