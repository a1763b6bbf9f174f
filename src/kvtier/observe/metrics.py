"""Every metric family of kvtier, declared once: name, type, unit, meaning, labels and where it is read.

Those of the secondary tiers are in ``tier_metrics``.

Names follow Prometheus: base units, ``_total`` for counters, ``_seconds`` and ``_bytes``. A family that means exactly
what one of vLLM's own ``vllm:kv_offload_*`` means carries that name on vLLM's page, so that dashboards made for vLLM
show it. ``python -m scripts.metrics_page`` writes ``docs/reference/metrics.md`` from this file, and
``python -m scripts.dashboard`` the dashboard.

Source: names and meanings of ``vllm:kv_offload_*`` are those of vLLM 0.32, ``vllm/v1/kv_offload``.
"""

from kvtier.observe.family import counter, gauge, latency, size
from kvtier.observe.tier_metrics import TIER_CONTENT, TIER_HEALTH, TIER_TRAFFIC

TOKENS = (
    counter(
        "kvtier_prompt_tokens",
        "connector.prompt_tokens.{origin}",
        "Prompt tokens that were not computed, by where their keys and values came from: `device`, `host`, or the type "
        "of a secondary tier. With `kvtier_missed_tokens_total` they sum to all prompt tokens.",
        "tokens",
    ),
    counter(
        "kvtier_missed_tokens",
        "connector.missed_tokens.{cause}[.{tier}]",
        "Prompt tokens that were computed, by cause; `tier` is the tier that the cause is about, empty when none is.",
        "tokens",
    ),
    counter(
        "kvtier_counted_requests",
        "connector.recorded_requests",
        "Requests whose prompt tokens are counted above.",
        "requests",
    ),
    counter(
        "kvtier_loaded_tokens",
        "connector.loaded_tokens.{tier}",
        "Prompt tokens of loads that ended well, by the tier that had them before.",
        "tokens",
    ),
    counter(
        "kvtier_not_loaded_tokens",
        "connector.not_loaded_tokens.{tier}",
        'Prompt tokens that were found and computed all the same, because that is faster (`load_if: "faster"`).',
        "tokens",
    ),
)

CONNECTOR = (
    gauge("kvtier_requests", "connector.requests", "Requests that the engine has not ended.", "requests"),
    latency(
        "kvtier_search_seconds",
        "connector.search_s",
        "Time of one search for what is held of a request.",
        "vllm:kv_offload_lookup_sync_delay_seconds",
    ),
    latency(
        "kvtier_request_wait_seconds",
        "connector.wait_s",
        "Time from the first search of a request that was not final to the one that was, or to the request's end. "
        "Requests that never waited are not counted.",
        "vllm:kv_offload_lookup_async_delay_seconds",
    ),
    counter(
        "kvtier_load_bytes",
        "connector.load_bytes",
        "Bytes copied from host memory to the device, all workers together.",
        "bytes",
        "vllm:kv_offload_load_bytes",
    ),
    counter(
        "kvtier_load_seconds",
        "connector.load_time_s",
        "Time of these copies; copies overlap, so it can be more than has passed.",
        "seconds",
        "vllm:kv_offload_load_time",
    ),
    size(
        "kvtier_load_size_bytes",
        "connector.load_size_bytes",
        "Size of one such copy.",
        "vllm:kv_offload_load_size",
    ),
    latency("kvtier_load_duration_seconds", "connector.load_duration_s", "Time of one such copy."),
    counter(
        "kvtier_store_bytes",
        "connector.store_bytes",
        "Bytes copied from the device to host memory, all workers together.",
        "bytes",
        "vllm:kv_offload_store_bytes",
    ),
    counter(
        "kvtier_store_seconds",
        "connector.store_time_s",
        "Time of these copies.",
        "seconds",
        "vllm:kv_offload_store_time",
    ),
    size(
        "kvtier_store_size_bytes",
        "connector.store_size_bytes",
        "Size of one such copy.",
        "vllm:kv_offload_store_size",
    ),
    latency("kvtier_store_duration_seconds", "connector.store_duration_s", "Time of one such copy."),
    counter("kvtier_load_jobs", "connector.load_jobs", "Loads to the device that were begun.", "jobs"),
    counter(
        "kvtier_failed_load_jobs",
        "connector.failed_load_jobs",
        "Loads that failed on a worker; their requests were computed.",
        "jobs",
    ),
    counter(
        "kvtier_lost_load_jobs",
        "connector.lost_load_jobs",
        "Loads whose blocks were gone when the load was to pin them.",
        "jobs",
    ),
    counter("kvtier_store_jobs", "connector.store_jobs", "Stores from the device that were begun.", "jobs"),
    counter(
        "kvtier_failed_store_jobs",
        "connector.failed_store_jobs",
        "Stores that failed on a worker or became void.",
        "jobs",
    ),
    counter(
        "kvtier_refused_stores",
        "connector.refused_stores",
        "Offers of blocks for which host memory had no room.",
        "offers",
        "vllm:kv_offload_allocation_failure",
    ),
    counter(
        "kvtier_flushed_store_jobs",
        "connector.flushed_store_jobs",
        "Stores that had to end before a device block was written again; the engine waited for them.",
        "jobs",
    ),
    counter(
        "kvtier_unknown_tenant_requests",
        "connector.unknown_tenant_requests",
        "Requests for which nothing was loaded or stored, because the setting tenants does not serve their tenant.",
        "requests",
    ),
    gauge("kvtier_open_transfer_jobs", "connector.open_jobs", "Loads and stores under way.", "jobs"),
    gauge(
        "kvtier_fenced_store_jobs",
        "connector.fenced_jobs",
        "Stores under way whose device blocks may be taken by others.",
        "jobs",
    ),
    gauge(
        "kvtier_prefill_tokens_per_second",
        "connector.prefill_tokens_per_s",
        'Measured rate at which prompts are computed (`load_if: "faster"`); 0: not known.',
        "tokens per second",
    ),
    gauge(
        "kvtier_load_bytes_per_second",
        "connector.load_bytes_per_s",
        'Measured rate at which host memory loads (`load_if: "faster"`); 0: not known.',
        "bytes per second",
    ),
    counter(
        "kvtier_recorded_requests",
        "recorder.requests",
        "Requests in the recorded trace (`record_trace`).",
        "requests",
    ),
    counter(
        "kvtier_unrecorded_requests",
        "recorder.dropped_requests",
        "Requests that could not be recorded.",
        "requests",
    ),
    counter("kvtier_recorded_bytes", "recorder.bytes", "Size of the recorded trace.", "bytes"),
)

