"""Whether vLLM, as it is set up, can compute a request while kvtier loads it layer by layer.

It loads nothing. vLLM calls ``wait_for_layer_load`` in front of each attention layer, and computes anew what a failed
load has spoiled, but not in every setting. Where it does not, loads run beside the steps as they do by default. What
cannot be read from the configuration, such as a layer whose kernel has no such hook, shows in the first step: a load
whose layers were not all waited for counts as failed.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.connector.common import ConnectorRole
from kvtier.connector.offloading_connector import OffloadingConnector
from kvtier.engines.vllm import compat
from kvtier.engines.vllm.config import make_offloading_config
from kvtier.engines.vllm.groups import names_of_groups
from kvtier.engines.vllm.identity import start_fingerprints
from kvtier.engines.vllm.metrics import KVTierPromMetrics, KVTierStats, StatsClock
from kvtier.engines.vllm.scheduler_hooks import SchedulerHooks
from kvtier.engines.vllm.worker_hooks import WorkerHooks
from kvtier.recording.recorder import open_recorder


def find_obstacle(vllm_config: VllmConfig) -> str | None:
    """Return why no request may compute while it is loaded, and the remedy; None when it may. Pure."""
    if not compat.HAS_BLOCK_POOL_HOOK:
        return f"vLLM {compat.release()} does not let a connector forget blocks: use a later one"
    if vllm_config.scheduler_config.async_scheduling:
        # The next step is planned, and computed, before this one's failed load is known.
        return "with asynchronous scheduling a failed load is known too late: start vLLM with --no-async-scheduling"
    if getattr(vllm_config, "use_v2_model_runner", False):
        # It keeps tokens that the scheduler has taken back after a failed load.
        return "the second model runner cannot take tokens back: start vLLM with VLLM_USE_V2_MODEL_RUNNER=0"
    if vllm_config.speculative_config is not None:
        return (
            "a drafting model reads the cache when the step's loads have been reported: leave speculation out"
        )
    if vllm_config.parallel_config.use_ubatching:
        return "two halves of a batch wait for layers at the same time: leave --enable-dbo out"
    if vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return "a graph of the whole model holds no hook: set cudagraph_mode to PIECEWISE"
    return None


logger = logging.getLogger(__name__)

RECOMPUTE = "recompute"


class KVTierConnector(SchedulerHooks, WorkerHooks, KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV cache in kvtier's tiers; ``kv_connector`` of vLLM's ``--kv-transfer-config``.

    Args:
        vllm_config: the engine's configuration; ``kv_connector_extra_config`` holds kvtier's settings.
        role: whether this is the scheduler's process or a worker's.
        kv_cache_config: the KV groups and device blocks.

    Raises:
        KVTierError: a setting or the model is not supported; one message says which and what to do.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        join_log()
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        SchedulerHooks.__init__(self)
        WorkerHooks.__init__(self)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        config = make_offloading_config(vllm_config, kv_cache_config, role)
        self._connector = (
            OffloadingConnector(config, ConnectorRole.SCHEDULER, open_recorder(config))
            if is_scheduler
            else OffloadingConnector(config, ConnectorRole.WORKER)
        )
        self._stats_clock = StatsClock()
        if is_scheduler:
            recompute_failed_loads(vllm_config)
            self._can_wait_by_layer = self._admits_layerwise(vllm_config)
            self._log_start()

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """Return a worker's transfers since the last call, or now and then the scheduler's counters."""
        worker, scheduler = self._connector.connector_worker, self._connector.connector_scheduler
        if worker is not None:
            stats = worker.drain_stats()
            return None if stats is None else KVTierStats.of_transfers(stats)
        if scheduler is None or not self._stats_clock.is_due():
            return None
        return KVTierStats.of_levels(scheduler.stats())

    def shutdown(self) -> None:
        """End the half that this process runs; idempotent."""
        self._connector.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        """Return statistics that came from another process as plain ``data``."""
        return KVTierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> KVTierPromMetrics:
        """Return kvtier's families for vLLM's metrics page."""
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return None: any layout that keeps a block together can be offloaded, and none is faster enough.

        It is the first that a connector sees of the configuration in the engine's process, so weights are read from
        here on, while vLLM profiles, compiles and warms up.
        """
        if reads_weights_here(vllm_config):
            start_fingerprints(vllm_config)
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether loads are waited for layer by layer: a graph of the whole model would hold no hook."""
        return bool(extra_config.get("layerwise_load", False))

    def _admits_layerwise(self, vllm_config: VllmConfig) -> bool:
        if not self._connector.spec.config.settings.layerwise_load:
            return False
        obstacle = find_obstacle(vllm_config)
        if obstacle is not None:
            logger.warning(
                "layerwise_load loads nothing by layer: %s; or take it out, since with it CUDA graphs are piecewise",
                obstacle,
            )
        return obstacle is None

    def _log_start(self) -> None:
        config = self._connector.spec.config
        logger.info("kvtier keeps the KV of %s: %s", config.model.name, names_of_groups(config.groups))


def join_log() -> None:
    """Let kvtier write to vLLM's log, which vLLM sets up for itself alone, unless the process has one of its own."""
    ours, root = logging.getLogger("kvtier"), logging.getLogger()
    if not ours.handlers and not root.handlers:
        vllm_logger = logging.getLogger("vllm")
        ours.handlers = list(vllm_logger.handlers)
        ours.setLevel(vllm_logger.level)


def reads_weights_here(vllm_config: VllmConfig) -> bool:
    """Return whether the scheduler's side of the engine will be in this process.

    A worker has joined its group of processes; one that is alone shares its process with the scheduler.
    """
    is_alone = vllm_config.parallel_config.distributed_executor_backend == "uni"
    return is_alone or not torch.distributed.is_initialized()


def recompute_failed_loads(vllm_config: VllmConfig) -> None:
    """Make vLLM compute what a failed load did not bring; its default would end the request with an error.

    The scheduler reads the policy after it has built the connector.
    """
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config.kv_load_failure_policy != RECOMPUTE:
        logger.info("kvtier sets kv_load_failure_policy to %r: a failed load is a miss", RECOMPUTE)
        transfer_config.kv_load_failure_policy = RECOMPUTE
