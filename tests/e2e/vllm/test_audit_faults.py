"""Each planted fault is found by the audit of a real vLLM engine that looks at one hit in fifty, in batches."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import numpy as np
from tests.e2e.vllm.engine_host import BLOCK_TOKENS, EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import make_prompt
from tests.planted_faults import FAULTS, FaultyModels, Layout, plant
from transformers import LlamaForCausalLM

MAX_HITS = 1000
SETTINGS = {"cpu_bytes_to_use": "64MiB", "audit_ratio": 1 / 50, "audit_limit": 10**9}

NUM_BLOCKS = 3
PROMPTS = [make_prompt(number, NUM_BLOCKS * BLOCK_TOKENS + 4) for number in range(4)]
TOKENS = range(0, NUM_BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS)
"""The first token of each block."""

ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1}

LAYOUT = Layout("lhktd", {"l": 4, "k": 2, "t": BLOCK_TOKENS, "h": 2, "d": 64}, has_transposed_keys=True)


@pytest.fixture(scope="module")
def models(llama: str) -> FaultyModels:
    return FaultyModels(LlamaForCausalLM.from_pretrained(llama))


@pytest.fixture(scope="module")
def engine(llama: str) -> Iterator[EngineProcess]:
    with EngineProcess(EngineOptions(llama, SETTINGS)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def stored(engine: EngineProcess) -> None:
    """Forget what the last fault has left, and store the prompts."""
    assert engine.call("reset")
    engine.call("generate", PROMPTS, ONE_TOKEN)
    engine.call("settle")


def test_the_layout_is_that_of_the_engine(engine: EngineProcess, models: FaultyModels) -> None:
    right = models.compute("nothing", PROMPTS[0])
    for token in TOKENS:
        row = np.frombuffer(engine.call("held_bytes", PROMPTS[0], token), np.uint8)
        span = slice(token, token + BLOCK_TOKENS)
        np.testing.assert_allclose(LAYOUT.decode(row), right[:, :, :, span], rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(LAYOUT.encode(LAYOUT.decode(row)), row)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_within_a_thousand_hits(
    engine: EngineProcess, models: FaultyModels, name: str
) -> None:
    for prompt in PROMPTS:
        for block, token in enumerate(TOKENS):
            row = np.frombuffer(engine.call("held_bytes", prompt, token), np.uint8).copy()
            plant(name, models, LAYOUT, prompt, block, row)
            engine.call("plant_bytes", prompt, token, row.tobytes())
    before = engine.call("stats")["audit.wrong_blocks"]

    num_hits = 0
    while num_hits < MAX_HITS and engine.call("stats")["audit.wrong_blocks"] == before:
        engine.call("forget_device")
        engine.call("generate", PROMPTS, ONE_TOKEN)
        engine.call("settle")
        num_hits += len(PROMPTS)

    assert engine.call("stats")["audit.wrong_blocks"] > before
