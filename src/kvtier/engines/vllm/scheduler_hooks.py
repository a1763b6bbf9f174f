"""The hooks that vLLM calls in its scheduler's process; each calls the scheduler half of ``kvtier.connector``.

``kvtier.connector.protocols``, which is modelled on vLLM, has the order and the promises of these calls, so vLLM's own
objects are passed on unchanged. ``AdapterSalts`` identifies LoRA adapters: vLLM's content hashes contain an adapter's
name and, from 0.31 on, its path, and either may stand for other weights later. So the keys of such a request are salted
with a fingerprint of every byte of the adapter's files, which threads read while the request waits. A request whose
adapter has no readable files is not offloaded. Likewise a client may give an image a name of his own, which the content
hashes contain in place of the image's; keys of such a request are salted with random bytes of this process.

Source: ``KVConnectorBase_V1`` of vLLM 0.28 to 0.33.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.connector.common import OffloadingConnectorMetadata, StopReason
from kvtier.connector.offloading_connector import OffloadingConnector
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.checkpoint import FileStamp, Fingerprint, FingerprintJob, find_files
from kvtier.engines.vllm import compat
from kvtier.engines.vllm.compat import HitSources, name_hit_sources
from kvtier.engines.vllm.engine_watch import EngineWatch
from kvtier.engines.vllm.events import translate_events
from kvtier.errors import ControlError
from kvtier.misses import Miss, MissCause
from kvtier.observe.control_commands import NO_EXTRAS, ExtrasHasher, PromptExtras
from kvtier.observe.spans import RequestSpans
from kvtier.redaction import shorten
from kvtier.tenants import salt_hash

logger = logging.getLogger(__name__)

Signature = tuple[tuple[str, FileStamp], ...]
"""Name and state of each file of an adapter; equal signatures mean unchanged files."""

WEIGHTS_CHANGED = Miss(
    MissCause.LIMITED, "", MappingProxyType({"reason": "weights changed under the device's prefix cache"})
)
"""Why requests are left alone until the device's prefix cache has been reset."""

NO_SALT = b""
"""The salt of a request without an adapter."""

MEDIA_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""What vLLM's own hasher of images gives (BLAKE3, SHA-256 or SHA-512). Anything else is a name that a client gave."""

DEADLINE_S = 60.0
"""How long a request waits for its adapter's fingerprint; after that vLLM serves it without kvtier. vLLM reads the same
bytes before it can compute the request, so a deadline shorter than a slow disk needs only loses hits."""


