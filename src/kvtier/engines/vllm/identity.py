"""The identity of what an engine computes with, for the namespace of its blocks: its weights and its configuration.

A checkpoint on a local disk, in a folder or in the hub's cache, is named by every byte of its files
(``kvtier.engines.checkpoint``), random weights by their seed; what the model is called and where it is are then no part
of the identity. Weights that cannot be read (in a bucket, in another server's memory) are named by the model's name
with their commit or --revision. Without either, the blocks belong to this engine only. Of the configuration everything
is a part that is not proven not to matter (``named_fields``).
"""

import hashlib
import json
import logging
import multiprocessing
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
from vllm import envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.v1.worker.worker_base import WorkerBase

from kvtier.config import ModelIdentity
from kvtier.engines.checkpoint import (
    CheckpointFile,
    Fingerprint,
    FingerprintJob,
    find_files,
    fingerprint_checkpoint,
    require_started_after,
    require_unchanged,
)
from kvtier.engines.vllm.engine_watch import Executor
from kvtier.engines.vllm.loaded_weights import Origin, Weights, digest_model
from kvtier.engines.vllm.named_fields import has_no_weights, name_fields, without_credentials
from kvtier.errors import ConfigError, FingerprintError

logger = logging.getLogger(__name__)

FORMATS_IN_FILES = frozenset(
    {
        "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "bitsandbytes", "gguf",
        "sharded_state", "runai_streamer", "runai_streamer_sharded",
    }
)  # fmt: skip
"""Values of --load-format that load the files of the model's folder only. Not among them: "npcache", which prefers its
own copy, "tensorizer", "ipc_cache", "modelexpress", and the formats of plug-ins."""

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A commit, which names one state of a repository; branches and tags can move."""

NOT_READ = "not read here"
"""Replaces the fingerprint of files where none is needed."""

ENGINE_PROCESS = "EngineCore"
"""Prefix of the name of the process that vLLM starts for one engine, before it loads the weights."""


@dataclass(frozen=True, slots=True)
class WeightsName:
    """The name of a model's weights.

    Attributes:
        text: the name.
        is_of_bytes: whether it says every byte, so that what the model is called does not matter.
        ambiguity: why other weights could get the same name; empty when none can.
        fingerprint: of the files that were read; None when none were.
    """

    text: str
    is_of_bytes: bool = False
    ambiguity: str = ""
    fingerprint: Fingerprint | None = None


class RunningFingerprints:
    """Fingerprint jobs of this process that are not used yet, by engine and folder.

    Mutable is the dictionary of jobs; a lock guards it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, str, Path], FingerprintJob] = {}

    def start(self, vllm_config: VllmConfig, place: Path, label: str) -> FingerprintJob:
        """Return the job that reads a checkpoint for an engine; start it if there is none."""
        # Per process, because threads do not survive a fork; per engine, because files may have changed since another
        # start.
        key = os.getpid(), str(getattr(vllm_config, "instance_id", "")), place
        with self._lock:
            if key not in self._jobs:
                self._jobs[key] = FingerprintJob(place, label)
            return self._jobs[key]

    def forget(self) -> None:
        """Forget all jobs, so that the next engine of this process reads the files again."""
        with self._lock:
            self._jobs.clear()


_running = RunningFingerprints()


def start_fingerprints(vllm_config: VllmConfig) -> None:
    """Start to read the weights in the background; ``make_model_identity`` waits for the result."""
    for _, model_config, load_config in models_of(vllm_config):
        place = find_checkpoint(model_config, load_config)
        if place is not None:
            _running.start(vllm_config, place, str(model_config.model))


