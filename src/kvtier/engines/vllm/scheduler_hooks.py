"""The hooks that vLLM calls in its scheduler's process: one hook, one call to the scheduler half.

They decide nothing and see no tensor. What vLLM calls when, and with what promises, stands in
``kvtier.connector.protocols``, which is modelled on it, so vLLM's own objects are handed on unchanged.

Source: ``KVConnectorBase_V1`` of vLLM 0.28 to 0.32.
"""

from collections.abc import Iterable

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.connector.common import OffloadingConnectorMetadata
from kvtier.connector.offloading_connector import OffloadingConnector
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.connector.trace_line import StopReason
from kvtier.engines.vllm.adapters import AdapterSalts
from kvtier.engines.vllm.compat import HitSources, name_hit_sources
from kvtier.engines.vllm.events import translate_events


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
            self._scheduler.recorder.note_arrival(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded beyond those on the device; None asks to be asked again."""
        key_salt = self._adapter_salts.salt_of(request) if self.is_offloadable(request) else None
        if key_salt is None:
            # Blocks of its own it has none, but it may share those of a load that is not there yet.
            is_early = self._scheduler.layerwise.shares_blocks(request, num_computed_tokens)
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
        sources = self._scheduler.get_hit_sources(request.request_id, num_external_tokens)
        return name_hit_sources(sources)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return what the workers have to do in this step."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers reported.

        vLLM has put the blocks of a load by layer into its prefix cache, and computes in place what failed. Were the
        request aborted or pre-empted before that, others would find the wrong bytes there: they are forgotten first.
        """
        self._scheduler.update_connector_output(connector_output)
        spoiled_blocks = self._scheduler.layerwise.take_spoiled_blocks()
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
