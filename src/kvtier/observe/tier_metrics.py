"""The metric families of secondary tiers: what each moves, holds, and how it fails."""

from kvtier.observe.family import counter, gauge, latency

TIER = "tier.{tier_index}.{tier}."
"""Where the numbers of a secondary tier are; ``tier_index`` counts in the order of lookups, from 0."""

FAILURE_CAUSES = "absent|damaged|foreign|io_error|timeout"
"""Why a tier did not load a block that it was asked for: the values of ``kvtier.tiering.base.TierFailure``."""

TIER_TRAFFIC = (
    counter("kvtier_tier_loaded_blocks", TIER + "hits", "Blocks that the tier has loaded.", "blocks"),
    counter(
        "kvtier_tier_read_bytes",
        TIER + "loaded_bytes",
        "Bytes read from the tier into host memory.",
        "bytes",
        "vllm:kv_offload_tiering_read_bytes",
    ),
    counter("kvtier_tier_stored_blocks", TIER + "stored_blocks", "Blocks written to the tier.", "blocks"),
    counter(
        "kvtier_tier_write_bytes",
        TIER + "stored_bytes",
        "Bytes written from host memory to the tier.",
        "bytes",
        "vllm:kv_offload_tiering_write_bytes",
    ),
    latency(
        "kvtier_tier_promotion_seconds",
        TIER + "promotion_s",
        "Time from the submission of a promotion, the load of some blocks for one request, to its end.",
    ),
    latency(
        "kvtier_tier_lookup_seconds",
        TIER + "lookup_s",
        "Time until the tier's backend has answered a batch of lookups. Tiers that know what they hold ask none.",
    ),
    counter(
        "kvtier_tier_promoted_blocks",
        TIER + "promoted_blocks",
        "Blocks that have come to host memory.",
        "blocks",
    ),
    counter(
        "kvtier_tier_lookups",
        TIER + "lookups",
        "Lookups of a block that the tier has answered.",
        "lookups",
        "vllm:kv_offload_tiering_chunk_queries",
    ),
    counter(
        "kvtier_tier_found",
        TIER + "found",
        "Lookups that the tier has answered with yes.",
        "lookups",
        "vllm:kv_offload_tiering_chunk_hits",
    ),
    counter("kvtier_tier_sent_lookups", TIER + "lookup_sent", "Keys sent to the tier's backend.", "keys"),
    gauge("kvtier_tier_pending_lookups", TIER + "lookup_outstanding", "Keys without an answer yet.", "keys"),
    counter("kvtier_tier_failed_lookups", TIER + "lookup_failed", "Keys whose lookup failed.", "keys"),
    counter(
        "kvtier_tier_overflow_lookups",
        TIER + "lookup_overflow",
        "Keys that were a miss because too many lookups were pending.",
        "keys",
    ),
    counter(
        "kvtier_tier_overdue_lookups",
        TIER + "lookup_overdue",
        "Keys that were a miss because no answer came in time.",
        "keys",
    ),
    counter(
        "kvtier_tier_joined_jobs",
        TIER + "joined_jobs",
        "Small jobs that one of its threads moved with one call, together with others.",
        "jobs",
    ),
    counter(
        "kvtier_tier_existing_blocks",
        TIER + "existed",
        "Blocks to store that the tier had already.",
        "blocks",
    ),
    gauge(
        "kvtier_tier_promotion_jobs",
        TIER + "promotion_jobs",
        "Promotions whose end the scheduler has not seen.",
        "jobs",
        "vllm:kv_offload_tiering_active_promotion_jobs",
    ),
    gauge("kvtier_tier_promoting_blocks", TIER + "promoting_blocks", "Blocks of these promotions.", "blocks"),
    gauge(
        "kvtier_tier_cascade_jobs",
        TIER + "cascade_jobs",
        "Stores to the tier whose end the scheduler has not seen.",
        "jobs",
        "vllm:kv_offload_tiering_active_cascade_jobs",
    ),
    gauge("kvtier_tier_cascading_blocks", TIER + "cascading_blocks", "Blocks of these stores.", "blocks"),
    gauge("kvtier_tier_open_jobs", TIER + "open_jobs", "Jobs that the tier has not ended.", "jobs"),
    gauge(
        "kvtier_tier_queued_blocks",
        TIER + "queued_blocks",
        "Blocks that wait for one of its threads.",
        "blocks",
    ),
    gauge(
        "kvtier_tier_pending_blocks",
        TIER + "pending_blocks",
        "Blocks of host memory that the tier is still to get.",
        "blocks",
    ),
    gauge(
        "kvtier_tier_refused_blocks",
        TIER + "refused_blocks",
        "Blocks of host memory that the tier's `admission` refuses at present.",
        "blocks",
    ),
    gauge(
        "kvtier_tier_in_flight_store_bytes",
        TIER + "in_flight_store_bytes",
        "Host memory pinned by stores to the tier.",
        "bytes",
    ),
    gauge(
        "kvtier_tier_max_in_flight_store_bytes",
        TIER + "max_in_flight_store_bytes",
        "The most that may be (`max_in_flight_store_bytes`).",
        "bytes",
    ),
    gauge(
        "kvtier_tier_load_bytes_per_second",
        TIER + "load_bytes_per_s",
        "Measured rate at which the tier loads; 0: not known.",
        "bytes per second",
    ),
    gauge(
        "kvtier_tier_load_latency_seconds",
        TIER + "load_latency_s",
        "Measured time of a load before its first byte.",
        "seconds",
    ),
)

