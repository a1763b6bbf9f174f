"""Runs the rows of the embedded engine: one stores a prompt into a folder, another one with one change looks for it.

Beside what is found stand what a wrong hit would do, and whether the keys of other systems tell both engines apart.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.identity.changes import BLOCK_TOKENS, Change, Side
from benchmarks.identity.peers import PEERS, KeyFields, Peer
from benchmarks.identity.row import Row
from kvtier.config import OffloadingConfig
from kvtier.engines.transformers import EngineConfig, KVTierEngine
from kvtier.engines.transformers.identity import make_offloading_config
from kvtier.engines.transformers.model_adapter import ModelAdapter, find_cache_name
from kvtier.engines.transformers.request import make_prompt_hasher
from kvtier.errors import SequenceLengthError

WAIT_S = 60.0


def run_matrix(changes: Iterable[Change]) -> Iterator[Row]:
    """Yield each change's row."""
    for change in changes:
        first, second = change.sides()
        with tempfile.TemporaryDirectory() as folder:
            with serving(first, Path(folder)) as engine:
                engine.run(list(first.prompt), 1)
                engine.drain(WAIT_S)
            with serving(second, Path(folder)) as engine:
                if second.is_reset:
                    engine.reset()
                num_found = look_for(engine, second)
        yield Row(
            change.group,
            change.name,
            num_found,
            # Of a prompt that is held whole the engine computes the last token again.
            min(change.num_shared_blocks * BLOCK_TOKENS, len(second.prompt) - 1),
            difference(first, second),
            {peer.name: separates(peer, first, second) for peer in PEERS if peer.is_installed()},
        )


def look_for(engine: KVTierEngine, side: Side) -> int:
    """Return how many tokens of the prompt the engine loads from the tier; none of a prompt that it refuses."""
    try:
        return engine.run(list(side.prompt), 1).sources.get("fs", 0)
    except SequenceLengthError:
        return 0


@contextmanager
def serving(side: Side, folder: Path) -> Iterator[KVTierEngine]:
    """Serve a side's model with a tier in ``folder``."""
    version = side.layout_version
    changed = (
        mock.patch("kvtier.namespace.LAYOUT_VERSION", version) if version is not None else mock.MagicMock()
    )
    with changed:
        engine = KVTierEngine(side.model, engine_config(side, folder))
    try:
        yield engine
    finally:
        engine.shutdown()


def engine_config(side: Side, folder: Path) -> EngineConfig:
    """Return the settings of a side's engine."""
    tier = {"type": "fs", "root_dir": str(folder / "fs"), "capacity_bytes": "64MiB"}
    settings = {"cpu_bytes_to_use": "8MiB", "secondary_tiers": [tier], **side.settings}
    engine = {"num_device_blocks": 32, "block_size_tokens": BLOCK_TOKENS, "model_name": "tiny", **side.engine}
    return EngineConfig(extra_config=settings, **engine)


def difference(first: Side, second: Side) -> float | str:
    """Return by how much keys and values of the tokens that both prompts begin with differ at most."""
    num_tokens = min(len(first.prompt), len(second.prompt))
    ours, other = keys_and_values(first, num_tokens), keys_and_values(second, num_tokens)
    if [one.shape for one in ours] != [one.shape for one in other]:
        return "other shape"
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, other, strict=True))


@torch.no_grad()
def keys_and_values(side: Side, num_tokens: int) -> list[torch.Tensor]:
    """Return what a plain run of the model caches for a prompt, key and value of each layer."""
    model: PreTrainedModel = side.model
    torch.nn.Module.eval(model)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([list(side.prompt)]), use_cache=True, **{find_cache_name(model): cache})
    layers: list[Any] = list(cache.layers)  # Any: each kind of layer has other attributes
    return [one[..., :num_tokens, :] for layer in layers for one in (layer.keys, layer.values)]


def separates(peer: Peer, first: Side, second: Side) -> bool:
    """Return whether a peer's key of the first block differs between both sides."""
    return peer.make_key(key_fields(first)) != peer.make_key(key_fields(second))


def key_fields(side: Side) -> KeyFields:
    """Return what an engine like this side's would hand to another system."""
    adapter = ModelAdapter(side.model)
    config = engine_config(side, Path("/"))
    described: OffloadingConfig = make_offloading_config(adapter, config, config.extra_config or {})
    block = described.block_size_factor * described.hash_block_size
    # The engine's hashes carry its salt. Those peers see the same hashes as kvtier does.
    hash_prompt: Any = make_prompt_hasher(config.salt, described.hash_block_size, lambda _num: "")
    return KeyFields(
        model_name=described.model.name,
        dtype=side.model.dtype,
        block_tokens=block,
        layer_names=described.groups[0].layer_names,
        block_hash=hash_prompt(list(side.prompt))[0],
    )
