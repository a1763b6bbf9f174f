"""Behind the host there are tiers: they serve a new process, and their damage costs hits, never tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiering.fs.slots import stored_blocks
from transformers import LlamaForCausalLM, PreTrainedModel

from kvtier.engines.transformers import KVTierEngine

WAIT_S = 30.0
TOLERANCE = 1e-4
NUM_NEW_TOKENS = 6
ROW_BYTES = 8192
"""One block of the tiny Llama, rounded up to whole pages as rows are when there is a secondary tier."""

MakeEngine = Callable[..., KVTierEngine]
Plain = Callable[[PreTrainedModel, list[int], int], tuple[list[int], torch.Tensor]]
Settings = dict[str, Any]  # Any: what a user writes as JSON


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    tier = {"type": "fs", "root_dir": str(tmp_path / "fs"), "capacity_bytes": "64MiB"}
    return {"cpu_bytes_to_use": 256 * ROW_BYTES, "secondary_tiers": [tier]}


def fill(engine: KVTierEngine, prompt: list[int]) -> None:
    """Answer one token, wait for the tiers, and end the engine."""
    engine.run(prompt, 1)
    assert engine.drain(WAIT_S)
    engine.shutdown()


def test_a_new_engine_finds_what_an_ended_one_has_left_on_disk(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, settings: Settings
) -> None:
    tokens, logits = plain(llama, prompt, NUM_NEW_TOKENS)
    fill(make_engine(llama, extra_config=settings), prompt)
    engine = make_engine(llama, extra_config=settings)
    result = engine.run(prompt, NUM_NEW_TOKENS, return_logits=True)
    assert result.sources == {"fs": 72, "computed": 3}
    assert result.tokens == tokens
    assert result.logits is not None
    assert float((result.logits - logits).abs().max()) < TOLERANCE
    engine.drop_device_cache()
    assert engine.run(prompt, 1).sources == {"host": 72, "computed": 3}


def test_a_prefix_comes_from_host_memory_as_far_as_it_is_there_and_then_from_the_disk(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, settings: Settings
) -> None:
    tokens, _ = plain(llama, prompt, NUM_NEW_TOKENS)
    fill(make_engine(llama, extra_config=settings), prompt)
    engine = make_engine(llama, extra_config=settings)
    assert engine.run(prompt[:41], 1).sources == {"fs": 40, "computed": 1}
    engine.drop_device_cache()
    result = engine.run(prompt, NUM_NEW_TOKENS)
    assert result.sources == {"host": 40, "fs": 32, "computed": 3}
    assert result.tokens == tokens


def test_a_damaged_file_ends_the_prefix_and_the_tokens_are_right(
    llama: LlamaForCausalLM,
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    settings: Settings,
    tmp_path: Path,
) -> None:
    tokens, _ = plain(llama, prompt, NUM_NEW_TOKENS)
    fill(make_engine(llama, extra_config=settings), prompt)
    blocks = stored_blocks(tmp_path / "fs")
    assert len(blocks) == 9
    blocks[0].flip()
    result = make_engine(llama, extra_config=settings).run(prompt, NUM_NEW_TOKENS)
    assert result.sources.get("fs", 0) < 72
    assert result.tokens == tokens


def test_other_weights_find_nothing(
    llama: LlamaForCausalLM,
    tiny: Any,  # noqa: ANN401 - the builders of conftest.py
    prompt: list[int],
    plain: Plain,
    make_engine: MakeEngine,
    settings: Settings,
) -> None:
    fill(make_engine(llama, extra_config=settings), prompt)
    other = tiny.llama(seed=1)
    tokens, _ = plain(other, prompt, NUM_NEW_TOKENS)
    result = make_engine(other, extra_config=settings).run(prompt, NUM_NEW_TOKENS)
    assert result.sources == {"computed": 75}
    assert result.tokens == tokens


def test_a_prompt_larger_than_host_memory_is_answered_with_the_hits_that_fit(
    llama: LlamaForCausalLM, prompt: list[int], plain: Plain, make_engine: MakeEngine, settings: Settings
) -> None:
    tokens, _ = plain(llama, prompt, NUM_NEW_TOKENS)
    fill(make_engine(llama, extra_config=settings), prompt)
    small = settings | {"cpu_bytes_to_use": 8 * ROW_BYTES}
    result = make_engine(llama, extra_config=small).run(prompt, NUM_NEW_TOKENS)
    assert result.sources == {"fs": 64, "computed": 11}
    assert result.tokens == tokens