AUDIT = (
    counter(
        "kvtier_audited_requests",
        "audit.requests",
        "Requests that were computed although their prefix was held, to compare it (`audit_ratio`).",
        "requests",
    ),
    counter(
        "kvtier_audit_equal_blocks", "audit.equal_blocks", "Compared blocks with the same bytes.", "blocks"
    ),
    counter(
        "kvtier_audit_close_blocks",
        "audit.close_blocks",
        "Compared blocks that differ by no more than computing them in another batch does.",
        "blocks",
    ),
    counter(
        "kvtier_audit_wrong_blocks",
        "audit.wrong_blocks",
        "Compared blocks that are wrong. They are dropped; after more than `audit_limit` of them nothing is loaded.",
        "blocks",
    ),
    counter(
        "kvtier_audit_lost_blocks",
        "audit.lost_blocks",
        "Blocks that were to be compared and were not: the request ended before its tier delivered, or a job failed.",
        "blocks",
    ),
    gauge(
        "kvtier_audit_largest_deviation",
        "audit.largest_deviation",
        "The largest deviation of a compared block, in tolerances: above 1 it was wrong.",
        "tolerances",
    ),
    gauge(
        "kvtier_loads_stopped",
        "audit.loads_stopped",
        "1 while no hit is loaded because too many blocks were wrong.",
        "0 or 1",
    ),
    gauge(
        "kvtier_saved_seconds_per_token",
        "audit.saved_s.{bound}.{length}.{tier}",
        "Seconds that a loaded token saves of the time to the first token: `bound` is `mean`, or `low` or `high` for "
        "the ends of the 95 % interval; `length` is where the class of hit lengths begins, in tokens. Below zero "
        "loading is slower than computing.",
        "seconds per token",
    ),
    counter(
        "kvtier_trial_loaded_requests",
        "audit.loaded_requests.{length}.{tier}",
        "Requests behind that number that loaded their hit.",
        "requests",
    ),
    counter(
        "kvtier_trial_computed_requests",
        "audit.computed_requests.{length}.{tier}",
        "Requests behind it that computed their hit.",
        "requests",
    ),
    gauge(
        "kvtier_loads_switched_off",
        "audit.switched_off.{length}.{tier}",
        'Whether that interval lies below zero: with `load_if: "faster"` such hits are computed.',
        "0 or 1",
    ),
)

