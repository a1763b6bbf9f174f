"""The embedded engine audits: blocks of other weights under its own keys are found, its own never are."""

import logging
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
import torch
from tests.engines.transformers.conftest import Tiny
from tests.tiering.fs.slots import stored_blocks
from transformers import LlamaForCausalLM

from kvtier.engines.transformers import KVTierEngine
from kvtier.observe.audit import read_saved
from kvtier.testing.clock import ManualClock
from kvtier.tiering.fs.documents import PAGE_NAME

MakeEngine = Callable[..., KVTierEngine]
PromptOf = Callable[[int, int], list[int]]
NUM_BLOCKS = 9
BLOCK_TOKENS = 8
LENGTHS = (75, 35, 51, 67)
"""Of prompts; each is computed sometimes and loaded sometimes."""

IDENTITY = {"model_name": "same", "model_revision": "same"}
"""A name that an operator gave to two models: the fault that no namespace can see."""


def settings_of(folder: Path, **more: object) -> dict[str, object]:
    tiers = [{"type": "fs", "root_dir": str(folder), "capacity_bytes": "64MiB"}]
    return {
        "cpu_bytes_to_use": "2MiB",
        "audit_ratio": 1.0,
        "lookup_deadline_s": 60.0,
        "secondary_tiers": tiers,
        **more,
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_prompt_in_other_chunks_is_never_wrong(
    tiny: Tiny, make_engine: MakeEngine, prompt_of: PromptOf, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = tiny.llama()
    torch.nn.Module.to(model, dtype)
    num_compared = 0.0
    for chunk_tokens in (64, 24, 16, 8):
        engine = make_engine(model, prefill_chunk_tokens=chunk_tokens, extra_config=settings_of(tmp_path))
        for seed in range(4):
            engine.run(prompt_of(seed, 75), 8)
        assert engine.drain(60.0)
        stats = engine.stats()
        assert stats["audit.wrong_blocks"] == 0
        num_compared += stats["audit.equal_blocks"] + stats["audit.close_blocks"]
        engine.shutdown()

    assert (
        num_compared > 2 * 4 * NUM_BLOCKS
    )  # where a request ended before the disk delivered, it was not compared


def test_blocks_of_other_weights_under_the_same_name_are_found_and_deleted(
    tiny: Tiny, make_engine: MakeEngine, prompt: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = make_engine(tiny.llama(0), extra_config=settings_of(tmp_path), **IDENTITY)
    before.run(prompt, 2)
    assert before.drain(60.0)
    before.shutdown()
    wrong = {block.read() for block in stored_blocks(tmp_path)}
    assert len(wrong) == NUM_BLOCKS
    (page,) = tmp_path.rglob(PAGE_NAME)
    page.unlink()  # with it the second engine would not use the tier
    settings = settings_of(tmp_path, audit_limit=100)
    after = make_engine(tiny.llama(1), extra_config=settings, **IDENTITY)
    after.run(prompt[::-1], 2)
    assert after.drain(60.0)  # its own page is there

    with caplog.at_level(logging.ERROR):
        after.run(prompt, 24)
        assert after.drain(60.0)

    assert after.stats()["audit.wrong_blocks"] == NUM_BLOCKS
    assert "is held with other bytes" in caplog.text
    assert after.drain(60.0)
    assert wrong.isdisjoint(block.read() for block in stored_blocks(tmp_path))


@pytest.mark.slow
def test_the_interval_covers_what_loading_saves(
    llama: LlamaForCausalLM, make_engine: MakeEngine, prompt_of: PromptOf
) -> None:
    """On a clock that each reading advances, a prompt that is computed takes more readings than one that is loaded."""
    clock = ManualClock()

    def read() -> float:
        clock.advance(1.0)
        return clock()

    engine = make_engine(
        llama,
        clock=read,
        prefill_chunk_tokens=8,
        extra_config={"cpu_bytes_to_use": "2MiB", "audit_ratio": 0.3, "audit_seed": 4},
    )
    times: dict[tuple[int, bool], list[float]] = {}
    for number in range(84):
        engine.drop_device_cache()
        which = number % len(LENGTHS)
        result = engine.run(prompt_of(which, LENGTHS[which]), 2)
        if number >= len(LENGTHS):
            times.setdefault((which, result.num_cached_tokens > 0), []).append(result.time_to_first_token_s)
    saved_s = [
        (fmean(times[which, False]) - fmean(times[which, True])) / (length // BLOCK_TOKENS * BLOCK_TOKENS)
        for which, length in enumerate(LENGTHS)
    ]

    (found,) = read_saved(engine.stats())

    assert found.num_loaded + found.num_computed == 80
    assert found.low_s < fmean(saved_s) < found.high_s
    assert found.low_s > 0
