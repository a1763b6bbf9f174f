"""``KVTierConnector``: vLLM's KV connector interface on kvtier's own connector.

vLLM builds one object in the scheduler's process and one in each worker's; each drives one half of
``kvtier.connector``. The hooks of the two processes are in ``scheduler_hooks`` and ``worker_hooks``; this file has
construction, shutdown and metrics.

Source: ``KVConnectorBase_V1`` of vLLM 0.28 to 0.33.
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
from kvtier.engines.vllm.engine_watch import EngineWatch, watch_engine_cores
from kvtier.engines.vllm.identity import LoadedWeightsNamer, start_fingerprints
from kvtier.engines.vllm.metrics import GrowthMeter, KVTierPromMetrics, KVTierStats, StatsClock
from kvtier.engines.vllm.scheduler_hooks import SchedulerHooks, VLLMPromptHasher
from kvtier.engines.vllm.worker_hooks import WorkerHooks
from kvtier.observe.control import EngineControl, describe_start, open_control
from kvtier.observe.prometheus import MetricsServer, serve_metrics
from kvtier.recording.recorder import open_recorder

logger = logging.getLogger(__name__)

RECOMPUTE = "recompute"


class KVTierConnector(SchedulerHooks, WorkerHooks, KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV cache in kvtier's tiers; the ``kv_connector`` of vLLM's ``--kv-transfer-config``.

    Args:
        vllm_config: the engine's configuration; ``kv_connector_extra_config`` has kvtier's settings.
        role: the scheduler's process or a worker's.
        kv_cache_config: the KV groups and device blocks.

    Raises:
        KVTierError: a setting or the model is not supported; the message has the remedy.

    Attributes:
        control: what operators reach the engine through; None in a worker's process, and where it is off.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        share_vllm_log()
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        SchedulerHooks.__init__(self)
        WorkerHooks.__init__(self)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        config = make_offloading_config(vllm_config, kv_cache_config, role)
        self.control: EngineControl | None = None
        if is_scheduler:
            recorder = open_recorder(config)
            hash_prompt = VLLMPromptHasher(vllm_config, config.hash_block_size, self._adapter_salts)
            self.control = open_control(config, hash_prompt)
            self._connector = OffloadingConnector(config, ConnectorRole.SCHEDULER, recorder, self.control)
        else:
            self._connector = OffloadingConnector(config, ConnectorRole.WORKER)
        self._stats_clock = StatsClock()
        self._growth = GrowthMeter()
        self._metrics: MetricsServer | None = None
        if is_scheduler:
            watch_engine_cores()
            self.engine_watch = EngineWatch(
                self._connector, LoadedWeightsNamer(vllm_config, config.model), config.model
            )
            self._metrics = self._serve_metrics(vllm_config)
            self._log_start(vllm_config)
            recompute_failed_loads(vllm_config)
            self._trusts_client_names = self._connector.spec.config.settings.trust_multi_modal_uuids

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """Return what has changed since the last report: once in an interval, and before the engine rests.

        Workers return nothing: the scheduler has what they copied.
        """
        scheduler = self._connector.connector_scheduler
        if scheduler is None or not self._stats_clock.is_due(is_resting=scheduler.is_idle()):
            return None
        return self._growth.report(scheduler.stats(), scheduler.histograms())

    def shutdown(self) -> None:
        """Shut down the half in this process; idempotent."""
        if self._metrics is not None:
            self._metrics.close()
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
        """Return None: any layout with contiguous blocks can be offloaded, and none is much faster.

        This is the first call with the configuration in the engine's process. So it starts to read the weights, which
        then goes on while vLLM profiles, compiles and warms up.
        """
        if reads_weights_here(vllm_config):
            start_fingerprints(vllm_config)
        return None

    def _serve_metrics(self, vllm_config: VllmConfig) -> MetricsServer | None:
        """Serve the metrics from this process if the settings say so; engines of one host take ports in a row.

        vLLM's own page learns of an engine in steps only; this one shows the state of an idle engine.
        """
        settings, scheduler = self._connector.spec.config.settings, self._connector.connector_scheduler
        port = settings.metrics_port
        if port is None or scheduler is None:
            return None
        rank = getattr(vllm_config.parallel_config, "data_parallel_rank_local", None) or 0
        try:
            return serve_metrics(scheduler, port + rank if port else port, settings.metrics_host)
        except BaseException:
            self._connector.shutdown()
            raise

    def _log_start(self, vllm_config: VllmConfig) -> None:
        for line in describe_start(self._connector.spec, f"vLLM {compat.release()}", self.control):
            logger.info("%s", line)
        num_cores = compat.reserved_for_connector(vllm_config)
        if num_cores:
            logger.warning(
                "kvtier needs no core of its own, and vLLM leaves %d idle because it has a connector: set "
                "VLLM_CPU_NUM_OF_RESERVED_CPU=%d",
                num_cores,
                num_cores,
            )


def share_vllm_log() -> None:
    """Give kvtier's logger the handlers of vLLM's, unless the process has configured handlers itself."""
    ours, root = logging.getLogger("kvtier"), logging.getLogger()
    if not ours.handlers and not root.handlers:
        vllm_logger = logging.getLogger("vllm")
        ours.handlers = list(vllm_logger.handlers)
        ours.setLevel(vllm_logger.level)


def reads_weights_here(vllm_config: VllmConfig) -> bool:
    """Return whether the scheduler's half of the engine will be in this process.

    A separate worker has joined its process group; a single worker shares its process with the scheduler.
    """
    is_alone = vllm_config.parallel_config.distributed_executor_backend == "uni"
    return is_alone or not torch.distributed.is_initialized()


def recompute_failed_loads(vllm_config: VllmConfig) -> None:
    """Make vLLM recompute the tokens of a failed load; by default it ends the request with an error.

    The scheduler reads the policy after it has built the connector.
    """
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config.kv_load_failure_policy != RECOMPUTE:
        logger.info("kvtier sets kv_load_failure_policy to %r: a failed load is a miss", RECOMPUTE)
        transfer_config.kv_load_failure_policy = RECOMPUTE
