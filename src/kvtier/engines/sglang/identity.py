"""What makes the pages of one pool of one rank its own.

SGLang tells a storage backend the model's name and the ranks. The same name may have other weights tomorrow, and with
another RoPE factor the same weights make other keys. So what is missing is read here: every byte of the weights, which
are found under any name and in any folder, the model's configuration, and every argument of the engine but those that
``named_arguments`` lists as harmless. What cannot be read is refused with the remedy, because pages would otherwise be
found by an engine that computes others.
"""

import hashlib
import json
import logging
import os
import sys
import uuid
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.engines.checkpoint import fingerprint_checkpoint, require_started_after, require_unchanged
from kvtier.engines.sglang.named_arguments import name_arguments
from kvtier.engines.sglang.pages import HostPool, Pages
from kvtier.engines.sglang.settings import SGLangSettings
from kvtier.errors import ConfigError
from kvtier.redaction import redact

logger = logging.getLogger(__name__)

ENGINE_KIND = "sglang"

CONTEXT_MODULE = "sglang.srt.runtime_context"
"""Where SGLang keeps the arguments of the running engine; without an engine it is not imported."""

CONFIRMED_RELEASES = frozenset({"0.5.23"})
"""Releases whose pages were compared with each other's: all of them store the same bytes for the same pool. Pages of
another release are its own until it is listed here."""

FORMATS_IN_FILES = frozenset(
    {
        "auto", "pt", "safetensors", "fastsafetensors", "instanttensor", "sharded_state", "presharded", "gguf",
        "bitsandbytes", "mistral", "layered", "jax", "runai_streamer",
    }
)  # fmt: skip
"""Values of --load-format that load the files of the model's folder only. Not among them: random weights ("dummy"),
copies of its own ("npcache", "local_cached"), other servers' memory and whatever a later release adds."""

UNRELATED_SETTINGS = frozenset({"transformers_version", "_name_or_path", "name_or_path", "_commit_hash"})
"""Settings of a model's configuration that do not change what it computes."""

HUB_FOLDER = "snapshots"
"""Where the hub's cache has the folders of commits, whose files do not change, and may be younger than the engine."""

RAW_DTYPES = frozenset({torch.uint8, torch.int8})
"""Types that a pool has for any 8-bit format: two formats of keys and values may have the same."""

