"""Prompts that fill a directory: what does not get there is known, and with must_write everything does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engines.transformers.conftest import MakeEngine
from tests.tiering.fs.slots import stored_blocks
from transformers import LlamaForCausalLM

from kvtier.engines.transformers import KVTierEngine
from kvtier.errors import TierError
from kvtier.misses import MissCause
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.example import ExampleSecondaryTier

PromptOf = Callable[[int, int], list[int]]

WAIT_S = 60.0
ROW_BYTES = 8192
"""One block of the tiny Llama."""

NUM_PROMPTS = 6
PROMPT_TOKENS = 200
BLOCKS_OF_PROMPT = 25
NUM_BLOCKS = NUM_PROMPTS * BLOCKS_OF_PROMPT


class FailingTier(ExampleSecondaryTier):
    """Takes no store."""

    def submit_store(self, job: JobMetadata) -> None:
        raise TierError("failing", "takes no store")


class Filled:
    """An engine that has computed six prompts, with host memory for a part of them."""

    def __init__(
        self,
        make_engine: MakeEngine,
        llama: LlamaForCausalLM,
        prompt_of: PromptOf,
        folder: Path,
        num_rows: int,
        num_new_tokens: int = 2,
        **tier: object,
    ) -> None:
        self.folder = folder
        entry: dict[str, Any] = {"type": "fs"} | tier
        if entry["type"] == "fs":
            entry |= {"root_dir": str(folder), "capacity_bytes": "256MiB"}
        settings = {"cpu_bytes_to_use": num_rows * ROW_BYTES, "secondary_tiers": [entry]}
        self.engine: KVTierEngine = make_engine(llama, num_device_blocks=40, extra_config=settings)
        self.prompts = [prompt_of(seed, PROMPT_TOKENS + 4) for seed in range(NUM_PROMPTS)]
        for prompt in self.prompts:
            self.engine.run(prompt, num_new_tokens)

    @property
    def num_on_disk(self) -> int:
        """Blocks in the directory."""
        return len(stored_blocks(self.folder))


def loss_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.name == "kvtier.tiering.departures"]


@pytest.mark.parametrize("num_rows", [12, 200])
@pytest.mark.parametrize("cascade", ["on_store", "on_evict"])
def test_a_drain_says_exactly_how_many_blocks_the_directory_lacks(
    llama: LlamaForCausalLM,
    prompt_of: PromptOf,
    make_engine: MakeEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    num_rows: int,
    cascade: str,
) -> None:
    filled = Filled(make_engine, llama, prompt_of, tmp_path, num_rows, cascade=cascade)
    drained = filled.engine.drain(WAIT_S)
    assert drained.has_ended
    num_kept = filled.engine.stats()["tier.0.fs.pending_blocks"] if cascade == "on_evict" else 0
    assert filled.num_on_disk + drained.num_lost_blocks + num_kept == NUM_BLOCKS
    assert bool(drained) is (drained.num_lost_blocks == 0)
    assert filled.engine.drain(WAIT_S)
    filled.engine.shutdown()
    said = [int(line.split()[0]) for line in loss_lines(caplog)]
    assert sum(said) == drained.num_lost_blocks


def test_what_was_lost_is_why_a_prompt_is_computed_again(
    llama: LlamaForCausalLM,
    prompt_of: PromptOf,
    make_engine: MakeEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # One block of a file of its own in flight, and prompts far larger than host memory.
    filled = Filled(make_engine, llama, prompt_of, tmp_path, 30, max_in_flight_store_bytes=ROW_BYTES)
    engine = filled.engine
    num_lost = engine.drain(WAIT_S).num_lost_blocks
    engine.drop_device_cache()
    causes: set[MissCause] = set()
    for prompt in filled.prompts[:-2]:
        engine.run(prompt, 1)
        assert engine._halves is not None
        record = engine._halves.scheduler.records.latest[-1]
        causes |= {run.miss.cause for run in record.missed}
    assert MissCause.NEVER_SEEN not in causes
    if num_lost:
        assert MissCause.NOT_STORED in causes
        assert loss_lines(caplog)


@pytest.mark.parametrize(("num_rows", "num_new_tokens"), [(4, 1), (12, 4), (32, 1)])
def test_with_must_write_every_block_is_in_the_directory_after_one_drain(
    llama: LlamaForCausalLM,
    prompt_of: PromptOf,
    make_engine: MakeEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    num_rows: int,
    num_new_tokens: int,
) -> None:
    filled = Filled(make_engine, llama, prompt_of, tmp_path, num_rows, num_new_tokens, cascade="must_write")
    assert filled.engine.drain(WAIT_S)
    assert filled.num_on_disk == NUM_BLOCKS
    filled.engine.shutdown()
    assert loss_lines(caplog) == []

    settings = dict(filled.engine.config.extra_config or {}) | {"cpu_bytes_to_use": 256 * ROW_BYTES}
    after = make_engine(llama, num_device_blocks=40, extra_config=settings)
    for prompt in filled.prompts:
        assert after.run(prompt, 1).sources["fs"] == PROMPT_TOKENS


@pytest.mark.parametrize("num_rows", [2, 4, 30])
def test_room_that_came_while_a_step_ended_is_used_by_the_next(
    llama: LlamaForCausalLM,
    prompt_of: PromptOf,
    make_engine: MakeEngine,
    tmp_path: Path,
    num_rows: int,
) -> None:
    # The tier has its blocks as soon as it is given them, so no step ever finds one under way.
    filled = Filled(make_engine, llama, prompt_of, tmp_path, num_rows, cascade="must_write", type="example")
    assert filled.engine.drain(WAIT_S)
    assert filled.engine.stats()["tier.0.example.blocks"] == NUM_BLOCKS


def test_a_tier_that_fails_ends_no_request_and_its_blocks_are_lost_and_said(
    llama: LlamaForCausalLM,
    prompt_of: PromptOf,
    make_engine: MakeEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = f"{FailingTier.__module__}:FailingTier"
    filled = Filled(make_engine, llama, prompt_of, tmp_path, 12, cascade="must_write", type=failing)
    drained = filled.engine.drain(WAIT_S)
    assert not drained
    assert drained.num_lost_blocks + drained.num_pending_blocks == NUM_BLOCKS
    filled.engine.shutdown()
    assert sum(int(line.split()[0]) for line in loss_lines(caplog)) == NUM_BLOCKS
