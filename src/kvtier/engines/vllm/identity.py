"""Which weights an engine runs, for the namespace of its blocks.

It loads no weights. A checkpoint that lies on a disk, in a folder or in the hub's cache, is named by every byte of its
files (``kvtier.engines.checkpoint``), random weights by their seed. What cannot be read (a bucket, another server's
memory) is named by its commit or by what the user says with --revision, and otherwise belongs to its engine alone.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from vllm import envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig

from kvtier.config import ModelIdentity
from kvtier.engines.checkpoint import Fingerprint, FingerprintJob, require_unchanged
from kvtier.errors import ConfigError, FingerprintError

logger = logging.getLogger(__name__)

FORMATS_IN_FILES = frozenset(
    {
        "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "bitsandbytes", "gguf",
        "sharded_state", "runai_streamer", "runai_streamer_sharded",
    }
)  # fmt: skip
"""Values of --load-format that load the files of the model's folder and nothing else. Not among them: "npcache", which
prefers a copy of its own, "tensorizer", "ipc_cache", "modelexpress", and what plug-ins add."""

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision that names one state of a repository for ever, as branches and tags do not."""

UNRELATED_SETTINGS = frozenset({"transformers_version", "_name_or_path", "name_or_path", "_commit_hash"})
"""Settings of a model's configuration that do not change what it computes."""

NOT_READ = "not read here"
"""Stands for the fingerprint of files where none is needed."""

ENGINE_PROCESS = "EngineCore"
"""How vLLM begins the name of the process that it starts for one engine; it loads after that."""

START_SLACK_NS = 50_000_000
"""Ticks of the kernel's clocks: a file that was written just before the engine's process began is not younger."""


@dataclass(frozen=True, slots=True)
class WeightsName:
    """What names a model's weights.

    Attributes:
        text: the name.
        doubt: why other weights could have it one day; empty when none can.
        files: what was read for it.
    """

    text: str
    doubt: str = ""
    fingerprint: Fingerprint | None = None


class RunningFingerprints:
    """The fingerprints that this process has begun and not yet used, by engine and folder; a lock guards them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, str, Path], FingerprintJob] = {}

    def start(self, vllm_config: VllmConfig, place: Path, label: str) -> FingerprintJob:
        """Return the job that reads a checkpoint for an engine, and begin it if there is none.

        Threads do not survive a fork, and what was read for an engine that never started may have changed.
        """
        key = os.getpid(), str(getattr(vllm_config, "instance_id", "")), place
        with self._lock:
            if key not in self._jobs:
                self._jobs[key] = FingerprintJob(place, label)
            return self._jobs[key]

    def forget(self) -> None:
        """Forget all jobs: the next engine of this process reads anew."""
        with self._lock:
            self._jobs.clear()


_running = RunningFingerprints()


def start_fingerprints(vllm_config: VllmConfig) -> None:
    """Begin to read the weights in the background; ``make_model_identity`` waits for the end."""
    for _, model_config, load_config in _models_of(vllm_config):
        place = find_place(model_config, load_config)
        if place is not None:
            _running.start(vllm_config, place, str(model_config.model))


def make_model_identity(
    vllm_config: VllmConfig, *, must_last: bool = False, reads_files: bool = True
) -> ModelIdentity:
    """Return name, revision, data type and configuration of the model. Waits until all weights are read.

    Args:
        vllm_config: the engine's configuration.
        must_last: whether blocks outlive the engine, so that no other weights may ever have this identity.
        reads_files: whether the fingerprint of files is part of it.

    Raises:
        FingerprintError: a file cannot be read, or changed while the engine started.
        ConfigError: the identity must last, and nothing says for sure which weights these are.
    """
    model_config = vllm_config.model_config
    parts: list[str] = []
    settings: dict[str, object] = {}
    try:
        for role, model, load_config in _models_of(vllm_config):
            name = describe_weights(vllm_config, model, load_config, reads_files=reads_files)
            if must_last:
                require_lasting(role, model, name)
            # The layers of a drafting model have KV of their own, in the same blocks.
            parts.append(name.text if role == "model" else f"{role} {model.model} {name.text}")
            settings[role] = describe_settings(model)
    finally:
        _running.forget()
    lora_config = getattr(vllm_config, "lora_config", None)
    if lora_config is not None:
        settings["lora_dtype"] = str(lora_config.lora_dtype)
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


def describe_weights(
    vllm_config: VllmConfig, model_config: ModelConfig, load_config: LoadConfig, *, reads_files: bool
) -> WeightsName:
    """Return a name of a model's weights, and of the code that comes with them.

    Raises:
        FingerprintError: a file cannot be read.
    """
    foreign_code = find_foreign_code(model_config)
    if format_of(load_config) == "dummy":
        doubt = "the code that comes with the model is not read" if _runs_own_code(model_config) else ""
        return WeightsName(f"random-weights-of-seed:{model_config.seed}", doubt)
    place = find_place(model_config, load_config)
    if place is not None and not reads_files:
        return WeightsName(NOT_READ, foreign_code)
    if place is not None:
        fingerprint = _running.start(vllm_config, place, str(model_config.model)).wait()
        require_unchanged(fingerprint.files)
        if fingerprint.text:
            return WeightsName(fingerprint.text, foreign_code, fingerprint)
    return name_unread_weights(vllm_config, model_config, load_config, foreign_code)


def name_unread_weights(
    vllm_config: VllmConfig, model_config: ModelConfig, load_config: LoadConfig, foreign_code: str
) -> WeightsName:
    """Return the commit, or what the user says, or else a name of this engine's own."""
    is_from_hub = is_hub_name(model_config) and format_of(load_config) in FORMATS_IN_FILES
    commit = getattr(model_config.hf_config, "_commit_hash", None) if is_from_hub else None
    if commit:
        return WeightsName(str(commit), foreign_code)
    revision = model_config.revision
    if revision:
        is_movable = is_from_hub and not COMMIT.fullmatch(str(revision))
        doubt = (
            f"--revision {revision} is no commit, so other weights may have it one day" if is_movable else ""
        )
        return WeightsName(str(revision), doubt or foreign_code)
    engine_id = vllm_config.kv_transfer_config.engine_id
    logger.warning(
        "nothing identifies the weights of %s: its blocks are for engine_id %s alone; give --revision to share them",
        model_config.model,
        engine_id,
    )
    doubt = (
        f"its weights cannot be read (load format {format_of(load_config)!r}), and nothing else names them"
    )
    return WeightsName(f"unidentified-weights-of-engine:{engine_id}", doubt)


