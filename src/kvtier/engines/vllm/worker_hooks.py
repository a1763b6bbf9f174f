"""The hooks that vLLM calls in a worker's process: one hook, one call to the worker half.

They decide nothing but how a failed load is told to vLLM. With one full-attention group vLLM wants the device
blocks that did not get their bytes, no later than the answer that ends the load, and computes from the first of
them on. Otherwise it wants the request's name in that same answer, and computes from the first token: with several
groups it dies of block numbers, which are not unique there, and with a window it would go on from a block whose
predecessors were never allocated.

Source: ``KVConnectorBase_V1`` of vLLM 0.28 to 0.32.
"""

from collections.abc import Mapping

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from kvtier.connector.offloading_connector import OffloadingConnector
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.engines.vllm.canonical import make_canonical_kv_caches
from kvtier.engines.vllm.compat import TransferResults
from kvtier.engines.vllm.groups import can_recompute_from_block


class WorkerHooks:
    """Half of KVTierConnector. Used from the thread that runs the model."""

    _connector: OffloadingConnector
    _connector_metadata: KVConnectorMetadata | None
    _kv_cache_config: KVCacheConfig

    def __init__(self) -> None:
        self._invalid_block_ids: set[int] = set()

    @property
    def _worker(self) -> OffloadingConnectorWorker:
        worker = self._connector.connector_worker
        assert worker is not None, "a hook of a worker was called on the scheduler"
        return worker

    @property
    def _step(self) -> OffloadingConnectorMetadata:
        metadata = self._connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata), "vLLM binds the metadata before each step"
        return metadata

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the KV cache of every layer, before the first step."""
        self._worker.register_kv_caches(make_canonical_kv_caches(self._kv_cache_config, kv_caches))

    def unregister_kv_caches(self) -> None:
        """Let go of the KV caches: vLLM, from 0.33 on, gives their memory back while it sleeps."""
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the KV caches that replace those let go."""
        self.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """Begin the stores of the step before and finish those whose device blocks will be written."""
        self._worker.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Begin the loads of this step."""
        self._worker.start_kv_transfers(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Hold the layer back until it has its bytes, in a step that computes with a load; else nothing is awaited."""
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Do nothing: blocks are stored whole, after the step that computed them."""

    def wait_for_save(self) -> None:
        """Take the stores of this step, to be begun in the next one."""
        self._worker.prepare_store_kv(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return no stores, and the requests whose load ended, well or badly; each once."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        """Return the requests whose load ended, and which of these vLLM has to compute from the first token."""
        finished_sending, finished_recving = self._worker.get_finished(finished_req_ids)
        failed = self._worker.take_failed_loads()
        if not can_recompute_from_block(self._connector.spec.config.groups):
            return TransferResults(finished_sending, finished_recving, set(failed))
        self._invalid_block_ids.update(*failed.values())
        return TransferResults(finished_sending, finished_recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return, with one full-attention group, the device blocks of the failed loads in the last answer."""
        invalid_block_ids, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid_block_ids

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Return what this worker has to report since the last call."""
        return self._worker.build_connector_worker_meta()
