"""Which adapter's weights made the blocks of a request.

It loads no weights. vLLM's content hashes know an adapter by its name and, from 0.31, its path, and either may stand
for other weights tomorrow, in this process or in the next one that reads the same disk. So the keys of such a
request are salted with a fingerprint of every byte of the adapter's files, which threads read while the request
waits; one whose adapter has no readable files is not offloaded.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm.distributed import kv_events
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.connector.common import (
    BlockRemoved,
    BlockStored,
    OffloadingConnectorMetadata,
    StopReason,
)
from kvtier.connector.offloading_connector import OffloadingConnector
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.engines.checkpoint import FileStamp, Fingerprint, FingerprintJob, find_files
from kvtier.engines.vllm.compat import HitSources, name_hit_sources

logger = logging.getLogger(__name__)

Signature = tuple[tuple[str, FileStamp], ...]
"""Name and state of each file of an adapter; while it is equal the files are taken for unchanged."""

NO_SALT = b""
"""The salt of a request without an adapter."""

CONFIG_NAME = "adapter_config.json"
"""Holds the scaling of the adapter, which changes its effect without changing a weight."""

DEADLINE_S = 60.0
"""How long a request waits for its adapter to be read, and is then served without kvtier. vLLM reads the same bytes
before it can compute the request, so a shorter time than a slow disk takes only loses hits."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An adapter that is being read, or has been."""

    job: FingerprintJob
    began_s: float


class AdapterSalts:
    """Fingerprints each adapter once, when a request first names it; one whose files change afterwards is given up.

    vLLM may go on with the weights it has in memory, or read the new ones when it likes: it does not say which, so
    from then on nobody knows what a block of that adapter holds. The next start of the engine does. For the same
    reason an adapter is given up whose files changed before a request first named it but after the engine started.

    Args:
        newest_ns: time of change that no file may be younger than, the engine's start; None admits any.
        clock_s: measures how long a request waits.
        read: begins to read the adapter in a folder, with a label for the log.
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
        self._readings: dict[str, Reading] = {}
        self._refused: set[str] = set()

    def is_ready(self, request: Request) -> bool:
        """Return whether ``salt_of`` answers at once; begin to read the adapter if it is new."""
        path = _path_of(request)
        if path is None or path in self._refused:
            return True
        reading = self._reading_of(path)
        return reading.job.is_done or self._is_overdue(reading)

    def salt_of(self, request: Request) -> bytes | None:
        """Return the salt of a request's keys; None when its blocks must not be offloaded. May wait for the files.

        Args:
            request: one of vLLM's.
        """
        path = _path_of(request)
        if path is None:
            return NO_SALT
        if path in self._refused:
            return None
        try:
            return self._salt_at(path, request)
        except OSError as error:
            self._refused.add(path)
            logger.warning("from here on no request of adapter %r is offloaded: %s", path, error)
            return None

    def _salt_at(self, path: str, request: Request) -> bytes | None:
        """Return the salt of an adapter whose files are what they were when they were first seen."""
        reading = self._reading_of(path)
        if not reading.job.is_done and self._is_overdue(reading):
            return None
        fingerprint = reading.job.wait()
        if not fingerprint.text:
            raise FileNotFoundError(f"{path} holds no weights")
        if getattr(request.lora_request, "tensorizer_config_dict", None):
            raise FileNotFoundError(f"{path} is loaded with tensorizer, from files that kvtier does not know")
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

    def _reading_of(self, path: str) -> Reading:
        if path not in self._readings:
            self._readings[path] = Reading(self._read(Path(path), f"adapter {path}"), self._clock_s())
        return self._readings[path]

    def _is_overdue(self, reading: Reading) -> bool:
        return self._clock_s() - reading.began_s > DEADLINE_S


def _path_of(request: Request) -> str | None:
    adapter = getattr(request, "lora_request", None)
    return None if adapter is None else str(adapter.lora_path)


def _sign(folder: Path) -> Signature:
    return tuple((file.name, file.stamp) for file in find_files(folder))


def _signature_of(fingerprint: Fingerprint) -> Signature:
    return tuple((file.name, file.stamp) for file in fingerprint.files)


def translate_events(events: Iterable[BlockStored | BlockRemoved]) -> list[kv_events.KVCacheEvent]:
    """Return vLLM's form of each event, in the same order. Pure."""
    return [_translate(event) for event in events]


