"""Which load a request may compute with while it runs, and what follows when that load fails.

It moves no byte and starts no job. Such a request is scheduled at once, and the rest of its batch waits with it for
each layer. So one load at a time is let in, and only when no other is under way: what a batch waits for is then
its own load and never a queue of them.

Its device blocks are in the engine's prefix cache before their bytes are there. Whoever is found to share them waits
one step, until the load has ended: if it failed, only the one request that loads has read them.
"""

import logging
from dataclasses import dataclass

from kvtier.base import CanonicalKVCaches, OffloadingSpec, TransferJobId, TransferResult, TransferSpec
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.jobs import OpenTransfer, TransferJobs
from kvtier.connector.protocols import Request
from kvtier.connector.request_state import RequestState
from kvtier.worker.worker import OffloadingWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LayerLoad:
    """The load under way.

    Attributes:
        job_id: its number.
        first_token: position of the first token that it brings.
        block_hash: content hash of the tokens from there on; whoever has it at that position shares the load's blocks.
    """

    job_id: TransferJobId
    first_token: int
    block_hash: bytes


class LayerwiseChoice:
    """The scheduler half's view of loads by layer. Used from one thread.

    Args:
        spec: says whether they are wanted, and how many workers there are.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        layouts = make_group_layouts(spec)
        # With several groups or a window an engine cannot go on from the block in front of a failed load.
        has_one_full_group = len(layouts) == 1 and layouts[0].num_tail_tokens is None
        self._is_possible = spec.config.settings.layerwise_load and has_one_full_group
        if spec.config.settings.layerwise_load and not has_one_full_group:
            logger.warning(
                "layerwise_load loads nothing by layer: the model has several KV groups, or a window"
            )
        self._device_block_tokens = layouts[0].device_block_tokens
        self._hash_block_size = spec.hash_block_size
        self._num_workers = spec.config.world_size
        self._num_able_workers = 0
        self._load: _LayerLoad | None = None
        self._spoiled_blocks: set[int] = set()

    def count_workers(self, change: int) -> None:
        """Add to the number of workers that can load by layer."""
        self._num_able_workers += change

    def answer(
        self, state: RequestState, jobs: TransferJobs, num_tokens: int, *, can_wait_by_layer: bool
    ) -> tuple[int, bool]:
        """Say that so many tokens can be loaded, and True when the request must wait until they are.

        Effects:
            ``state.is_layerwise``.
        """
        is_able = self._is_possible and self._num_able_workers == self._num_workers
        state.is_layerwise = num_tokens > 0 and can_wait_by_layer and is_able and jobs.num_loads == 0
        return num_tokens, num_tokens > 0 and not state.is_layerwise

    def begin(self, job_id: TransferJobId, request: Request, first_token: int) -> None:
        """Take note of a load by layer that brings the tokens from ``first_token`` on."""
        block_hash = request.block_hashes[first_token // self._hash_block_size]
        self._load = _LayerLoad(job_id, first_token, block_hash)

    def shares_blocks(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether device memory holds, of what was found there for a request, blocks without their bytes. Pure.

        Args:
            request: not scheduled yet.
            num_computed_tokens: its leading tokens that device memory is said to hold.
        """
        if self._load is None or num_computed_tokens <= self._load.first_token:
            return False
        position, hashes = self._load.first_token // self._hash_block_size, request.block_hashes
        # Hashes are chained: equal here means equal up to here.
        return position < len(hashes) and hashes[position] == self._load.block_hash

    def end(self, job: OpenTransfer) -> None:
        """Take note of the end of a load, of whatever kind.

        Effects:
            When a load by layer failed, what its request computed meanwhile is stored anew once it is computed anew.
        """
        load = self._load
        if load is None or load.job_id != job.job_id:
            return
        self._load = None
        if job.has_failed:
            job.state.offer_again()
            self._spoiled_blocks.update(self._blocks_from(job.state, load.first_token))

    def take_spoiled_blocks(self) -> set[int]:
        """Return, once, the device blocks that a failed load by layer, or what was computed with it, has filled.

        They hold wrong bytes under the right hashes: whoever keeps a prefix cache must forget these.
        """
        spoiled, self._spoiled_blocks = self._spoiled_blocks, set()
        return spoiled

    def _blocks_from(self, state: RequestState, first_token: int) -> list[int]:
        return state.block_ids[0][first_token // self._device_block_tokens :]


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