HOST = (
    gauge("kvtier_host_capacity_blocks", "primary.capacity_blocks", "Slots of host memory.", "blocks"),
    gauge("kvtier_host_held_blocks", "primary.held_blocks", "Blocks that host memory holds.", "blocks"),
    gauge("kvtier_host_free_blocks", "primary.free_blocks", "Slots without a block.", "blocks"),
    gauge(
        "kvtier_host_evictable_blocks",
        "primary.evictable_blocks",
        "Held blocks that could be evicted now.",
        "blocks",
    ),
    gauge(
        "kvtier_host_in_flight_blocks", "primary.in_flight_blocks", "Blocks that are being written.", "blocks"
    ),
    gauge(
        "kvtier_host_orphaned_blocks",
        "primary.orphaned_blocks",
        "Slots of transfers that began before a reset and have not ended.",
        "blocks",
    ),
    gauge(
        "kvtier_host_leased_blocks",
        "primary.leased_blocks",
        "Blocks that operators or clients have pinned until a time.",
        "blocks",
    ),
    counter(
        "kvtier_host_refused_pins",
        "primary.refused_pins",
        "Blocks that requests asked to pin beyond three quarters of a tenth of host memory, or their tenant's quota.",
        "blocks",
    ),
    gauge(
        "kvtier_host_pinned_ratio",
        "primary.pinned_ratio",
        "Share of host memory that cannot be evicted now, because it is read, written or waited for.",
        "0 to 1",
        "vllm:kv_offload_cpu_cache_usage_perc",
    ),
    gauge(
        "kvtier_host_write_pinned_ratio",
        "primary.write_pinned_ratio",
        "The part of it that is being written.",
        "0 to 1",
        "vllm:kv_offload_cpu_cache_write_usage_perc",
    ),
    gauge(
        "kvtier_host_read_pinned_ratio",
        "primary.read_pinned_ratio",
        "The rest of it.",
        "0 to 1",
        "vllm:kv_offload_cpu_cache_read_usage_perc",
    ),
    gauge(
        "kvtier_host_tracked_keys",
        "primary.tracked_keys",
        "Keys whose uses are counted (`store_threshold`).",
        "keys",
    ),
    counter(
        "kvtier_host_loaded_blocks", "primary.loaded", "Blocks pinned for loads to the device.", "blocks"
    ),
    counter("kvtier_host_stored_blocks", "primary.stored", "Blocks written to host memory.", "blocks"),
    counter("kvtier_host_failed_blocks", "primary.failed", "Blocks whose write failed.", "blocks"),
    counter("kvtier_host_evicted_blocks", "primary.evicted", "Blocks evicted from host memory.", "blocks"),
    counter(
        "kvtier_host_expired_blocks",
        "primary.expired",
        "Blocks dropped from host memory because their `ttl_s` was over.",
        "blocks",
    ),
    gauge(
        "kvtier_host_tenant_blocks",
        "primary.tenant_blocks.{tenant}",
        "Blocks in host memory by tenant, where `tenants` is set: those it lists, `(others)` together, and `(none)`.",
        "blocks",
    ),
    gauge(
        "kvtier_host_tenant_bytes",
        "primary.tenant_bytes.{tenant}",
        "Host memory by tenant, where `tenants` is set.",
        "bytes",
    ),
    counter(
        "kvtier_host_refused_evictions",
        "primary.refused",
        "Times that room was needed and too few blocks could be evicted.",
        "times",
    ),
    counter(
        "kvtier_event_merges",
        "primary.event_merges",
        "Times that events of blocks were merged because no one took them in time.",
        "times",
    ),
    gauge(
        "kvtier_waiting_requests", "waiting_requests", "Requests that wait for a secondary tier.", "requests"
    ),
    counter(
        "kvtier_expired_requests",
        "expired_requests",
        "Requests that passed `lookup_deadline_s` waiting; what had not arrived was computed.",
        "requests",
    ),
    counter(
        "kvtier_failed_promotion_blocks",
        "failed_promotions",
        "Blocks that a secondary tier was to load and did not.",
        "blocks",
    ),
    counter(
        "kvtier_promotions_without_room",
        "promotions_without_room",
        "Blocks that were found in a secondary tier and for which host memory had no room.",
        "blocks",
        "vllm:kv_offload_tiering_promotion_allocation_failures",
    ),
    gauge(
        "kvtier_unreported_tier_jobs",
        "open_jobs",
        "Jobs of all secondary tiers whose end the scheduler has not seen; it looks in steps.",
        "jobs",
    ),
    counter(
        "kvtier_unknown_job_results",
        "unknown_results",
        "Reports of jobs that were not open: a defect of a tier.",
        "reports",
    ),
)

DEVICE = (
    gauge("kvtier_device_capacity_blocks", "device.num_blocks", "Blocks of the device pool.", "blocks"),
    gauge("kvtier_device_free_blocks", "device.free_blocks", "Blocks that no request uses.", "blocks"),
    gauge(
        "kvtier_device_cached_blocks",
        "device.cached_blocks",
        "Blocks that the device's prefix cache can find.",
        "blocks",
    ),
)

SECTIONS = {
    "Prompt tokens": TOKENS,
    "Between device and host memory": CONNECTOR,
    "Audit: are hits right, and worth it": AUDIT,
    "Host memory and requests that wait": HOST,
    "Secondary tiers: traffic": TIER_TRAFFIC,
    "Secondary tiers: content": TIER_CONTENT,
    "Secondary tiers: health": TIER_HEALTH,
    "Device pool of the transformers engine": DEVICE,
}
"""The families by subject, as the reference page has them."""

FAMILIES = tuple(family for section in SECTIONS.values() for family in section)
"""Every family."""