class SchedulerHooks:
    """The hooks of KVTierConnector in the scheduler's process. Used from the scheduler's thread."""

    _connector: OffloadingConnector
    _kv_cache_config: KVCacheConfig
    engine_watch: EngineWatch

    def __init__(self) -> None:
        self._adapter_salts = AdapterSalts(newest_ns=time.time_ns())
        self._process_salt = secrets.token_bytes(32)
        self._trusts_client_names = False
        self._spans: RequestSpans | None = None  # none before the first request that has trace headers

    @property
    def _scheduler(self) -> OffloadingConnectorScheduler:
        scheduler = self._connector.connector_scheduler
        assert scheduler is not None, "a hook of the scheduler was called on a worker"
        return scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no consumer waits for a store, so a lost store is only a later miss."""
        return False

    def on_new_request(self, request: Request) -> None:
        """Record the request's arrival if requests are recorded, and its trace headers if it has some."""
        if request.trace_headers:
            if self._spans is None:
                block_tokens = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
                self._spans = RequestSpans(block_tokens, self._scheduler.records.num_requests)
            self._spans.note_request(request.request_id, request.trace_headers)
        if self._scheduler.recorder is not None:
            self._scheduler.recorder.on_arrival(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those on the device; None makes vLLM call again later."""
        if self.engine_watch.is_held or not self.is_offloadable(request):
            key_salt = None
        elif self._adapter_salts.is_ready(request):
            key_salt = self._adapter_salts.salt_of(request)
            # Within one process a client's name stands for one image in vLLM's own caches too.
            if key_salt is not None and has_client_names(request) and not self._trusts_client_names:
                key_salt = hashlib.sha256(self._process_salt + key_salt).digest()
        else:
            return None, False
        if key_salt is None:
            why = WEIGHTS_CHANGED if self.engine_watch.is_held else why_left_alone(request)
            self._scheduler.records.exclude(request, num_computed_tokens, why)
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens, key_salt)

    def is_offloadable(self, request: Request) -> bool:
        """Return whether blocks of this request may be loaded and stored.

        Excluded are requests that must not read a prefix cache (before 0.31 vLLM calls for them too) and sessions,
        which remove tokens whose hashes were published.
        """
        return not (request.skip_reading_prefix_cache or request.resumable)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return every KV group: a load fills each device block allocated for it, so none must be zeroed."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start the load of a request whose device blocks are allocated."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> HitSources:
        """Return the tokens of a load by tier, for vLLM's statistics."""
        return name_hit_sources(self._scheduler.get_tokens_by_tier(request.request_id, num_external_tokens))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return the workers' work of this step."""
        metadata = self._scheduler.build_connector_meta(scheduler_output)
        if scheduler_output.num_scheduled_tokens or metadata.load_jobs:
            self.engine_watch.on_step()
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the workers' reports."""
        self._scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request; its device blocks may be freed at once."""
        freed = self._scheduler.request_finished(request, stop_of(request))
        if self._spans is not None:
            # vLLM makes its own span in another process and takes no attributes: this one stands beside it.
            if self._spans.is_active:
                records = self._scheduler.records
                self._spans.export(records.latest, records.num_requests)
            self._spans.forget(request.request_id)
        return freed

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Forget a request of a model with several KV groups."""
        del block_ids
        return self.request_finished(request, [])

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return which blocks can be loaded, or no longer, since the last call, for vLLM's publisher."""
        return translate_events(self._scheduler.take_events())

    def has_pending_push_work(self) -> bool:
        """Return whether an idle engine must keep stepping, a thousand times a second."""
        return self._connector.has_pending_push_work()

    def reset_cache(self) -> bool:
        """Forget every block, so that none stored before is found again, unless it is the engine that falls asleep."""
        self.engine_watch.on_reset()
        return True


@dataclass(frozen=True, slots=True)
class AdapterFingerprint:
    """The fingerprint of an adapter, complete or in progress.

    Attributes:
        job: the job that reads its files.
        start_s: when the job started.
    """

    job: FingerprintJob
    start_s: float


class KnownAdapter(NamedTuple):
    """An adapter of a request.

    Attributes:
        lora_request: vLLM's description of it.
        salt: of the keys of its blocks.
    """

    lora_request: object
    salt: bytes


class AdapterSalts:
    """Fingerprints each adapter once, at its first request, and refuses an adapter whose files change later.

    After a change vLLM may use the weights in memory or read the new ones, and does not report which. So the content of
    the adapter's blocks is unknown until the next start of the engine. For the same reason an adapter is refused whose
    files changed after the engine started and before its first request.

    Args:
        newest_ns: latest time of change of a file, the engine's start; None allows any.
        clock_s: seconds, monotonic.
        read: starts to read the adapter in a folder; its second argument is a label for the log.
    """

    def __init__(
        self,
        newest_ns: int | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        read: Callable[[Path, str], FingerprintJob] = FingerprintJob,
    ) -> None:
        self._newest_ns = newest_ns
        self._clock_s = clock_s
        self._read = read
        self._fingerprints: dict[str, AdapterFingerprint] = {}
        self._refused: set[str] = set()
        self._known: dict[str, KnownAdapter] = {}

    def is_ready(self, request: Request) -> bool:
        """Return whether ``salt_of`` returns at once; start to read a new adapter."""
        path = _path_of(request)
        if path is None or path in self._refused:
            return True
        pending = self._fingerprint_of(path)
        return pending.job.is_done or self._is_overdue(pending)

    def salt_of(self, request: Request) -> bytes | None:
        """Return the salt of a request's keys; None when its blocks must not be offloaded. May wait for the files.

        Args:
            request: a request of vLLM.
        """
        path = _path_of(request)
        if path is None:
            return NO_SALT
        if path in self._refused:
            return None
        try:
            salt = self._salt_at(path, request)
            if salt is not None:
                self._known[_name_of(request)] = KnownAdapter(request.lora_request, salt)
            return salt
        except OSError as error:
            self._known.pop(_name_of(request), None)
            self._refused.add(path)
            logger.warning("requests of adapter %r are not offloaded any more: %s", path, error)
            return None

    def known(self, name: str) -> "KnownAdapter | None":
        """Return an adapter that requests have used, by its name. Thread: any, by one read of a dictionary."""
        return self._known.get(name)

    def _salt_at(self, path: str, request: Request) -> bytes | None:
        """Return the salt of an adapter whose files have not changed since its first request."""
        pending = self._fingerprint_of(path)
        if not pending.job.is_done and self._is_overdue(pending):
            return None
        fingerprint = pending.job.wait()
        if not fingerprint.text:
            raise FileNotFoundError(f"{path} holds no weights")
        if getattr(request.lora_request, "tensorizer_config_dict", None):
            raise FileNotFoundError(f"{path} is loaded with tensorizer, whose files kvtier does not read")
        newest_ns = max(file.stamp.ctime_ns for file in fingerprint.files)
        if self._newest_ns is not None and newest_ns > self._newest_ns:
            raise FileExistsError(
                f"its files have changed since the engine started ({path}), and vLLM may have loaded it before: "
                "start the engine again"
            )
        if _sign(Path(path)) != _signature_of(fingerprint):
            raise FileExistsError(f"its files have changed while the engine runs ({path})")
        is_3d = bool(getattr(request.lora_request, "is_3d_lora_weight", False))
        return hashlib.sha256(f"{fingerprint.text} {is_3d}".encode()).digest()

    def _fingerprint_of(self, path: str) -> AdapterFingerprint:
        if path not in self._fingerprints:
            self._fingerprints[path] = AdapterFingerprint(
                self._read(Path(path), f"adapter {path}"), self._clock_s()
            )
        return self._fingerprints[path]

    def _is_overdue(self, pending: AdapterFingerprint) -> bool:
        return self._clock_s() - pending.start_s > DEADLINE_S


NO_ADAPTER = KnownAdapter(None, b"")


class VLLMPromptHasher(ExtrasHasher):
    """Names the blocks of a prompt as vLLM does, for operators who give it by its token ids.

    Besides those the names depend on ``cache_salt`` and adapter; images and embeddings cannot be named here.

    Args:
        vllm_config: the engine's.
        hash_block_tokens: tokens that one content hash covers.
        adapters: those that requests have used.
    """

    def __init__(self, vllm_config: VllmConfig, hash_block_tokens: int, adapters: AdapterSalts) -> None:
        self._vllm_config = vllm_config
        self._hash_block_tokens = hash_block_tokens
        self._adapters = adapters

    def __call__(self, token_ids: Sequence[int], extras: PromptExtras = NO_EXTRAS) -> list[bytes]:
        adapter = self._adapters.known(extras.adapter) if extras.adapter else NO_ADAPTER
        if adapter is None:
            raise ControlError(
                f"adapter={shorten(extras.adapter)}: no request has used it since the engine's start, or its files "
                "cannot be read: send one first"
            )
        hashes = compat.hash_prompt(
            self._vllm_config,
            self._hash_block_tokens,
            token_ids,
            extras.cache_salt or None,
            adapter.lora_request,
        )
        return [salt_hash(block_hash, adapter.salt) for block_hash in hashes] if adapter.salt else hashes


def has_client_names(request: Request) -> bool:
    """Return whether a client has named an image, sound or video of a request, instead of vLLM by its bytes. Pure."""
    # The identifier has the adapter's name before the hash where an adapter changes what an image is encoded to.
    names = [one.mm_hash or one.identifier for one in getattr(request, "mm_features", None) or ()]
    return not all(MEDIA_DIGEST.fullmatch(name) for name in names)


def stop_of(request: Request) -> StopReason:
    """Return why a request ended, for a recorded trace; a tool call counts as the end of a turn. Pure."""
    is_end = request.status is RequestStatus.FINISHED_STOPPED
    return StopReason.END_TURN if is_end else StopReason.UNKNOWN


def why_left_alone(request: Request) -> Miss:
    """Return why a request is neither looked up nor stored. Pure."""
    if request.skip_reading_prefix_cache:
        params = request.sampling_params
        wants_logprobs = params is not None and params.prompt_logprobs is not None
        reason = "prompt_logprobs" if wants_logprobs else "skips the prefix cache"
    elif request.resumable:
        reason = "resumable session"
    else:
        reason = "adapter without readable files"
    return Miss(MissCause.LIMITED, "", MappingProxyType({"reason": reason}))


def _path_of(request: Request) -> str | None:
    adapter = getattr(request, "lora_request", None)
    return None if adapter is None else str(adapter.lora_path)


def _name_of(request: Request) -> str:
    return str(getattr(request.lora_request, "lora_name", ""))


def _sign(folder: Path) -> Signature:
    return tuple((file.name, file.stamp) for file in find_files(folder))


def _signature_of(fingerprint: Fingerprint) -> Signature:
    return tuple((file.name, file.stamp) for file in fingerprint.files)
