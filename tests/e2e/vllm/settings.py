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
