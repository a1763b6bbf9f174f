"""The audit of a real embedded engine compares recurrent states, and finds wrong ones within a few hits."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.engines.transformers.recurrent_models import MAKERS
from transformers import PreTrainedModel

from kvtier.base import BlockIDsLoadStoreSpec, ReqContext, make_offload_key
from kvtier.connector.groups import GroupLayout
from kvtier.engines.transformers import KVTierEngine
from kvtier.engines.transformers.request import make_prompt_hasher

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]
Bytes = npt.NDArray[np.uint8]

BLOCK_TOKENS = 8
INTERVAL = 16
PROMPT_TOKENS = 75
END = (PROMPT_TOKENS - 1) // INTERVAL * INTERVAL
"""Tokens of a prompt's hit, at whose end its state is."""

NUM_PROMPTS = 3
MAX_HITS = 60
EVERY_FOURTH = {"cpu_bytes_to_use": "4MiB", "audit_ratio": 0.25, "audit_limit": 10**9, "audit_seed": 3}
KINDS = ("equal", "close", "wrong", "lost")
EVERY_HIT = {**EVERY_FOURTH, "audit_ratio": 1.0}
IDENTITY = {"model_name": "same", "model_revision": "same"}
SECONDS = 60.0

_MODELS: dict[tuple[str, int], PreTrainedModel] = {}


def model_of(name: str, seed: int = 0) -> PreTrainedModel:
    """Return a model, the same for the same name and seed."""
    if (name, seed) not in _MODELS:
        model = MAKERS[name]()
        if seed:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.std())
        _MODELS[name, seed] = model
    return _MODELS[name, seed]


def start(make_engine: MakeEngine, model: PreTrainedModel, **options: object) -> KVTierEngine:
    return make_engine(model, 60, **({"state_interval_tokens": INTERVAL} | IDENTITY | options))