def require_lasting(role: str, model_config: ModelConfig, name: WeightsName) -> None:
    """Refuse weights that tiers which outlive the engine could take for others.

    Raises:
        ConfigError: the name is in doubt.
        FingerprintError: a file changed after the engine's process had started, and may not be what was loaded.
    """
    if name.doubt:
        flag = "--revision (and --code-revision)" if role == "model" else '"revision" in --speculative-config'
        remedy = (
            f"{name.doubt}: give {flag} the commit, or where there is none a name that no other weights will ever "
            "have; or download the model into a folder; or leave secondary_tiers out"
        )
        raise ConfigError("model", str(model_config.model), remedy)
    is_own_process = multiprocessing.current_process().name.startswith(ENGINE_PROCESS)
    if name.fingerprint is None or not is_own_process or is_hub_name(model_config):
        return
    began_ns = process_start_ns() + START_SLACK_NS
    for file in name.fingerprint.files:
        if file.stamp.ctime_ns > began_ns:
            reason = "it changed after the engine had started, and may not be what was loaded"
            raise FingerprintError(file.path, reason, "start the engine again")


def find_place(model_config: ModelConfig, load_config: LoadConfig) -> Path | None:
    """Return where all bytes of a model lie that are loaded; None when that is on no disk of ours."""
    if format_of(load_config) not in FORMATS_IN_FILES or _is_in_bucket(model_config):
        return None
    place = Path(str(model_config.model))
    return place if place.exists() else find_snapshot(model_config, load_config)


def find_snapshot(model_config: ModelConfig, load_config: LoadConfig) -> Path | None:
    """Return the folder of the hub's cache that vLLM loads a model from; None when it is not there. No network."""
    if envs.VLLM_USE_MODELSCOPE:  # a cache of its own, where another state may have the same name
        return None
    try:
        folder = huggingface_hub.snapshot_download(
            str(model_config.model),
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError):  # not there, or no name that a hub could have
        return None
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    # Configuration and weights are fetched one after the other, and a branch may have moved between.
    return Path(folder) if commit in (None, Path(folder).name) else None


def find_foreign_code(model_config: ModelConfig) -> str:
    """Return a doubt when code of another repository than the model's runs in the engine, in no fixed state. Pure."""
    if not getattr(model_config, "trust_remote_code", False):
        return ""
    classes = getattr(model_config.hf_config, "auto_map", None) or {}
    repositories = {str(name).partition("--")[0] for name in classes.values() if "--" in str(name)}
    foreign = repositories - {str(model_config.model)}
    if not foreign or COMMIT.fullmatch(str(getattr(model_config, "code_revision", None))):
        return ""
    return f"it runs code of {', '.join(sorted(foreign))} in no fixed state"


def format_of(load_config: LoadConfig) -> str:
    """Return the load format in small letters; releases differ in whether it is text. Pure."""
    return str(load_config.load_format).rpartition(".")[2].lower()


def is_hub_name(model_config: ModelConfig) -> bool:
    """Return whether a model is named as a hub names it, not by a path or URL."""
    name = str(model_config.model)
    return "://" not in name and not _is_in_bucket(model_config) and not Path(name).exists()


def process_start_ns() -> int:
    """Return when this process began, as files are dated."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)


def _models_of(vllm_config: VllmConfig) -> Iterator[tuple[str, ModelConfig, LoadConfig]]:
    yield "model", vllm_config.model_config, vllm_config.load_config
    speculative = vllm_config.speculative_config
    draft_config = getattr(speculative, "draft_model_config", None)
    if draft_config is not None:
        yield (
            "draft",
            draft_config,
            getattr(speculative, "draft_load_config", None) or vllm_config.load_config,
        )


def _is_in_bucket(model_config: ModelConfig) -> bool:
    """Return whether vLLM has fetched the configuration alone into the folder that the model seems to be in."""
    return bool(getattr(model_config, "model_weights", None))


def _runs_own_code(model_config: ModelConfig) -> bool:
    has_classes = bool(getattr(model_config.hf_config, "auto_map", None))
    return bool(getattr(model_config, "trust_remote_code", False)) and has_classes


def _without_unrelated(settings: Mapping[str, object]) -> dict[str, object]:
    """Return a model's JSON without unrelated settings; models of several parts nest theirs."""
    related = {name: value for name, value in settings.items() if name not in UNRELATED_SETTINGS}
    return {
        name: _without_unrelated(value) if isinstance(value, dict) else value
        for name, value in related.items()
    }
