"""Which adapter's weights made the blocks of a request.

It loads no weights. vLLM's content hashes know an adapter by its name and, from 0.31, its path, and either may stand
for other weights tomorrow, in this process or in the next one that reads the same disk. So the keys of such a
request are salted with a fingerprint of the adapter's files; one whose adapter has no readable files is not offloaded.
"""

import hashlib
import logging
from collections.abc import Iterable
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
from kvtier.engines.vllm.compat import HitSources, name_hit_sources
from kvtier.engines.vllm.identity import fingerprint_checkpoint

logger = logging.getLogger(__name__)

Signature = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file of an adapter; while it is equal the files are taken for unchanged."""

NO_SALT = b""
"""The salt of a request without an adapter."""

CONFIG_NAME = "adapter_config.json"
"""Holds the scaling of the adapter, which changes its effect without changing a weight."""


class AdapterSalts:
    """Fingerprints each adapter once, when a request first names it; one whose files change afterwards is given up.

    vLLM may go on with the weights it has in memory, or read the new ones when it likes: it does not say which, so
    from then on nobody knows what a block of that adapter holds. The next start of the engine does.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Signature, bytes]] = {}
        self._refused: set[str] = set()

    def salt_of(self, request: Request) -> bytes | None:
        """Return the salt of a request's keys; None when its blocks must not be offloaded.

        Args:
            request: one of vLLM's.
        """
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return NO_SALT
        path = str(adapter.lora_path)
        if path in self._refused:
            return None
        try:
            return self._salt_at(path)
        except OSError as error:
            self._refused.add(path)
            logger.warning("from here on no request of adapter %r is offloaded: %s", path, error)
            return None

    def _salt_at(self, path: str) -> bytes:
        """Return the salt of an adapter whose files are what they were when they were first seen."""
        folder = Path(path)
        signature = tuple(sorted(_describe(file) for file in folder.iterdir() if file.is_file()))
        if path not in self._known:
            self._known[path] = signature, _fingerprint(folder)
        first_signature, salt = self._known[path]
        if signature != first_signature:
            raise FileExistsError(f"its files have changed while the engine runs ({folder})")
        return salt


def _fingerprint(folder: Path) -> bytes:
    weights = fingerprint_checkpoint(folder)
    if not weights:
        raise FileNotFoundError(f"{folder} holds no weights")
    settings = (folder / CONFIG_NAME).read_bytes() if (folder / CONFIG_NAME).exists() else b""
    return hashlib.sha256(weights.encode() + b"\0" + settings).digest()


def _describe(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns


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
        self._adapter_salts = AdapterSalts()
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
        key_salt = self._adapter_salts.salt_of(request) if self.is_offloadable(request) else None
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