TIER_CONTENT = (
    gauge(
        "kvtier_tier_capacity_blocks",
        TIER + "capacity_blocks",
        "The most blocks that the tier can hold; missing where it cannot say.",
        "blocks",
    ),
    gauge(
        "kvtier_tier_indexed_blocks",
        TIER + "indexed_blocks",
        "Blocks of this engine's namespace that the tier knows it holds.",
        "blocks",
    ),
    gauge("kvtier_tier_blocks", TIER + "blocks", "Blocks that the `example` tier holds.", "blocks"),
    gauge("kvtier_tier_max_blocks", TIER + "max_blocks", "Its `max_blocks`.", "blocks"),
    gauge("kvtier_tier_own_packs", TIER + "own_packs", "Packs that this engine writes.", "packs"),
    gauge("kvtier_tier_neighbour_packs", TIER + "neighbour_packs", "Other packs that it reads.", "packs"),
    gauge("kvtier_tier_own_blocks", TIER + "own_blocks", "Blocks in its own packs.", "blocks"),
    gauge("kvtier_tier_free_slots", TIER + "free_slots", "Slots of its own packs without a block.", "slots"),
    gauge("kvtier_tier_failed_slots", TIER + "failed_slots", "Slots that could not be written.", "slots"),
    counter(
        "kvtier_tier_evicted_blocks", TIER + "evicted_blocks", "Blocks that the tier has evicted.", "blocks"
    ),
    counter(
        "kvtier_tier_keyless_blocks",
        TIER + "keyless_blocks",
        "Blocks that were neither stored nor loaded because their tenant has no key in the ring.",
        "blocks",
    ),
    counter("kvtier_tier_evicted_bytes", TIER + "evicted_bytes", "Bytes that the tier has evicted.", "bytes"),
    counter("kvtier_tier_evicted_objects", TIER + "evicted", "Objects that the tier has removed.", "objects"),
    counter(
        "kvtier_tier_failed_passes",
        TIER + "failed_passes",
        "Listings for eviction or quotas that failed; with a capacity the tier stores nothing until one succeeds.",
        "passes",
    ),
    counter(
        "kvtier_tier_removed_blocks",
        TIER + "<removed|removed_damaged>",
        "Damaged blocks that were removed.",
        "blocks",
    ),
    gauge(
        "kvtier_tier_deferred_deletes",
        TIER + "deferred_deletes",
        "Damaged blocks that a lease keeps from being removed.",
        "blocks",
    ),
)

