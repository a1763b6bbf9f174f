"""The rows of real vLLM engines on the CPU: one stores a prompt into a folder, another one looks for it there."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.identity.peers import PEERS, KeyFields
from benchmarks.identity.row import SAME_ANSWER, UNCHANGED, Row
from benchmarks.vllm.checkpoints import SMALL, VOCAB_SIZE, save_adapter, save_llama, save_qwen3_next
from benchmarks.vllm.engine import EngineOptions
from benchmarks.vllm.engine_process import EngineProcess

EMBEDDING = "model.embed_tokens.weight"
LAST_WEIGHT = f"model.layers.{SMALL.num_layers - 1}.mlp.down_proj.weight"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, always under the same name.

    Attributes:
        seed: of its weights.
        scaling: its lora_alpha.
        folder: where its folder is.
    """

    seed: int = 1
    scaling: int = 16
    folder: str = "adapters"


@dataclass(frozen=True)
class Setup:
    """The engine that stores; the one that looks has the same and a row's change.

    Attributes:
        name: of its folder.
        save: saves its checkpoint.
        arguments: vLLM's arguments.
        environment: variables of its processes.
        adapter: of its request.
        block_tokens: tokens of a device block.
        num_blocks: whole blocks of the prompt.
    """

    name: str
    save: Callable[[Path], Path] = lambda folder: save_llama(folder, SMALL)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # Any: vLLM's own
    environment: Mapping[str, str] = field(default_factory=dict)
    adapter: Adapter | None = None
    block_tokens: int = 32
    num_blocks: int = 8

    @property
    def prompt(self) -> list[int]:
        """Tokens of the prompt: whole blocks and one more."""
        return [(11 * n * n + 5 * n) % VOCAB_SIZE for n in range(self.num_blocks * self.block_tokens + 1)]


