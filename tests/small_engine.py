"""A small engine with every tier that needs no server, and prompts that reach each of them: for tests and documents."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engines.transformers import EngineConfig, KVTierEngine

BLOCK_TOKENS = 8
ROW_BYTES = 4096
"""One block of the model, rounded up to whole pages."""

WAIT_S = 60.0
"""Guard against a hang."""


def settings_for(folder: Path, **more: object) -> dict[str, Any]:  # Any: a user's JSON
    """Return settings with two directories and the example tier behind eight blocks of host memory."""
    return {
        "cpu_bytes_to_use": 8 * ROW_BYTES,
        "lookup_deadline_s": WAIT_S,
        "record_trace": str(folder / "trace"),
        "secondary_tiers": [
            {"type": "fs", "root_dir": str(folder / "small"), "capacity_bytes": "1MiB"},
            {"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "64MiB"},
            {"type": "example"},
        ],
        **more,
    }


@contextmanager
def running_engine(folder: Path, **more: object) -> Iterator[KVTierEngine]:
    """Yield an engine of one layer and end it."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    config = EngineConfig(
        num_device_blocks=16, block_size_tokens=BLOCK_TOKENS, extra_config=settings_for(folder, **more)
    )
    with KVTierEngine(LlamaForCausalLM(shape), config) as engine:
        yield engine


def prompt_of(seed: int, num_blocks: int = 4) -> list[int]:
    """Return a prompt of whole blocks and one token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (num_blocks * BLOCK_TOKENS + 1,), generator=generator).tolist()


def serve_some(engine: KVTierEngine, num_prompts: int = 6) -> None:
    """Compute more than host memory holds, and let the first prompt come back from below it."""
    for seed in range(num_prompts):
        engine.run(prompt_of(seed), 1)
        assert engine.drain(WAIT_S).has_ended
    engine.drop_device_cache()
    engine.run(prompt_of(0), 1)