RANK_SHARDED_POOLS = frozenset({"mamba"})
"""Pools of which each tensor-parallel rank has another part, whatever the model."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """Which part of a page a rank has.

    Attributes:
        text: the part in words, for the identity.
        is_replicated: whether every tensor-parallel rank has the same bytes.
    """

    text: str
    is_replicated: bool


def make_model_identity(settings: SGLangSettings, storage_config: HiCacheStorageConfig) -> ModelIdentity:
    """Return what identifies the weights and how they compute. Blocks until every byte of the weights is read.

    Raises:
        ConfigError: something that changes bytes cannot be found out; the message has the remedy.
        FingerprintError: a file cannot be read, or changed meanwhile.
    """
    engine = find_engine_arguments()
    if engine is None and settings.engine_arguments is None and CONTEXT_MODULE in sys.modules:
        remedy = (
            "the arguments of this release of SGLang cannot be read: give those that change bytes, "
            'such as {"kv_cache_dtype": "auto", "json_model_override_args": "{}"}'
        )
        raise ConfigError("engine_arguments", None, remedy)
    refuse_unnamed(engine, settings)
    place = find_weights(settings, engine, storage_config.model_name)
    weights = "" if settings.model_revision else _fingerprint(place, is_loaded=engine is not None)
    draft = getattr(engine, "speculative_draft_model_path", None)
    drafted = _fingerprint(_require_folder(str(draft), "draft model"), is_loaded=True) if draft else ""
    config = read_model_config(place)
    arguments = read_arguments(engine, config) | dict(settings.engine_arguments or {})
    words: dict[str, object] = {"config": config, "sglang": arguments}
    if drafted:
        words["draft"] = drafted
    if settings.adapters_revision is not None:
        words["adapters"] = settings.adapters_revision
    canonical = json.dumps(words, sort_keys=True, default=str)
    return ModelIdentity(
        name=str(storage_config.model_name or ""),
        revision=settings.model_revision or "",
        dtype=str(arguments.get("dtype", "")),
        config_digest=hashlib.sha256(canonical.encode()).hexdigest(),
        # The words stand next to the pages: what an argument may hold of a credential is only in the digest.
        config_json=json.dumps(redact("", words), sort_keys=True, default=str),
        weights=weights,
    )


def make_pool_config(
    settings: SGLangSettings,
    model: ModelIdentity,
    pool: HostPool,
    pages: Pages,
    name: str,
    part: RankPart,
) -> OffloadingConfig:
    """Describe one pool of one rank.

    Raises:
        ConfigError: the format of its bytes is not known.
    """
    if getattr(pool, "dtype", None) in RAW_DTYPES and '"kv_cache_dtype"' not in model.config_json:
        remedy = (
            'the pool holds raw bytes of an unknown format: give "engine_arguments": {"kv_cache_dtype": ...}'
        )
        raise ConfigError("kv_cache_dtype", None, remedy)
    layers = f"{getattr(pool, 'start_layer', '')}:{getattr(pool, 'end_layer', '')}"
    groups = tuple(
        KVGroup(pool.page_size, (f"{name} piece {number} of layers {layers}",), pages.row_bytes)
        for number in range(pages.num_pieces)
    )
    tag = getattr(pool, "storage_format_tag", None) or ""
    layout = f"{type(pool).__name__} {getattr(pool, 'layout', '')} {tag} {pages.form}"
    release = f", {read_release()}" if read_release() else ""
    own = {"encryption": settings.encryption, "tenant_salt": settings.tenant_salt}
    return OffloadingConfig(
        engine_id=f"{ENGINE_KIND}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        model=model,
        groups=groups,
        hash_block_size=pool.page_size,
        kv_layout=f"{layout}, {part.text}{release}",
        kv_dtype=describe_types(pool),
        engine_kind=ENGINE_KIND,
        extra_config=own,
    )


def describe_part(storage_config: HiCacheStorageConfig, pool: HostPool, name: str) -> RankPart:
    """Return which part of a page this rank has. Pure.

    A pool with heads is divided by them, also beside a pool of latents. Data-parallel groups have the same bytes.
    """
    is_replicated = (
        bool(storage_config.is_mla_model) and name not in RANK_SHARDED_POOLS and not hasattr(pool, "head_num")
    )
    ranks = {
        "tp": (0 if is_replicated else storage_config.tp_rank, storage_config.tp_size),
        "pp": (storage_config.pp_rank, storage_config.pp_size),
        "cp": (storage_config.attn_cp_rank, storage_config.attn_cp_size),
        "dcp": (getattr(storage_config, "dcp_rank", 0), getattr(storage_config, "dcp_size", 1)),
    }
    text = " ".join(f"{kind} {rank}/{size}" for kind, (rank, size) in ranks.items())
    return RankPart(f"replicated {text}" if is_replicated else text, is_replicated)


def describe_types(pool: HostPool) -> str:
    """Return the data types that a pool has, by the names of its attributes. Pure."""
    found = {name: value for name, value in vars(pool).items() if isinstance(value, torch.dtype)}
    return " ".join(f"{name}={value}" for name, value in sorted(found.items()))


def find_engine_arguments() -> object | None:
    """Return the arguments of the running engine; None where there is none, or they cannot be read."""
    module = sys.modules.get(CONTEXT_MODULE)
    read = getattr(module, "get_server_args", None)
    try:
        found: object = None if read is None else read()
    except ValueError:  # no engine has started in this process
        return None
    return found


def read_release() -> str:
    """Return "" for a release whose pages are known to be those of the others, else which release it is."""
    try:
        release = version("sglang")
    except PackageNotFoundError:
        return ""
    return "" if release in CONFIRMED_RELEASES else f"of sglang {release}"


def read_arguments(engine: object | None, model_config: object) -> dict[str, object]:
    """Return the engine's arguments that name its pages, a file of scales by its digest; none without an engine.

    Raises:
        ConfigError: that file cannot be read.
    """
    if engine is None:
        return {}
    found, unstable = name_arguments(engine, model_config)
    scales = found.get("quantization_param_path")
    if scales:
        found["quantization_param_path"] = _digest_file(Path(str(scales)))
    if unstable:
        # A rank that shares its pages with others finds none of theirs either: a miss, and nothing wrong.
        found["of_one_start"] = uuid.uuid4().hex
        logger.warning(
            "%s: what it is set to has no form that another process can compare, so only this start of the engine "
            "uses its pages; set it to plain values to share them",
            ", ".join(unstable),
        )
    return found


def refuse_unnamed(engine: object | None, settings: SGLangSettings) -> None:
    """Refuse weights that the files of a folder do not name, unless the user does. Pure.

    SGLang's keys have an adapter's name and path, not its bytes; some formats load weights from elsewhere.

    Raises:
        ConfigError: adapters or weights have no name.
    """
    load_format = str(getattr(engine, "load_format", None) or "auto").rpartition(".")[2].lower()
    if load_format not in FORMATS_IN_FILES and settings.model_revision is None:
        remedy = (
            'loads no files of a folder: give "model_revision", a name that no other weights will ever have'
        )
        raise ConfigError("load_format", load_format, remedy, max_value_chars=80)
    is_on = bool(getattr(engine, "enable_lora", False) or getattr(engine, "lora_paths", None))
    if is_on and settings.adapters_revision is None:
        remedy = "with LoRA, give a text that you change whenever the file of an adapter changes"
        raise ConfigError("adapters_revision", None, remedy)


def find_weights(settings: SGLangSettings, engine: object | None, model_name: str | None) -> Path | None:
    """Return the folder or file of the weights; None where ``model_revision`` stands for them and no folder is named.

    Raises:
        ConfigError: neither a setting nor the engine leads to a folder.
    """
    if settings.model is not None:
        return _require_folder(settings.model, "model")
    named = getattr(engine, "model_path", None) or model_name or ""
    found = _find_folder(str(named), getattr(engine, "revision", None))
    if found is None and settings.model_revision is None:
        remedy = (
            'no folder of weights has this name: give "model": PATH in --hicache-storage-backend-extra-config, or '
            '"model_revision": a name that no other weights will ever have'
        )
        raise ConfigError("model", str(named), remedy, max_value_chars=80)
    return found


def read_model_config(place: Path | None) -> object:
    """Return the model's configuration without what does not change its results; empty where it has no such file.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = None if place is None else place / "config.json"
    if path is None or not path.is_file():
        return {}  # formats without it keep their settings in files that the fingerprint covers
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", str(path), f"cannot be read: {error}", max_value_chars=80) from error
    return _without_unrelated(found)