def make_model_identity(
    vllm_config: VllmConfig, *, outlives_engine: bool = False, reads_files: bool = True
) -> ModelIdentity:
    """Return the identity of weights and configuration. Waits until all weights are read.

    Args:
        vllm_config: the engine's configuration.
        outlives_engine: whether blocks outlive the engine; then no other weights may ever have this identity.
        reads_files: whether the fingerprint of files is part of it.

    Raises:
        FingerprintError: a file cannot be read, or changed while the engine started.
        ConfigError: blocks outlive the engine, and the identity of the weights is ambiguous.
    """
    model_config = vllm_config.model_config
    names: list[WeightsName] = []
    parts: list[str] = []
    try:
        for role, model, load_config in models_of(vllm_config):
            name = describe_weights(vllm_config, model, load_config, reads_files=reads_files)
            if outlives_engine:
                require_unambiguous(role, model, name)
            names.append(name)
            # The layers of a draft model have KV too, in the same blocks.
            called = "" if name.is_of_bytes else f"{called_by(model)} "
            parts.append(name.text if role == "model" else f"{role} {called}{name.text}")
    finally:
        _running.forget()
    text, is_of_bytes = "; ".join(parts), names[0].is_of_bytes
    canonical = describe_configuration(vllm_config)
    return ModelIdentity(
        name=called_by(model_config),
        revision=str(model_config.revision or "") if is_of_bytes else text,
        dtype=str(model_config.dtype),
        config_digest=hashlib.sha256(canonical.encode()).hexdigest(),
        config_json=canonical,
        weights=text if is_of_bytes else "",
    )


def describe_configuration(vllm_config: VllmConfig) -> str:
    """Return what the configuration says of the bytes, as JSON.

    With a field that no other engine can be known to have, it is that of this start alone.
    """
    words, unstable = name_fields(vllm_config)
    if unstable:
        # Drawn for each start: an engine_id can be given, and the same function may do something else tomorrow.
        words = {**words, "of_one_start": secrets.token_hex(16)}
        logger.warning(
            "%s: what it is set to has no form that another process can compare, so only this start of the engine "
            "uses its blocks; set it to plain values to share them",
            ", ".join(unstable),
        )
    return json.dumps(words, sort_keys=True)


class LoadedWeightsNamer:
    """Names weights that were loaded in place, by the files that they were read from or by their bytes in memory.

    Everything else of the identity is as at the start: vLLM loads weights into the model that it has built. Equal bytes
    of another folder have an equal identity, also in what people call the model.

    Args:
        vllm_config: the engine's configuration.
        started: the identity at the start.
    """

    def __init__(self, vllm_config: VllmConfig, started: ModelIdentity) -> None:
        model_config = vllm_config.model_config
        self._started = started
        self._place = find_checkpoint(model_config, vllm_config.load_config)
        self._is_in_files = format_of(vllm_config.load_config) in FORMATS_IN_FILES
        # Kernels of quantised models keep weights elsewhere, and balanced experts move.
        is_balanced = bool(getattr(vllm_config.parallel_config, "enable_eplb", False))
        self._shows_all = model_config.quantization is None and not is_balanced
        self._has_foreign_code = bool(find_foreign_code(model_config))
        self._before: tuple[CheckpointFile, ...] = ()

    def before_load(self, path: str) -> None:
        """Note the state of the files in a folder, or of those of the start, which will be read now."""
        place = self._place_of(path)
        self._before = () if place is None else _list_files(place)

    def name(self, weights: Weights, executor: Executor) -> ModelIdentity | None:
        """Return the identity; None when nothing names the weights. Blocks while they are read."""
        if self._has_foreign_code or weights.origin not in (Origin.FILES, Origin.TRANSFER):
            return None
        text = self._name_files(weights.path) if weights.origin is Origin.FILES else ""
        if not text and self._shows_all:
            text = join_digests(executor.collective_rpc(digest_weights))
        if not text:
            return None
        # A draft model keeps the weights of the start.
        _, separator, drafts = (self._started.weights or self._started.revision).partition("; ")
        return replace(self._started, weights=f"{text}{separator}{drafts}")

    def _name_files(self, path: str) -> str:
        """Return the fingerprint of a folder; empty if files have changed since ``before_load``, or cannot be read."""
        place = self._place_of(path)
        if place is None:
            return ""
        try:
            fingerprint = fingerprint_checkpoint(place)
            require_unchanged(fingerprint.files)
        except FingerprintError as error:
            logger.warning("the files of the weights do not name them: %s", error)
            return ""
        return fingerprint.text if fingerprint.files == self._before else ""

    def _place_of(self, path: str) -> Path | None:
        if not self._is_in_files:
            return None
        if not path:
            return self._place
        return Path(path) if Path(path).exists() else None


