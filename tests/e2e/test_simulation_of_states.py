"""The simulator finds as much of each prompt as the embedded engine did that served the same trace with states.

Which place a prefix is found in depends on when each engine frees the pages of states, so their sum is compared.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.test_simulation_agrees import BLOCK_TOKENS, DRAIN_S, PAUSE_S, SPEED, make_prompts
from tests.engines.transformers.tiny_models import build_tiny_model

from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.model import EngineModel, HostModel, KeptStates
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel
from kvtier.testing.clock import ManualClock

INTERVAL_TOKENS = 2 * BLOCK_TOKENS
PAGE_BYTES = 12_288
"""A row of host memory with tiers: a state of this model has 11,520 bytes."""

NUM_PROMPTS = 24


@pytest.mark.parametrize(("num_device_blocks", "num_host_blocks"), [(400, 400), (18, 400), (18, 24)])
def test_the_prefix_that_is_found_is_that_of_the_real_engine(
    tmp_path: Path, num_device_blocks: int, num_host_blocks: int
) -> None:
    trace = tmp_path / "trace.jsonl"
    found = serve(trace, tmp_path / "blocks", num_device_blocks, num_host_blocks)

    engine = EngineModel(
        BLOCK_TOKENS,
        PAGE_BYTES,
        # It reserves pages that the embedded engine takes one by one.
        num_device_blocks + 20,
        states=KeptStates(INTERVAL_TOKENS, keeps_last=False),
    )
    tier = TierModel("fs", 10**6, SPEED)
    predicted = simulate(
        read_trace(trace), engine, HostModel(num_host_blocks, speed=SPEED, tiers=(tier,)), period_s=PAUSE_S
    )

    assert [sum(period.hit_tokens.values()) for period in predicted.periods] == found
    assert sum(found) > 10 * INTERVAL_TOKENS


def serve(trace: Path, folder: Path, num_device_blocks: int, num_host_blocks: int) -> list[int]:
    """Let the embedded engine serve prompts and record them; return how many tokens of each it has found."""
    clock = ManualClock()
    extra: dict[str, Any] = {  # Any: a user's JSON
        "cpu_bytes_to_use": num_host_blocks * PAGE_BYTES,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder), "capacity_bytes": "64MiB"}],
        "record_trace": str(trace),
    }
    config = EngineConfig(
        num_device_blocks, BLOCK_TOKENS, extra_config=extra, state_interval_tokens=INTERVAL_TOKENS
    )
    found: list[int] = []
    torch.set_num_threads(1)
    with KVTierEngine(build_tiny_model("qwen3_next"), config, clock=clock) as engine:
        assert engine.stats()["primary.capacity_blocks"] == num_host_blocks
        for prompt in make_prompts(seed=0)[:NUM_PROMPTS]:
            sources = dict(engine.run(prompt, max_new_tokens=1).sources)
            sources.pop("computed", None)
            found.append(sum(sources.values()))
            assert engine.drain(DRAIN_S)
            clock.advance(PAUSE_S)
    return found