def _digest_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError("quantization_param_path", str(path), f"cannot be read: {error}") from error


def _without_unrelated(found: object) -> object:
    if not isinstance(found, dict):
        return found
    return {
        name: _without_unrelated(value) for name, value in found.items() if name not in UNRELATED_SETTINGS
    }


def _fingerprint(place: Path | None, *, is_loaded: bool) -> str:
    assert place is not None, "without a revision there is a folder"
    found = fingerprint_checkpoint(place)
    require_unchanged(found.files)
    if is_loaded and place.parent.name != HUB_FOLDER:
        require_started_after(found.files)
    if not found.text:
        remedy = 'holds no weights: give "model": PATH of the folder with them'
        raise ConfigError("model", str(place), remedy, max_value_chars=80)
    return found.text


def _require_folder(name: str, what: str) -> Path:
    found = _find_folder(name, None)
    if found is None:
        raise ConfigError(what, name, "is not on this machine's disks: give its folder", max_value_chars=80)
    return found


def _find_folder(name: str, revision: object) -> Path | None:
    """Return the folder of this name, else the one that the hub's cache has for it; uses no network."""
    if not name or "\0" in name:
        return None
    try:
        if Path(name).exists():
            return Path(name)
    except OSError:  # too long for a path
        return None
    hub = sys.modules.get("huggingface_hub")  # an engine that loads models by the hub's names has imported it
    if hub is None:
        return None
    try:
        return Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or no valid name
        return None
