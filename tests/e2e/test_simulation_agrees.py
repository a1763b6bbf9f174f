"""The simulator finds, request by request and block for block, what a real engine found that served the same trace.

The engine is the embedded one with a real model, real host memory and real files; its own recorder writes the trace. It
serves one request at a time and rests before the next, so that how long a transfer takes decides nothing. Each
answer is one token, whose keys and values are never computed: a trace does not name the blocks of answers.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiering.fs.engine import bytes_of_packs
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.sim.formats.registry import read_trace
from kvtier.sim.link import LinkSpeed
from kvtier.sim.model import EngineModel, HostModel
from kvtier.sim.simulate import simulate
from kvtier.sim.tier import TierModel
from kvtier.sim.trace import Trace
from kvtier.testing.clock import ManualClock

BLOCK_TOKENS = 8
VOCABULARY = 97
NUM_CHATS = 4
NUM_REQUESTS = 80
PAUSE_S = 60.0
DRAIN_S = 60.0

SLOT_BYTES = 4096
"""One row of host memory with tiers: a block of this model has 1,536 bytes."""

SPEED = LinkSpeed(1e9, 1e9)

Hits = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Capacities in blocks.

    Attributes:
        device: of the device pool.
        host: of host memory.
        tier: of the tier behind it; None means more than the trace has.
    """

    device: int
    host: int
    tier: int | None = None


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    """A tiny model of random weights, computed by one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {  # Any: transformers' own
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    }
    yield LlamaForCausalLM(LlamaConfig(**sizes))
    torch.set_num_threads(before)


def make_prompts(seed: int) -> list[list[int]]:
    """Return the turns of chats with one system prompt, in a random order.

    A third ends with a block, some are asked twice, and a chat that has grown too long begins anew.
    """
    chance = random.Random(seed)

    def words(num_tokens: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(num_tokens)]

    system = words(2 * BLOCK_TOKENS)
    chats = [system + words(chance.randint(1, 3 * BLOCK_TOKENS)) for _ in range(NUM_CHATS)]
    prompts: list[list[int]] = []
    while len(prompts) < NUM_REQUESTS:
        number = chance.randrange(NUM_CHATS)
        if len(chats[number]) > 8 * BLOCK_TOKENS:
            chats[number] = list(system)
        num_to_full = BLOCK_TOKENS - len(chats[number]) % BLOCK_TOKENS
        chats[number] += words(chance.choice([num_to_full, chance.randint(1, 20), chance.randint(1, 20)]))
        prompts.append(list(chats[number]))
        if chance.random() < 0.2:
            prompts.append(list(chance.choice(prompts)))
    return prompts[:NUM_REQUESTS]


def serve(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    sizes: Sizes,
    trace: Path,
    tiers: Sequence[Mapping[str, Any]],  # Any: a user's JSON
) -> list[Hits]:
    """Let the real engine serve the prompts and record them; return where each one's tokens came from."""
    clock = ManualClock()
    extra = {
        "cpu_bytes_to_use": sizes.host * SLOT_BYTES,
        "secondary_tiers": list(tiers),
        "record_trace": str(trace),
    }
    config = EngineConfig(sizes.device, BLOCK_TOKENS, extra_config=extra)
    sources: list[Hits] = []
    with KVTierEngine(model, config, clock=clock) as engine:
        assert engine.stats()["primary.capacity_blocks"] == sizes.host
        for prompt in prompts:
            sources.append(engine.run(prompt, max_new_tokens=1).sources)
            assert engine.drain(DRAIN_S)
            clock.advance(PAUSE_S)
    return sources


def predict(trace: Trace, sizes: Sizes, tier: str) -> list[Hits]:
    """Let the simulator serve the trace; return where it says that each request's tokens came from."""
    engine = EngineModel(BLOCK_TOKENS, SLOT_BYTES, sizes.device, is_last_block_computed=False)
    behind = TierModel(tier, sizes.tier or 10**6, SPEED)
    found = simulate(trace, engine, HostModel(sizes.host, speed=SPEED, tiers=(behind,)), period_s=PAUSE_S)
    return [period.hit_tokens for period in found.periods]


def compare(real: Sequence[Hits], predicted: Sequence[Hits], tier: str) -> list[tuple[int, Hits, Hits]]:
    """Return the requests whose tokens came from elsewhere, each with what was found and what was predicted."""
    names = {"device": "device", "host": "host", tier: tier}
    differences: list[tuple[int, Hits, Hits]] = []
    for number, (found, told) in enumerate(zip(real, predicted, strict=True)):
        expected = {name: told.get(simulated, 0) for name, simulated in names.items()}
        actual = {name: found.get(name, 0) for name in names}
        if actual != expected:
            differences.append((number, actual, expected))
    return differences


def assert_agree(
    model: LlamaForCausalLM,
    seed: int,
    sizes: Sizes,
    trace: Path,
    tier: Mapping[str, Any],  # Any: a user's JSON
) -> None:
    prompts = make_prompts(seed)
    real = serve(model, prompts, sizes, trace, [tier])
    recorded = read_trace(trace)

    differences = compare(real, predict(recorded, sizes, tier["type"]), tier["type"])

    assert [one.num_prompt_tokens for one in recorded.requests] == [len(prompt) for prompt in prompts]
    assert [one.arrival_s for one in recorded.requests] == [PAUSE_S * n for n in range(NUM_REQUESTS)]
    assert differences == []
    # A host that is smaller than the device holds nothing that the device has lost; it is there for what it evicts.
    names = ("device", "host", tier["type"]) if sizes.host >= sizes.device else ("device", tier["type"])
    totals = {name: sum(found.get(name, 0) for found in real) for name in names}
    assert min(totals.values()) >= 2 * BLOCK_TOKENS, totals


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [Sizes(12, 12), Sizes(12, 16), Sizes(16, 18)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_hits_of_device_host_and_files_are_those_of_the_real_engine(
    model: LlamaForCausalLM, tmp_path: Path, seed: int, sizes: Sizes
) -> None:
    tier = {"type": "fs", "root_dir": str(tmp_path / "blocks"), "capacity_bytes": "64MiB"}

    assert_agree(model, seed, sizes, tmp_path / "trace.jsonl", tier)


@pytest.mark.parametrize("sizes", [Sizes(12, 12, 23), Sizes(16, 12, 23), Sizes(16, 20, 31)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_hits_are_those_of_the_real_engine_when_the_tier_evicts_too(
    model: LlamaForCausalLM, tmp_path: Path, seed: int, sizes: Sizes
) -> None:
    assert sizes.tier is not None
    # One pack, whose slots are all that the policy has.
    capacity_bytes = bytes_of_packs(1, sizes.tier, SLOT_BYTES)
    tier = {
        "type": "fs",
        "root_dir": str(tmp_path / "blocks"),
        "capacity_bytes": capacity_bytes,
        "pack_bytes": capacity_bytes,
        "policy": "lru",
    }

    assert_agree(model, seed, sizes, tmp_path / "trace.jsonl", tier)


def test_the_comparison_notices_a_single_block() -> None:
    real = [{"device": 16, "host": 8, "computed": 3}, {"fs": 8, "computed": 2}]
    same = [{"device": 16, "host": 8}, {"device": 0, "fs": 8}]
    other = [{"device": 16, "host": 8}, {"device": 0, "host": 8}]

    assert compare(real, same, "fs") == []
    assert [number for number, _, _ in compare(real, other, "fs")] == [1]
