"""Which weights an engine runs, for the namespace of its blocks.

It loads no weights. The fingerprint of a local checkpoint is a SHA-256 over the header of every safetensors file
and the first bytes of every tensor in it. Training, merging an adapter and quantising all change each tensor they
touch from its first row on, so this tells them apart at a cost of milliseconds a gigabyte. Weights in other formats
are told apart by name, size and time of change. A model from a hub is named by its resolved commit instead, and
one that nothing identifies belongs to its engine alone.
"""

import hashlib
import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path

from vllm.config import ModelConfig, VllmConfig

from kvtier.config import ModelIdentity

logger = logging.getLogger(__name__)

SAMPLED_BYTES = 4096
"""Read of each tensor. Fewer see less of a change that spares the first row; more cost time on slow disks."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file; the format's own limit. A longer one is not a header."""

WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".gguf", ".npz", ".msgpack")
"""Files of weights that are not safetensors."""

UNRELATED_SETTINGS = frozenset({"transformers_version", "_name_or_path", "name_or_path", "_commit_hash"})
"""Settings of a model's configuration that do not change what it computes."""


def make_model_identity(vllm_config: VllmConfig) -> ModelIdentity:
    """Return name, revision, data type and configuration of the model. Reads a little of every weight file.

    Raises:
        OSError: a weight file cannot be read.
    """
    model_config = vllm_config.model_config
    parts = [describe_weights(vllm_config, model_config)]
    settings = {"model": describe_settings(model_config)}
    draft_config = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft_config is not None:
        # The layers of a drafting model have KV of their own, in the same blocks.
        parts.append(f"draft {draft_config.model} {describe_weights(vllm_config, draft_config)}")
        settings["draft"] = describe_settings(draft_config)
    canonical = json.dumps(settings, sort_keys=True, default=str)
    return ModelIdentity(
        name=str(model_config.model),
        revision="; ".join(parts),
        dtype=str(model_config.dtype),
        config_digest=hashlib.sha256(canonical.encode()).hexdigest(),
    )


def describe_settings(model_config: ModelConfig) -> dict[str, object]:
    """Return the effective configuration of a model, without what does not change its results. Pure."""
    settings = _without_unrelated(model_config.hf_config.to_dict())
    settings["vllm_quantization"] = str(model_config.quantization)
    settings["vllm_dtype"] = str(model_config.dtype)
    if "longrope" in json.dumps(settings, default=str):
        # These rotate keys with one of two sets of factors, and the engine's longest request decides which.
        settings["vllm_max_model_len"] = model_config.max_model_len
    return settings


def describe_weights(vllm_config: VllmConfig, model_config: ModelConfig) -> str:
    """Return a name of a model's weights that no other weights have.

    Raises:
        OSError: a weight file cannot be read.
    """
    if str(vllm_config.load_config.load_format).endswith("dummy"):
        return f"random-weights-of-seed:{model_config.seed}"
    place = Path(str(model_config.model))
    fingerprint = fingerprint_checkpoint(place) if place.exists() else ""
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    known = fingerprint or commit or model_config.revision
    if known:
        return str(known)
    engine_id = vllm_config.kv_transfer_config.engine_id
    logger.warning(
        "nothing identifies the weights of %s: its blocks are for engine_id %s alone; give --revision to share them",
        model_config.model,
        engine_id,
    )
    return f"unidentified-weights-of-engine:{engine_id}"


def fingerprint_checkpoint(place: Path) -> str:
    """Return a digest of the weights in a folder or file; empty text when there are none.

    Raises:
        OSError: a file cannot be read.
    """
    whole = hashlib.sha256()
    is_empty = True
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        if path.suffix == ".safetensors":
            whole.update(path.name.encode() + b"\0" + digest_safetensors(path))
        elif path.suffix in WEIGHT_SUFFIXES:
            status = path.stat()
            whole.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        else:
            continue
        is_empty = False
    return "" if is_empty else f"sampled-weights:{whole.hexdigest()}"


def digest_safetensors(path: Path) -> bytes:
    """Return the SHA-256 of a file's size, header and the first bytes of each of its tensors.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        header = file.read(min(header_bytes, MAX_HEADER_BYTES))
        digest.update(header)
        for start, end in _tensor_ranges(header):
            file.seek(8 + header_bytes + start)
            digest.update(file.read(min(max(end - start, 0), SAMPLED_BYTES)))
    return digest.digest()


def _tensor_ranges(header: bytes) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        return sorted(
            tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        # vLLM refuses a damaged checkpoint itself, with a better message; the header alone still names this one.
        return []


def _without_unrelated(settings: Mapping[str, object]) -> dict[str, object]:
    """Return a model's JSON without unrelated settings; models of several parts nest theirs."""
    related = {name: value for name, value in settings.items() if name not in UNRELATED_SETTINGS}
    return {
        name: _without_unrelated(value) if isinstance(value, dict) else value
        for name, value in related.items()
    }