TIER_HEALTH = (
    gauge(
        "kvtier_tier_breaker_open",
        TIER + "breaker_open",
        "1 while the circuit breaker leaves the tier out, its probes included; else 0.",
        "0 or 1",
    ),
    counter(
        "kvtier_tier_breaker_openings",
        TIER + "breaker_openings",
        "How often the circuit breaker has opened.",
        "times",
    ),
    gauge(
        "kvtier_tier_out_of_service",
        TIER + "out_of_service",
        "1 once a tier has failed in a way that only a restart of the engine mends; else 0.",
        "0 or 1",
    ),
    counter("kvtier_tier_errors", TIER + "errors", "Calls of the tier that raised.", "calls"),
    counter(
        "kvtier_tier_failed_blocks",
        TIER + f"{{cause:{FAILURE_CAUSES}}}",
        "Blocks that the tier was asked for and did not load: `absent` (evicted, expired or replaced meanwhile), "
        "`damaged` (wrong length, key, checksum or authentication), `foreign` (written by another format or model), "
        "`io_error`, `timeout`.",
        "blocks",
    ),
    counter("kvtier_tier_store_errors", TIER + "store_errors", "Blocks whose write failed.", "blocks"),
    counter(
        "kvtier_tier_declined_blocks",
        TIER + "declined",
        "Blocks that the tier did not take: no room on the disk or within its capacity.",
        "blocks",
    ),
    counter(
        "kvtier_tier_declined_cascade_blocks",
        TIER + "declined_cascades",
        "Blocks that left host memory before the tier got them: it was too slow, or left out.",
        "blocks",
    ),
    counter(
        "kvtier_tier_lost_blocks",
        TIER + "lost_blocks",
        "Blocks that the tier was to get and never will: those of the family before, and those that it failed to write "
        "or had no room for.",
        "blocks",
    ),
    counter(
        "kvtier_tier_expired_blocks",
        TIER + "expired_blocks",
        "Blocks dropped because their `ttl_s` was over.",
        "blocks",
    ),
    gauge(
        "kvtier_tier_tenant_blocks",
        TIER + "tenant_blocks.{tenant}",
        "Blocks that the tier knows of, by tenant, where `tenants` is set.",
        "blocks",
    ),
    gauge(
        "kvtier_tier_tenant_bytes",
        TIER + "tenant_bytes.{tenant}",
        "What those blocks take in the tier, headers included.",
        "bytes",
    ),
    counter(
        "kvtier_tier_unadmitted_blocks",
        TIER + "refused_by_admission",
        "Blocks that left host memory unwritten because the tier's `admission` refused them.",
        "blocks",
    ),
    counter(
        "kvtier_tier_failed_promotion_jobs",
        TIER + "failed_promotion_jobs",
        "Promotions of which not every block arrived.",
        "jobs",
        "vllm:kv_offload_tiering_promotion_job_failures",
    ),
    counter(
        "kvtier_tier_failed_cascade_jobs",
        TIER + "failed_cascade_jobs",
        "Stores to the tier of which not every block arrived.",
        "jobs",
        "vllm:kv_offload_tiering_cascade_job_failures",
    ),
    counter(
        "kvtier_tier_overdue_requests",
        TIER + "overdue_requests",
        "Requests that passed `lookup_deadline_s` waiting for this tier.",
        "requests",
    ),
    counter(
        "kvtier_tier_left_out_lookups",
        TIER + "lookups_left_out",
        "Lookups that were a miss because the tier is left out, or the block's last load failed.",
        "lookups",
    ),
    counter(
        "kvtier_tier_probe_blocks",
        TIER + "probe_blocks",
        'Blocks loaded to measure the tier (`load_if: "faster"`).',
        "blocks",
    ),
    counter(
        "kvtier_tier_unanswered_calls",
        TIER + "lookup_errors",
        "Calls that a Mooncake store did not answer.",
        "calls",
    ),
)

TIER_FAMILIES = TIER_TRAFFIC + TIER_CONTENT + TIER_HEALTH
"""What is known of a secondary tier."""
