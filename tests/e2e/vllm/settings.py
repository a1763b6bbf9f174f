"""Settings of kvtier and arguments of vLLM that tests share."""

from pathlib import Path
from typing import Any

FAULTY = {
    "cpu_bytes_to_use": "128MiB",
    "secondary_tiers": [],
    "spec_name": "FaultySpec",
    "spec_module_path": "tests.e2e.vllm.faulty_spec",
}
"""Host memory whose copies fail as ``CopyFaults`` says."""

NUM_DRAFT_TOKENS = 3

NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": NUM_DRAFT_TOKENS,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
}
"""Drafts from the prompt's own tokens: no model, and nearly all are rejected by one of random weights."""


def settings_with(folder: Path, tier_type: str = "fs", **more: Any) -> dict[str, Any]:  # Any: a user's JSON
    """Return settings with a host tier that holds all prompts and a tier in ``folder`` behind it."""
    tier = {
        "type": tier_type,
        "root_dir": str(folder),
        "capacity_bytes": "1GiB",
        "max_in_flight_store_bytes": "128MiB",
    }
    return {"cpu_bytes_to_use": "128MiB", "secondary_tiers": [tier], **more}


STOCK_SPEC = {"spec_name": "CPUHostTieringSpec", "spec_module_path": "tests.e2e.vllm.stock_cpu_spec"}
"""vLLM's own offloading with a worker for CPUs."""


def make_transfers(
    settings: dict[str, Any] | None, *, is_stock: bool
) -> dict[str, Any] | None:  # Any: as above
    """Return ``kv_transfer_config`` for kvtier's connector or for vLLM's own; None without settings."""
    if settings is None:
        return None
    if is_stock:
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": STOCK_SPEC | settings,
        }
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.engines.vllm",
        "kv_role": "kv_both",
        # An audited hit is computed, and most tests count what is loaded.
        "kv_connector_extra_config": {"audit_ratio": 0} | settings,
    }