def _translate(event: BlockStored | BlockRemoved) -> kv_events.KVCacheEvent:
    hashes = [maybe_convert_block_hash(BlockHash(block_hash)) for block_hash in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return kv_events.BlockRemoved(block_hashes=hashes, medium=event.medium)
    return kv_events.BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=event.block_size,
        lora_id=None,
        medium=event.medium,
        lora_name=None,
    )


class SchedulerHooks:
    """Half of KVTierConnector. Used from the scheduler's thread."""

    _connector: OffloadingConnector
    _kv_cache_config: KVCacheConfig

    def __init__(self) -> None:
        self._adapter_salts = AdapterSalts(newest_ns=time.time_ns())
        self._block_pool: BlockPool | None = None
        self._can_wait_by_layer = False

    @property
    def _scheduler(self) -> OffloadingConnectorScheduler:
        scheduler = self._connector.connector_scheduler
        assert scheduler is not None, "a hook of the scheduler was called on a worker"
        return scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nobody waits for what is stored, so a lost store is a miss later and nothing else."""
        return False

    def on_new_request(self, request: Request) -> None:
        """Note when the request came, if requests are recorded; otherwise it is known from its first search on."""
        if self._scheduler.recorder is not None:
            self._scheduler.recorder.on_arrival(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded beyond those on the device; None asks to be asked again."""
        if not self.is_offloadable(request):
            key_salt = None
        elif self._adapter_salts.is_ready(request):
            key_salt = self._adapter_salts.salt_of(request)
        else:
            return None, False
        if key_salt is None:
            # Blocks of its own it has none, but it may share those of a load that is not there yet.
            layerwise = self._scheduler.layerwise
            is_early = layerwise is not None and layerwise.shares_blocks(request, num_computed_tokens)
            return None if is_early else 0, False
        return self._scheduler.get_num_new_matched_tokens(
            request,
            num_computed_tokens,
            key_salt,
            can_wait_by_layer=self._can_wait_by_layer and self._block_pool is not None,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool of device blocks, whose prefix cache must forget what a failed load has spoiled."""
        self._block_pool = gpu_block_pool

    def is_offloadable(self, request: Request) -> bool:
        """Return whether blocks of this request may be loaded and stored; one that is never searched is neither.

        Left alone are requests that must not read a prefix cache (vLLM asks all the same before 0.31) and sessions,
        which take back tokens whose hashes were handed out.
        """
        return not (request.skip_reading_prefix_cache or request.resumable)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return every KV group: a load fills each device block that is allocated for it, so none need be zeroed."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Begin the load of a request whose device blocks are allocated."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> HitSources:
        """Say, for vLLM's statistics, which tiers the tokens of a load come from."""
        return name_hit_sources(self._scheduler.get_tokens_by_tier(request.request_id, num_external_tokens))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return what the workers have to do in this step."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers reported.

        vLLM has put the blocks of a load by layer into its prefix cache, and computes in place what failed. Were the
        request aborted or pre-empted before that, others would find the wrong bytes there: they are forgotten first.
        """
        self._scheduler.update_connector_output(connector_output)
        layerwise = self._scheduler.layerwise
        spoiled_blocks = None if layerwise is None else layerwise.take_spoiled_blocks()
        if spoiled_blocks and self._block_pool is not None:
            self._block_pool.evict_blocks(spoiled_blocks)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request; its device blocks may be freed at once."""
        return self._scheduler.request_finished(request, stop_of(request))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Forget a request of a model with several KV groups."""
        return self._scheduler.request_finished(request, stop_of(request))

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return, for vLLM's publisher, what tiers have gained and lost since the last call."""
        return translate_events(self._scheduler.take_events())

    def has_pending_push_work(self) -> bool:
        """Return True while an idle engine must go on stepping, a thousand times a second."""
        return self._connector.has_pending_push_work()

    def reset_cache(self) -> bool:
        """Forget every block; nothing stored before is found again."""
        self._scheduler.reset()
        return True


def stop_of(request: Request) -> StopReason:
    """Return why a request ended, for a recorded trace; a call of a tool ends like any turn here. Pure."""
    is_end = request.status is RequestStatus.FINISHED_STOPPED
    return StopReason.END_TURN if is_end else StopReason.UNKNOWN