def digest_weights(worker: WorkerBase) -> str:
    """Return a digest of the weights in a worker's memory. Runs in the worker's process."""
    return digest_model(worker.model_runner.get_model())


def join_digests(digests: Sequence[str]) -> str:
    """Return one name for the weights of all workers; empty when one of them cannot see its own. Pure."""
    if not all(digests):
        return ""
    return f"blake3-in-memory:{hashlib.sha256(' '.join(digests).encode()).hexdigest()}"


def _list_files(place: Path) -> tuple[CheckpointFile, ...]:
    try:
        return find_files(place)
    except FingerprintError:
        return ()


def models_of(vllm_config: VllmConfig) -> Iterator[tuple[str, ModelConfig, LoadConfig]]:
    """Yield role, model and how it is loaded: the model itself, then a draft model. Pure."""
    yield "model", vllm_config.model_config, vllm_config.load_config
    speculative = vllm_config.speculative_config
    draft_config = getattr(speculative, "draft_model_config", None)
    if draft_config is not None and not has_no_weights(speculative):
        yield (
            "draft",
            draft_config,
            getattr(speculative, "draft_load_config", None) or vllm_config.load_config,
        )


def describe_weights(
    vllm_config: VllmConfig, model_config: ModelConfig, load_config: LoadConfig, *, reads_files: bool
) -> WeightsName:
    """Return the name of a model's weights and of the code that comes with them.

    Raises:
        FingerprintError: a file cannot be read.
    """
    foreign_code = find_foreign_code(model_config)
    if format_of(load_config) == "dummy":
        ambiguity = "the code that comes with the model is not read" if _runs_own_code(model_config) else ""
        return WeightsName(
            f"random-weights-of-seed:{model_config.seed}", is_of_bytes=True, ambiguity=ambiguity
        )
    place = find_checkpoint(model_config, load_config)
    if place is not None and not reads_files:
        return WeightsName(NOT_READ, is_of_bytes=True, ambiguity=foreign_code)
    if place is not None:
        fingerprint = _running.start(vllm_config, place, str(model_config.model)).wait()
        require_unchanged(fingerprint.files)
        if fingerprint.text:
            return WeightsName(
                fingerprint.text, is_of_bytes=True, ambiguity=foreign_code, fingerprint=fingerprint
            )
    return name_unread_weights(vllm_config, model_config, load_config, foreign_code)


def name_unread_weights(
    vllm_config: VllmConfig, model_config: ModelConfig, load_config: LoadConfig, foreign_code: str
) -> WeightsName:
    """Return the commit, else the user's --revision, else a name that only this engine has."""
    is_from_hub = is_hub_name(model_config) and format_of(load_config) in FORMATS_IN_FILES
    commit = getattr(model_config.hf_config, "_commit_hash", None) if is_from_hub else None
    if commit:
        return WeightsName(str(commit), ambiguity=foreign_code)
    revision = model_config.revision
    if revision:
        is_movable = is_from_hub and not COMMIT.fullmatch(str(revision))
        ambiguity = (
            f"--revision {revision} is not a commit and may move to other weights" if is_movable else ""
        )
        return WeightsName(str(revision), ambiguity=ambiguity or foreign_code)
    engine_id = vllm_config.kv_transfer_config.engine_id
    logger.warning(
        "the weights of %s have no identity: only engine_id %s uses its blocks; give --revision to share them",
        called_by(model_config),
        engine_id,
    )
    ambiguity = (
        f"its weights cannot be read (load format {format_of(load_config)!r}), and have no other identity"
    )
    return WeightsName(f"unidentified-weights-of-engine:{engine_id}", ambiguity=ambiguity)


