"""Engines that differ in what cannot change a block share blocks and answer alike; others find nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from safetensors.torch import load_file
from tests.e2e.vllm.answers import Answer, assert_clearly_other, assert_same
from tests.e2e.vllm.checkpoints import save_llama
from tests.e2e.vllm.conftest import CONTROL_POOL_BLOCKS
from tests.e2e.vllm.engine_host import EngineOptions
from tests.e2e.vllm.engine_process import EngineProcess
from tests.e2e.vllm.prompts import GREEDY, WHOLE_TOKENS, make_cycle

PROMPTS = make_cycle(3)


def tier_in(folder: Path) -> dict[str, Any]:  # Any: a user's JSON
    """Return kvtier's settings with a tier in ``folder``."""
    tier = {"type": "fs", "root_dir": str(folder), "capacity_bytes": "1GiB"}
    return {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}


def answer(options: EngineOptions) -> list[Answer]:
    """Answer the prompts in an engine of its own, and keep their blocks."""
    with EngineProcess(options) as engine:
        answers: list[Answer] = engine.call("generate_in_turn", PROMPTS, GREEDY)
        engine.call("settle")
    return answers


def cached(answers: list[Answer]) -> set[int]:
    """Return the numbers of tokens that were found of each prompt."""
    return {one.num_cached_tokens for one in answers}


def test_what_cannot_change_a_block_costs_no_hit(tmp_path: Path) -> None:
    first = save_llama(tmp_path / "models" / "first")
    moved = Path(shutil.copytree(first, tmp_path / "mnt" / "2" / "renamed"))
    hub = tmp_path / "hub" / "blobs"
    hub.mkdir(parents=True)
    snapshot = hub.parent / "snapshot"
    snapshot.mkdir()
    for file in first.iterdir():  # as the hub's cache keeps a model
        shutil.copy(file, hub / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(hub / f"blob-of-{file.name}")
    settings = tier_in(tmp_path / "blocks")
    stored = answer(EngineOptions(str(first), settings))
    others = {
        "another place": EngineOptions(
            str(moved),
            settings,
            max_num_seqs=3,
            engine_arguments={
                "served_model_name": "another-name",
                "revision": "main",
                "seed": 7,
                "max_model_len": 1536,
                "max_num_batched_tokens": 768,
                "tokenizer": str(first),
                "generation_config": "vllm",
                "max_logprobs": 5,
                "logprobs_mode": "processed_logprobs",
                "gpu_memory_utilization": 0.4,
            },
        ),
        "links": EngineOptions(
            str(snapshot),
            settings,
            CONTROL_POOL_BLOCKS,
            engine_arguments={
                "safetensors_load_strategy": "eager",
                "use_tqdm_on_load": False,
                "performance_mode": "throughput",
                "download_dir": str(tmp_path / "downloads"),
                "disable_cascade_attn": False,
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 4,
                },
            },
        ),
    }
    for name, options in others.items():
        answers = answer(options)
        assert cached(answers) == {WHOLE_TOKENS}, name
        assert_same(answers, stored)


def test_the_format_that_weights_are_loaded_from_separates_engines(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model")
    other = load_file(save_llama(tmp_path / "other", seed=8) / "model.safetensors")
    torch.save(other, model / "weights.pt")
    settings = tier_in(tmp_path / "blocks")
    from_pt = {"load_format": "pt"}
    stored = answer(EngineOptions(str(model), settings))
    answers = answer(EngineOptions(str(model), settings, engine_arguments=from_pt))
    again = answer(EngineOptions(str(model), settings, engine_arguments=from_pt))

    assert (cached(stored), cached(answers), cached(again)) == ({0}, {0}, {WHOLE_TOKENS})
    assert_clearly_other(answers, stored)
    assert_same(again, answers)
