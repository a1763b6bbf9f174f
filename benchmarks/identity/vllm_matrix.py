"""The rows of real vLLM engines on the CPU: one stores a prompt into a folder, another one looks for it there."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.identity.peers import PEERS, KeyFields
from benchmarks.identity.row import SAME_ANSWER, UNCHANGED, Row
from benchmarks.vllm.checkpoints import SMALL, VOCAB_SIZE, save_llama
from benchmarks.vllm.engine import EngineOptions
from benchmarks.vllm.engine_process import EngineProcess

BLOCK_TOKENS = 32
NUM_BLOCKS = 8
PROMPT = [(11 * n * n + 5 * n) % VOCAB_SIZE for n in range(NUM_BLOCKS * BLOCK_TOKENS + 1)]
EMBEDDING = "model.embed_tokens.weight"
LAST_WEIGHT = f"model.layers.{SMALL.num_layers - 1}.mlp.down_proj.weight"


@dataclass(frozen=True)
class Change:
    """One row.

    Attributes:
        group: heading that it belongs to.
        name: the change, in words.
        arguments: vLLM's arguments of the engine that looks.
        settings: kvtier's settings of it.
        environment: variables of its processes.
        request: entries of its request.
        edit: changes the tensors of its checkpoint.
        key: what its key has that others take from an engine; None where that is not known.
        is_found: whether its blocks are the other engine's too.
    """

    group: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # Any: vLLM's own
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: a user's JSON
    environment: Mapping[str, str] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)  # Any: vLLM's own
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None
    key: Mapping[str, Any] | None = field(default_factory=dict)  # Any: fields of KeyFields
    is_found: bool = False


def list_changes() -> list[Change]:
    """Return the rows."""

    def change_last_rows(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EMBEDDING][-96:] *= 1.5

    def flip_bit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[LAST_WEIGHT].view(torch.int32)[0, 0] ^= 1

    rope = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    return [
        Change(UNCHANGED, "a new process with the same settings", is_found=True),
        Change(
            UNCHANGED,
            "device memory, requests at a time, tokens of a step",
            arguments={"num_gpu_blocks_override": 60, "max_num_seqs": 3, "max_num_batched_tokens": 512},
            is_found=True,
        ),
        Change("weights", "the last 96 rows of the embedding", edit=change_last_rows),
        Change("weights", "one bit of one weight in the last layer", edit=flip_bit),
        Change("configuration", "rope: linear, by hf_overrides", arguments={"hf_overrides": rope}),
        Change("configuration", "rope: theta, by hf_overrides", arguments={"hf_overrides": theta}),
        Change(
            "configuration",
            "epsilon of the norms, by hf_overrides",
            arguments={"hf_overrides": {"rms_norm_eps": 1e-3}},
        ),
        Change("numbers", "bfloat16", arguments={"dtype": "bfloat16"}, key={"dtype": torch.bfloat16}),
        Change("numbers", "keys and values in fp8", arguments={"kv_cache_dtype": "fp8"}),
        Change(
            "settings", "device block of 64 tokens", arguments={"block_size": 64}, key={"block_tokens": 64}
        ),
        Change(
            "settings",
            "algorithm of the hashes",
            arguments={"prefix_caching_hash_algo": "sha256_cbor"},
            key=None,
        ),
        Change("settings", "seed of the hashes", environment={"PYTHONHASHSEED": "1"}, key=None),
        Change("settings", "tenant", settings={"tenant_salt": "b"}),
        Change("settings", "the checkpoint in another folder", key={"model_name": "/other"}),
        Change("prompt", "cache_salt of the request", request={"cache_salt": "x"}, key=None),
    ]


def run_matrix(folder: Path, changes: list[Change]) -> Iterator[Row]:
    """Yield each change's row; the folder keeps checkpoints and blocks while it runs."""
    original = save_llama(folder / "original", SMALL)
    base = Path(shutil.copytree(original, folder / "model"))
    tier = {"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "256MiB"}
    options = EngineOptions(
        str(base),
        {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]},
        num_device_blocks=40,
        block_tokens=BLOCK_TOKENS,
        max_model_tokens=1024,
        step_tokens=1024,
    )
    expected = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks = folder / "stored"
    with EngineProcess(options) as engine:
        engine.serve([PROMPT], 1)
        answer = engine.serve_without([PROMPT], 8).answers[0].tokens
    shutil.copytree(folder / "fs", blocks)
    for change in changes:
        shutil.rmtree(folder / "fs")
        shutil.copytree(blocks, folder / "fs")
        with EngineProcess(_options_of(change, options, _place_checkpoint(change, original))) as engine:
            found = engine.serve([PROMPT], 1).loaded_tokens.get("fs", 0)
            other = engine.serve_without([PROMPT], 8).answers[0].tokens
        difference = SAME_ANSWER if other == answer else "another answer"
        shared = expected if change.is_found else 0
        yield Row(change.group, f"vLLM: {change.name}", found, shared, difference, _separated_by(change))


def _options_of(change: Change, options: EngineOptions, model: Path) -> EngineOptions:
    return replace(
        options,
        model=str(model),
        settings={**(options.settings or {}), **change.settings},
        arguments=dict(change.arguments),
        environment=dict(change.environment),
        request=dict(change.request),
    )


def _place_checkpoint(change: Change, original: Path) -> Path:
    """Copy the checkpoint to where the engine looks for it, under the same name unless the name is the change."""
    name = "other" if change.key is not None and "model_name" in change.key else "model"
    model = original.with_name(name)
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(original, model)
    if change.edit is not None:
        path = model / "model.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change.edit(tensors)
        save_file(tensors, path, metadata)
    return model


def _separated_by(change: Change) -> dict[str, bool]:
    if change.key is None:
        return {}
    block_hash = hashlib.sha256(b"the first block").digest()
    layers = tuple(f"model.layers.{number}.self_attn.attn" for number in range(SMALL.num_layers))
    first = KeyFields("/model", torch.float32, BLOCK_TOKENS, layers, block_hash)
    second = replace(first, **change.key)
    return {peer.name: peer.make_key(first) != peer.make_key(second) for peer in PEERS if peer.is_installed()}
