"""Layer-by-layer loads, with which a request computes while they run, and the handling of their failures.

Such a request is scheduled at once, and the rest of its batch waits with it for each layer. So at most one load at a
time runs this way, and only when no other load is under way: a batch then waits for its own load and never for a
queue of them.

Its device blocks are in the engine's prefix cache before their bytes are there. A request that would share them waits
until the load has ended: if it failed, only the one request that loads has read them.

LayerwiseChoice is the scheduler half's part, LayerLoads the worker's.
"""

import logging
from dataclasses import dataclass

from kvtier.base import CanonicalKVCaches, OffloadingSpec, TransferJobId, TransferResult, TransferSpec
from kvtier.connector.groups import make_group_layouts
from kvtier.connector.jobs import OpenTransfer
from kvtier.connector.protocols import Request
from kvtier.connector.request_state import RequestState
from kvtier.worker.worker import OffloadingWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LayerLoad:
    """The open load.

    Attributes:
        job_id: its number.
        first_token: position of the first token that it brings.
        block_hash: content hash of the tokens from there on; a request that has it at that position shares the
            load's blocks.
    """

    job_id: TransferJobId
    first_token: int
    block_hash: bytes


class LayerwiseChoice:
    """The loads by layer of one scheduler half. Used from one thread.

    Args:
        spec: its one group attends to the whole prefix; its configuration has the number of workers.
    """

    def __init__(self, spec: OffloadingSpec) -> None:
        self._device_block_tokens = spec.gpu_block_size[0]
        self._hash_block_size = spec.hash_block_size
        self._num_workers = spec.config.world_size
        self._num_able_workers = 0
        self._load: _LayerLoad | None = None
        self._invalid_blocks: set[int] = set()

    def count_workers(self, change: int) -> None:
        """Add to the number of workers that can load by layer."""
        self._num_able_workers += change

    def choose(self, state: RequestState, *, can_wait_by_layer: bool, num_open_loads: int) -> bool:
        """Return whether a request computes while it is loaded, if there is something to load.

        Args:
            state: the request.
            can_wait_by_layer: whether the engine would wait for each layer.
            num_open_loads: loads under way.

        Effects:
            ``state.search.is_layerwise``.
        """
        is_able = self._num_able_workers == self._num_workers
        state.search.is_layerwise = can_wait_by_layer and is_able and num_open_loads == 0
        return state.search.is_layerwise

    def begin(self, job_id: TransferJobId, request: Request, first_token: int) -> None:
        """Record a load by layer of the tokens from ``first_token`` on."""
        block_hash = request.block_hashes[first_token // self._hash_block_size]
        self._load = _LayerLoad(job_id, first_token, block_hash)

    def shares_blocks(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether the device prefix found for a request has blocks whose bytes are still being loaded. Pure.

        Args:
            request: not scheduled yet.
            num_computed_tokens: its leading tokens that were found in device memory.
        """
        if self._load is None or num_computed_tokens <= self._load.first_token:
            return False
        position, hashes = self._load.first_token // self._hash_block_size, request.block_hashes
        # Hashes are chained: equal here means equal up to here.
        return position < len(hashes) and hashes[position] == self._load.block_hash

    def end(self, job: OpenTransfer) -> None:
        """Forget the load by layer if ``job``, which has ended, is that load.

        Effects:
            When it failed, what its request computed meanwhile is offered anew once it is computed anew.
        """
        load = self._load
        if load is None or load.job_id != job.job_id:
            return
        self._load = None
        if job.has_failed:
            job.state.stores.offer_again()
            first_block = load.first_token // self._device_block_tokens
            self._invalid_blocks.update(job.state.blocks.block_ids[0][first_block:])

    def drain_invalid_blocks(self) -> set[int]:
        """Return, once, the device blocks with wrong bytes from a failed load by layer or its computation.

        They hold wrong bytes under the right hashes: an engine with a prefix cache must forget these.
        """
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid


class LayerLoads:
    """The loads by layer of the step in progress, on one worker. Used from one thread.

    Args:
        worker: routes transfers to handlers.
        kv_caches: has the ref of each layer's bytes.
        num_refs: refs that loads copy one after the other; 0 when they do not.

    Attributes:
        is_able: whether loads of these caches can be waited for layer by layer.
    """

    def __init__(self, worker: OffloadingWorker, kv_caches: CanonicalKVCaches, num_refs: int) -> None:
        self._worker = worker
        self._ref_of_layer = kv_caches.ref_of_layer
        self._last_ref = max(0, num_refs - 1)
        # With one ref for all layers the first layer would wait for the last. Bytes of a ref that no layer names would
        # not be waited for.
        self.is_able = num_refs > 1 and set(kv_caches.ref_of_layer.values()) == set(range(num_refs))
        self._open: set[TransferJobId] = set()
        self._unread_layers: set[str] = set()
        self._has_failed = False

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._open

    def begin(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        """Start a load; False when no handler took it.

        Thread: a worker that cannot load by layer blocks until the load has ended.
        """
        self._open.add(job_id)
        if self.is_able:
            self._unread_layers = set(self._ref_of_layer)
            is_begun = self._worker.transfer_by_ref(job_id, spec)
        else:
            is_begun = self._worker.transfer_async(job_id, spec)
            self._worker.wait({job_id})
        self._has_failed |= not is_begun
        return is_begun

    def wait_for_layer(self, layer_name: str) -> bool:
        """Delay the following computation until the layer is loaded; a layer without a ref waits for all.

        Returns:
            False when a load has failed, so that bytes are missing.
        """
        if not self._open:
            return True
        self._unread_layers.discard(layer_name)
        ref_idx = self._ref_of_layer.get(layer_name, self._last_ref)
        self._has_failed |= not self._worker.wait_for_ref(self._open, ref_idx)
        return not self._has_failed

    def end(self, *, is_computed: bool) -> tuple[list[TransferResult], bool]:
        """Wait until every load has ended, and forget which layers were read; ``close`` forgets the loads.

        Args:
            is_computed: whether the step has computed with what they brought.

        Returns:
            What the handlers reported meanwhile, of whatever job, and whether the step may have read missing bytes.
        """
        if not self._open:
            return [], False
        self._worker.wait(self._open)
        results = self._worker.get_finished()
        self._has_failed |= any(result.job_id in self._open and not result.success for result in results)
        is_unread = is_computed and bool(self._unread_layers)
        if is_unread:
            logger.error(
                "the engine did not wait for layers %s of a load that it computed with: the load counts as failed, "
                "and no other is made layer by layer",
                sorted(self._unread_layers),
            )
            self.is_able = False
        is_invalid = is_computed and (self._has_failed or is_unread)
        self._unread_layers = set()
        self._has_failed = False
        return results, is_invalid

    def close(self, job_id: TransferJobId) -> None:
        """Forget a load that has ended."""
        self._open.discard(job_id)


def make_layerwise_choice(spec: OffloadingSpec) -> LayerwiseChoice | None:
    """Return the chooser of loads by layer; None when the settings or the KV groups exclude them."""
    if not spec.config.settings.layerwise_load:
        return None
    layouts = make_group_layouts(spec)
    # With several groups or a window an engine cannot go on from the block in front of a failed load.
    if len(layouts) == 1 and layouts[0].num_tail_tokens is None:
        return LayerwiseChoice(spec)
    logger.warning("layerwise_load loads nothing by layer: the model has several KV groups, or a window")
    return None