PLAIN = Setup("plain")
TWO_WORKERS: Mapping[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
PARALLEL = Setup("two-workers", arguments=TWO_WORKERS, environment=ONE_CORE_EACH)
ADAPTERS: Mapping[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
WITHOUT_ADAPTER = Setup("without-adapter", arguments=ADAPTERS)
ADAPTED = Setup("adapter", arguments=ADAPTERS, adapter=Adapter())
HYBRID = Setup(
    "hybrid",
    save_qwen3_next,
    {"dtype": "bfloat16", "enable_prefix_caching": True, "mamba_cache_mode": "align"},
    block_tokens=256,  # a page of attention is then not shorter than one of a state
    num_blocks=4,
)


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
        before: the engine that stores.
        adapter: of the request that looks.
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
    before: Setup = PLAIN
    adapter: Adapter | None = None


def list_changes() -> list[Change]:
    """Return the rows; those of one setup stand together."""
    return [*_of_one_worker(), *_of_two_workers(), *_of_adapters(), *_of_a_hybrid()]


def _of_one_worker() -> list[Change]:
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
        Change(UNCHANGED, "the checkpoint in another folder", key={"model_name": "/other"}, is_found=True),
        Change("settings", "adapters are allowed", arguments=ADAPTERS),
        Change(
            "parallelism",
            "two workers, one before",
            arguments=TWO_WORKERS,
            environment=ONE_CORE_EACH,
            key={"tensor_parallel_size": 2},
        ),
        Change("prompt", "cache_salt of the request", request={"cache_salt": "x"}, key=None),
    ]


def _of_two_workers() -> list[Change]:
    return [
        Change(UNCHANGED, "two workers, and two again", is_found=True, before=PARALLEL),
        Change(
            "parallelism",
            "one worker, two before",
            arguments={"tensor_parallel_size": 1, "distributed_executor_backend": "uni"},
            environment={"VLLM_CPU_OMP_THREADS_BIND": "auto"},
            key={"tensor_parallel_size": 2},
            before=PARALLEL,
        ),
    ]


def _of_adapters() -> list[Change]:
    # vLLM's hashes contain the adapter's name and folder, and all that see them get both; not its weights.
    other_place = Adapter(folder="copies")
    return [
        Change("adapter", "an adapter, none before", before=WITHOUT_ADAPTER, adapter=Adapter(), key=None),
        Change(UNCHANGED, "the same adapter", is_found=True, before=ADAPTED, adapter=Adapter()),
        Change("adapter", "no adapter, one before", before=ADAPTED, key=None),
        Change("adapter", "other weights in the same place", before=ADAPTED, adapter=Adapter(seed=2)),
        Change("adapter", "another scaling in the same place", before=ADAPTED, adapter=Adapter(scaling=32)),
        Change("adapter", "the same adapter in another place", before=ADAPTED, adapter=other_place, key=None),
    ]


def _of_a_hybrid() -> list[Change]:
    return [
        Change(UNCHANGED, "a hybrid with the same settings", is_found=True, before=HYBRID),
        Change(
            "numbers",
            "a hybrid's states in bfloat16",
            arguments={"mamba_ssm_cache_dtype": "bfloat16"},
            before=HYBRID,
        ),
        Change(
            "settings",
            "a hybrid's blocks of 512 tokens",
            arguments={"block_size": 512},
            key={"block_tokens": 512},
            before=HYBRID,
        ),
    ]


def run_matrix(folder: Path, changes: list[Change]) -> Iterator[Row]:
    """Yield each change's row; the folder keeps checkpoints and blocks while it runs."""
    for before, of_one_setup in groupby(changes, key=lambda change: change.before):
        yield from _run_setup(folder / before.name, before, list(of_one_setup))


def _run_setup(folder: Path, before: Setup, changes: list[Change]) -> Iterator[Row]:
    original = before.save(folder / "original")
    base = Path(shutil.copytree(original, folder / "model"))
    prompt = before.prompt
    tier = {"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "256MiB"}
    options = EngineOptions(
        str(base),
        {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]},
        num_device_blocks=40,
        block_tokens=before.block_tokens,
        max_model_tokens=max(1024, 2 * len(prompt)),
        step_tokens=max(1024, 2 * len(prompt)),
        arguments=dict(before.arguments),
        environment=dict(before.environment),
        adapter=_save_adapter(folder, before.adapter),
    )
    blocks = folder / "stored"
    with EngineProcess(options) as engine:
        engine.serve([prompt], 1)
        answer = _answer(engine, options, prompt)
    shutil.copytree(folder / "fs", blocks)
    for change in changes:
        shutil.rmtree(folder / "fs")
        shutil.copytree(blocks, folder / "fs")
        changed = _options_of(change, options, _place_checkpoint(change, original), folder)
        with EngineProcess(changed) as engine:
            found = engine.serve([prompt], 1).loaded_tokens.get("fs", 0)
            other = _answer(engine, changed, prompt)
        difference = SAME_ANSWER if other == answer else "another answer"
        shared = before.num_blocks * before.block_tokens if change.is_found else 0
        yield Row(change.group, f"vLLM: {change.name}", found, shared, difference, _separated_by(change))


def _answer(engine: EngineProcess, options: EngineOptions, prompt: list[int]) -> tuple[int, ...]:
    """Return the answer to a prompt that the engine has on its device by now."""
    # Workers in processes of their own cannot be without kvtier for a while.
    is_alone = options.arguments.get("tensor_parallel_size", 1) == 1
    served = engine.serve_without([prompt], 8) if is_alone else engine.serve([prompt], 8)
    return served.answers[0].tokens


def _options_of(change: Change, options: EngineOptions, model: Path, folder: Path) -> EngineOptions:
    return replace(
        options,
        model=str(model),
        settings={**(options.settings or {}), **change.settings},
        arguments=options.arguments | dict(change.arguments),
        environment=options.environment | dict(change.environment),
        request=dict(change.request),
        adapter=_save_adapter(folder, change.adapter),
    )


def _save_adapter(folder: Path, adapter: Adapter | None) -> str | None:
    """Save an adapter in its folder in place of what is there; return the folder."""
    if adapter is None:
        return None
    place = folder / adapter.folder / "adapter"
    shutil.rmtree(place, ignore_errors=True)
    return str(save_adapter(place, SMALL, adapter.seed, adapter.scaling))


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
    first = KeyFields("/model", torch.float32, change.before.block_tokens, layers, block_hash)
    second = replace(first, **change.key)
    return {peer.name: peer.make_key(first) != peer.make_key(second) for peer in PEERS if peer.is_installed()}