def states_of(engine: KVTierEngine, tokens: list[int], end: int = END) -> Bytes:
    """Return what host memory holds of the states after so many tokens of a prompt; writing to it changes that."""
    driver: Any = engine._halves  # Any: reached through the engine's objects
    spec = driver.worker._spec
    rows = spec._handlers.rows.numpy().view(np.uint8)
    group_idx = len(spec.config.groups) - 1
    block_hash = make_prompt_hasher("", BLOCK_TOKENS, lambda _: "")(tokens)[end // BLOCK_TOKENS - 1]
    key, context = make_offload_key(block_hash, group_idx), ReqContext("test")
    held = driver.manager.prepare_load([key], context)
    driver.manager.complete_load([key], context)
    assert isinstance(held, BlockIDsLoadStoreSpec)
    row: Bytes = rows[int(held.block_ids[0]), : spec.config.groups[group_idx].page_size_bytes]
    return row


def parts_of(engine: KVTierEngine) -> list[slice]:
    """Return where in a page each state of each layer is."""
    driver: Any = engine._halves  # Any: as above
    ends = np.cumsum([part.size_bytes for part in driver.worker._spec.config.groups[-1].state_parts])
    return [slice(int(first), int(end)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def attention_of(engine: KVTierEngine) -> list[GroupLayout]:
    """Return the KV groups of keys and values."""
    driver: Any = engine._halves  # Any: as above
    return [layout for layout in driver.scheduler.layouts if not layout.is_state]


def of_another_prompt(engine: KVTierEngine, tokens: list[int], other: list[int]) -> None:
    states_of(engine, tokens)[:] = states_of(engine, other)


def of_an_earlier_end(engine: KVTierEngine, tokens: list[int], other: list[int]) -> None:
    del other
    states_of(engine, tokens)[:] = states_of(engine, tokens, END - INTERVAL)


def with_two_layers_swapped(engine: KVTierEngine, tokens: list[int], other: list[int]) -> None:
    del other
    row, parts = states_of(engine, tokens), parts_of(engine)
    last = max(part.stop - part.start for part in parts)
    one, two = [part for part in parts if part.stop - part.start == last][:2]
    row[one], row[two] = row[two].copy(), row[one].copy()


def with_a_high_bit_flipped(engine: KVTierEngine, tokens: list[int], other: list[int]) -> None:
    del other
    states_of(engine, tokens)[parts_of(engine)[0].start + 4 * 5 + 3] ^= 0x40


def with_a_part_of_another_prompt(engine: KVTierEngine, tokens: list[int], other: list[int]) -> None:
    part = parts_of(engine)[-1]
    states_of(engine, tokens)[part] = states_of(engine, other)[part]


def zeroed(engine: KVTierEngine, tokens: list[int], other: list[int]) -> None:
    del other
    states_of(engine, tokens)[:] = 0


FAULTS = [
    of_another_prompt,
    of_an_earlier_end,
    with_two_layers_swapped,
    with_a_high_bit_flipped,
    with_a_part_of_another_prompt,
    zeroed,
]


def num_hits_until_found(engine: KVTierEngine, prompts: list[list[int]]) -> int:
    """Ask for what is held until the audit finds a wrong block; return how many requests that took."""
    for num_hits in range(MAX_HITS):
        if engine.stats()["audit.wrong_blocks"]:
            return num_hits
        engine.drop_device_cache()
        engine.run(prompts[num_hits % len(prompts)], 1)
        assert engine.drain(SECONDS)
    raise AssertionError(f"not found within {MAX_HITS} hits")


def store(engine: KVTierEngine, prompts: list[list[int]]) -> None:
    for tokens in prompts:
        engine.run(tokens, 1)
    assert engine.drain(SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3_next", torch.float32), *((name, torch.bfloat16) for name in MAKERS if name != "jamba")],
)
def test_states_are_compared_and_those_of_other_chunks_are_never_wrong(
    make_engine: MakeEngine, prompt_of: PromptOf, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
    model = copy.deepcopy(model_of(name))
    torch.nn.Module.to(model, dtype)
    tier = {"type": "fs", "root_dir": str(tmp_path), "capacity_bytes": "64MiB"}
    settings = {**EVERY_HIT, "secondary_tiers": [tier], "lookup_deadline_s": SECONDS}
    compared: Counter[str] = Counter()
    for chunk_tokens in (32, 24, 16, 8):
        engine = start(
            make_engine,
            model,
            state_interval_tokens=32,
            prefill_chunk_tokens=chunk_tokens,
            extra_config=settings,
        )
        store(engine, prompts)
        engine.drop_device_cache()
        store(engine, prompts)
        compared.update({kind: int(engine.stats()[f"audit.{kind}_blocks"]) for kind in KINDS})
        num_blocks = sum(64 // layout.block_tokens for layout in attention_of(engine)) + 1
        engine.shutdown()

    assert compared["wrong"] == 0
    # Those of the second round, whose blocks are in host memory, are all compared.
    assert compared["equal"] + compared["close"] >= 4 * NUM_PROMPTS * num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("plant", FAULTS)
def test_a_wrong_state_is_found_within_a_few_hits(
    make_engine: MakeEngine, prompt_of: PromptOf, name: str, plant: Callable[..., None]
) -> None:
    prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
    engine = start(make_engine, model_of(name), extra_config=EVERY_FOURTH)
    store(engine, prompts)
    for tokens, other in zip(prompts, [*prompts[1:], prompts[0]], strict=True):
        plant(engine, tokens, other)

    assert num_hits_until_found(engine, prompts) < MAX_HITS


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1"])
def test_states_of_other_weights_are_found(make_engine: MakeEngine, prompt_of: PromptOf, name: str) -> None:
    prompts = [prompt_of(number, PROMPT_TOKENS) for number in range(NUM_PROMPTS)]
    other = start(make_engine, model_of(name, seed=1), extra_config=EVERY_FOURTH)
    engine = start(make_engine, model_of(name), extra_config=EVERY_FOURTH)
    for one in (other, engine):
        store(one, prompts)
    for tokens in prompts:
        states_of(engine, tokens)[:] = states_of(other, tokens)

    assert num_hits_until_found(engine, prompts) < MAX_HITS


def test_a_state_that_a_step_passes_over_is_counted_as_lost(
    make_engine: MakeEngine, prompt_of: PromptOf
) -> None:
    """Jamba computes a prompt from its first token in one pass, and keeps its last state alone."""
    tokens = prompt_of(0, PROMPT_TOKENS)
    engine = start(make_engine, model_of("jamba"), extra_config=EVERY_HIT)
    store(engine, [tokens])
    engine.drop_device_cache()
    store(engine, [tokens + prompt_of(1, INTERVAL)])
    stats = engine.stats()

    assert stats["audit.lost_blocks"] == 1
    assert stats["audit.equal_blocks"] + stats["audit.close_blocks"] == END // BLOCK_TOKENS
