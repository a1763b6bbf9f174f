"""Each planted fault is found by the audit of a real embedded engine that looks at one hit in fifty."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.engines.transformers.conftest import Tiny
from tests.planted_faults import FAULTS, Bytes, FaultyModels, Layout, plant

from kvtier.base import BlockIDsLoadStoreSpec, ReqContext, make_offload_key
from kvtier.engines.transformers import KVTierEngine
from kvtier.engines.transformers.request import make_prompt_hasher

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]

MAX_HITS = 1000
AUDIT_RATIO = 1 / 50
BLOCK_TOKENS = 8
PROMPT_TOKENS = 35
NUM_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
NUM_PROMPTS = 4

SIZES = {"l": 3, "k": 2, "t": BLOCK_TOKENS, "h": 2, "d": 12}
"""Of the tiny Llama."""

LAYOUT = Layout("lkthd", SIZES)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tiny: Tiny) -> FaultyModels:
    return FaultyModels(tiny.llama())


def held_rows(engine: KVTierEngine, tokens: list[int]) -> list[Bytes]:
    """Return what host memory holds of each block of a prompt."""
    driver: Any = engine._halves  # Any: reached through the engine's objects
    rows = driver.worker._spec._handlers.rows.numpy().view(np.uint8)
    hashes = make_prompt_hasher("", BLOCK_TOKENS, lambda _: "")(tokens)
    keys, context = [make_offload_key(one, 0) for one in hashes], ReqContext("test")
    held = driver.manager.prepare_load(keys, context)
    driver.manager.complete_load(keys, context)
    assert isinstance(held, BlockIDsLoadStoreSpec)
    return [rows[slot] for slot in held.block_ids]


def start(make_engine: MakeEngine, models: FaultyModels, seed: int) -> KVTierEngine:
    settings = {"cpu_bytes_to_use": "2MiB", "audit_ratio": AUDIT_RATIO, "audit_seed": seed}
    return make_engine(models.model, extra_config=settings)


def test_there_are_at_least_forty_faults() -> None:
    assert len(set(FAULTS)) == len(FAULTS) >= 40


def test_the_layout_is_that_of_the_engine(
    make_engine: MakeEngine, models: FaultyModels, prompt_of: PromptOf
) -> None:
    engine, tokens = start(make_engine, models, seed=0), prompt_of(0, PROMPT_TOKENS)
    engine.run(tokens, 2)
    assert engine.drain(60.0)
    right = models.compute("nothing", tokens)
    for block, row in enumerate(held_rows(engine, tokens)):
        span = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        np.testing.assert_allclose(LAYOUT.decode(row), right[:, :, :, span], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_within_a_thousand_hits(
    make_engine: MakeEngine, models: FaultyModels, prompt_of: PromptOf, name: str
) -> None:
    engine = start(make_engine, models, seed=FAULTS.index(name))
    prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
    for tokens in prompts:
        engine.run(tokens, 1)
    assert engine.drain(60.0)
    for tokens in prompts:
        for block, row in enumerate(held_rows(engine, tokens)):
            plant(name, models, LAYOUT, tokens, block, row)

    num_hits = 0
    while not engine.stats()["audit.wrong_blocks"] and num_hits < MAX_HITS:
        engine.drop_device_cache()
        result = engine.run(prompts[num_hits % NUM_PROMPTS], 1)
        engine.drain(60.0)
        num_hits += 1
        assert result.num_cached_tokens == NUM_BLOCKS * BLOCK_TOKENS or engine.stats()["audit.requests"] == 1

    assert engine.stats()["audit.wrong_blocks"] > 0
