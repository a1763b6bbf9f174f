"""The loads that a worker's step computes with while they run.

It reports no job; the worker half does. A step waits for each layer before it reads that layer, so whoever computes
must say so for each: a layer that was never asked for may have been read before its bytes were there. Then what the
step has computed is not to be trusted, however well the copy ended, and this worker gives loading by layer up: the
engine does not call its hook where it said it would, for example because it replays a recorded graph.
"""

import logging

from kvtier.base import CanonicalKVCaches, TransferJobId, TransferResult, TransferSpec
from kvtier.worker.worker import OffloadingWorker

logger = logging.getLogger(__name__)


class LayerLoads:
    """The loads by layer of the step in progress, on one worker. Used from one thread.

    Args:
        worker: routes transfers to handlers.
        kv_caches: says which ref holds a layer's bytes.
        num_refs: refs that loads copy one after the other; 0 when they do not.

    Attributes:
        is_able: whether loads of these caches can be waited for layer by layer.
    """

    def __init__(self, worker: OffloadingWorker, kv_caches: CanonicalKVCaches, num_refs: int) -> None:
        self._worker = worker
        self._ref_of_layer = kv_caches.ref_of_layer
        self._last_ref = max(0, num_refs - 1)
        # With one ref for all layers the first would wait for the last, and with a ref that no layer
        # names nobody would wait for its bytes.
        self.is_able = num_refs > 1 and set(kv_caches.ref_of_layer.values()) == set(range(num_refs))
        self._open: set[TransferJobId] = set()
        self._unread_layers: set[str] = set()
        self._is_spoiled = False

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._open

    def begin(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        """Start a load; False when no handler took it.

        Thread: a worker that cannot load by layer, though it was thought to, blocks until the load has ended.
        """
        self._open.add(job_id)
        if self.is_able:
            self._unread_layers = set(self._ref_of_layer)
            is_begun = self._worker.transfer_by_ref(job_id, spec)
        else:
            is_begun = self._worker.transfer_async(job_id, spec)
            self._worker.wait({job_id})
        self._is_spoiled |= not is_begun
        return is_begun

    def wait_for_layer(self, layer_name: str) -> bool:
        """Hold back what is computed from now on until the layer has its bytes; one without a ref waits for all.

        Returns:
            False when a load has failed, so that bytes are missing.
        """
        if not self._open:
            return True
        self._unread_layers.discard(layer_name)
        ref_idx = self._ref_of_layer.get(layer_name, self._last_ref)
        self._is_spoiled |= not self._worker.wait_for_ref(self._open, ref_idx)
        return not self._is_spoiled

    def end(self, *, is_computed: bool) -> tuple[list[TransferResult], bool]:
        """Wait until every load has ended, and forget what was waited for; ``close`` forgets the loads.

        Args:
            is_computed: whether the step has computed with what they brought.

        Returns:
            What the handlers reported meanwhile, of whatever job, and whether the step may have read missing bytes.
        """
        if not self._open:
            return [], False
        self._worker.wait(self._open)
        results = self._worker.get_finished()
        has_failed = any(result.job_id in self._open and not result.success for result in results)
        is_unread = is_computed and bool(self._unread_layers)
        if is_unread:
            logger.error(
                "the engine did not wait for layers %s of a load that it computed with: the load counts as failed, "
                "and no other is made layer by layer",
                sorted(self._unread_layers),
            )
            self.is_able = False
        is_spoiled = is_computed and (self._is_spoiled or has_failed or is_unread)
        self._unread_layers = set()
        self._is_spoiled = False
        return results, is_spoiled

    def close(self, job_id: TransferJobId) -> None:
        """Forget a load that has ended."""
        self._open.discard(job_id)