def require_unambiguous(role: str, model_config: ModelConfig, name: WeightsName) -> None:
    """Refuse weights whose name other weights could get, for tiers that outlive the engine.

    Raises:
        ConfigError: the name is ambiguous.
        FingerprintError: a file changed after the engine's process had started, so it may differ from the loaded one.
    """
    if name.ambiguity:
        flag = "--revision (and --code-revision)" if role == "model" else '"revision" in --speculative-config'
        remedy = (
            f"{name.ambiguity}: give {flag} the commit, or where there is none a name that no other weights will ever "
            "have; or download the model into a folder; or leave secondary_tiers out"
        )
        raise ConfigError("model", called_by(model_config), remedy)
    is_own_process = multiprocessing.current_process().name.startswith(ENGINE_PROCESS)
    if name.fingerprint is None or not is_own_process or is_hub_name(model_config):
        return
    require_started_after(name.fingerprint.files)


def find_checkpoint(model_config: ModelConfig, load_config: LoadConfig) -> Path | None:
    """Return the local folder or file of all loaded bytes of a model; None when they are not on a local disk."""
    if format_of(load_config) not in FORMATS_IN_FILES or _is_in_bucket(model_config):
        return None
    place = Path(str(model_config.model))
    return place if place.exists() else find_snapshot(model_config, load_config)


def find_snapshot(model_config: ModelConfig, load_config: LoadConfig) -> Path | None:
    """Return the folder of the hub's cache that vLLM loads a model from, or None; uses no network."""
    if envs.VLLM_USE_MODELSCOPE:  # ModelScope has another cache, where another state may have the same name
        return None
    try:
        folder = huggingface_hub.snapshot_download(
            str(model_config.model),
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError):  # not in the cache, or not a valid name of a repository
        return None
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    # Configuration and weights are fetched one after the other; a branch may have moved in between.
    return Path(folder) if commit in (None, Path(folder).name) else None


def find_foreign_code(model_config: ModelConfig) -> str:
    """Return the ambiguity when code of another repository runs in the engine without a fixed commit. Pure."""
    if not getattr(model_config, "trust_remote_code", False):
        return ""
    classes = getattr(model_config.hf_config, "auto_map", None) or {}
    repositories = {str(name).partition("--")[0] for name in classes.values() if "--" in str(name)}
    foreign = repositories - {str(model_config.model)}
    if not foreign or COMMIT.fullmatch(str(getattr(model_config, "code_revision", None))):
        return ""
    return f"it runs code of {', '.join(sorted(foreign))} without a fixed commit"


def called_by(model_config: ModelConfig) -> str:
    """Return what a model is called, for people: its name, path or URL, without credentials. Pure."""
    # Of a model in a bucket vLLM has only the configuration in a folder of its own.
    return without_credentials(str(getattr(model_config, "model_weights", None) or model_config.model))


def format_of(load_config: LoadConfig) -> str:
    """Return the load format in lower case; in some releases it is an enum. Pure."""
    return str(load_config.load_format).rpartition(".")[2].lower()


def is_hub_name(model_config: ModelConfig) -> bool:
    """Return whether a model is named as a hub names it, not by a path or URL."""
    name = str(model_config.model)
    return "://" not in name and not _is_in_bucket(model_config) and not Path(name).exists()


def _is_in_bucket(model_config: ModelConfig) -> bool:
    """Return whether the weights are in a bucket; vLLM then has only the configuration in the model's folder."""
    return bool(getattr(model_config, "model_weights", None))


def _runs_own_code(model_config: ModelConfig) -> bool:
    has_classes = bool(getattr(model_config.hf_config, "auto_map", None))
    return bool(getattr(model_config, "trust_remote_code", False)) and has_classes
