"""The order of one request's steps: blocks from the device and the tiers, then what is computed, block by block.

A request gets its device blocks when it is admitted, with what the device or a tier holds of its tokens. Each step then
computes some tokens and publishes the blocks that became full, so that later requests find them on the device.
"""

import logging
from collections.abc import Callable, Mapping

from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.engines.common.step import CachedRequests, NewRequest, StepOutput
from kvtier.engines.transformers.connector_link import ConnectorLink
from kvtier.engines.transformers.interrupt import DeferredInterrupt
from kvtier.engines.transformers.paged_cache import PagedKVCache
from kvtier.engines.transformers.request import Request
from kvtier.engines.transformers.result import DEVICE, HOST
from kvtier.engines.transformers.sequence_cache import SequenceCache
from kvtier.errors import LayerLoadError

logger = logging.getLogger(__name__)


class RequestScheduler:
    """Gives requests their device blocks and takes them through their steps. Used from one thread.

    Args:
        pool: the device blocks.
        pages: their bytes.
        link: the connector; None when nothing is offloaded.
    """

    def __init__(self, pool: DeviceBlockPool, pages: PagedKVCache, link: ConnectorLink | None) -> None:
        self._pool = pool
        self._pages = pages
        self._link = link

    def admit(self, request: Request, *, can_wait_by_layer: bool = False) -> None:
        """Give the request its blocks and load into them what the device or a tier holds of its tokens.

        Args:
            request: new.
            can_wait_by_layer: whether ``advance`` may be left to wait for the load, while the model computes.

        Effects: sets ``num_computed_tokens``, a whole number of blocks, ``origins`` and ``num_arriving_blocks``.

        Raises:
            DevicePoolError: the pool is too small for the request's tokens.
        """
        with DeferredInterrupt():  # blocks that were allocated and not written down would be lost
            request.block_ids = self._pool.allocate(self._pool.find_prefix(request.block_hashes), 0)
        num_device_tokens = len(request.block_ids) * request.block_size_tokens
        request.num_computed_tokens = num_device_tokens
        request.num_filled_blocks = len(request.block_ids)
        num_external_tokens, is_layerwise = 0, False
        if self._link is not None:
            num_external_tokens, is_layerwise = self._link.match(request, can_wait_by_layer=can_wait_by_layer)
        self._grow(request, request.num_tokens)
        tokens_by_tier: Mapping[str, int] = {}
        if self._link is not None:
            tokens_by_tier = self._link.on_allocated(request, num_external_tokens, is_layerwise=is_layerwise)
        num_loaded_tokens = num_external_tokens
        if is_layerwise:
            request.num_arriving_blocks = num_external_tokens // request.block_size_tokens
            request.num_computed_tokens += num_external_tokens
        elif num_external_tokens:
            num_loaded_tokens = self._load(request, num_external_tokens)
        request.origins = {DEVICE: num_device_tokens} | split_origins(num_loaded_tokens, tokens_by_tier)

    def gather_prefix(self, request: Request, sequence: SequenceCache) -> None:
        """Copy the request's computed tokens into ``sequence``, all but the last token of all.

        A model answers only for tokens it is given, so one token of a wholly known prompt is computed again.

        Effects: ``num_computed_tokens`` and ``origins`` are one token less in that case.
        """
        if request.num_computed_tokens >= request.num_tokens:
            request.num_computed_tokens -= 1
            latest = [origin for origin, num_tokens in request.origins.items() if num_tokens][-1]
            request.origins[latest] -= 1
        wait_for_layer = None
        if request.num_arriving_blocks:
            assert self._link is not None, "only a link brings blocks"
            wait_for_layer = self._link.wait_for_layer
        self._pages.gather(request.block_ids, sequence, request.num_computed_tokens, wait_for_layer)

    def advance(
        self, request: Request, sequence: SequenceCache, num_tokens: int, compute: Callable[[], None]
    ) -> None:
        """Do one step: make room, compute, put the blocks that became full into the pool.

        A step that computes with a load that fails brings nothing: the request then lacks the tokens of the load too.

        Args:
            request: its next ``num_tokens`` tokens are computed.
            sequence: holds their keys and values once ``compute`` has returned.
            num_tokens: at least one.
            compute: computes them; when it raises, nothing counts as computed.

        Raises:
            DevicePoolError: the pool is full.
        """
        new_block_ids = self._grow(request, request.num_computed_tokens + num_tokens)
        plan = plan_step(request, num_tokens, new_block_ids)

        def compute_and_keep() -> None:
            compute()
            self._confirm_arrival(request)
            self._keep_full_blocks(request, sequence, request.num_computed_tokens + num_tokens)

        request.is_known = True
        if self._link is None:
            compute_and_keep()
        else:
            try:
                self._link.step(plan, compute_and_keep)
            except LayerLoadError as error:
                logger.warning("request %s: what it lacks is computed: %s", request.request_id, error)
                self._fall_back(request, sequence)
                return
        request.num_computed_tokens += num_tokens

    def report_prefill(self, num_tokens: int, time_s: float) -> None:
        """Report how long so many tokens of a prompt have taken, for the choice between loading and computing."""
        if self._link is not None:
            self._link.report_prefill(num_tokens, time_s)

    def finish(self, request: Request) -> None:
        """End the request, done or not: its blocks are free whatever happens, its stores go on without it."""
        with DeferredInterrupt():
            try:
                if self._link is not None:
                    self._link.finish(request)
            finally:
                self._pool.free(request.block_ids)
                request.block_ids = []

    def _confirm_arrival(self, request: Request) -> None:
        """Take what arrived while the step computed for loaded; raises LayerLoadError when it did not."""
        if not request.num_arriving_blocks:
            return
        assert self._link is not None, "only a link brings blocks"
        self._link.end_layer_loads()
        self._fill_blocks(request, request.num_arriving_blocks)
        request.num_arriving_blocks = 0

    def _fall_back(self, request: Request, sequence: SequenceCache) -> None:
        """Let the request go on from what the device held before its load failed."""
        assert self._link is not None, "only a link brings blocks"
        request.num_failed_load_blocks = len(self._link.drain_failed_blocks(request))
        request.num_arriving_blocks = 0
        request.num_computed_tokens = request.num_filled_blocks * request.block_size_tokens
        request.origins = {DEVICE: request.num_computed_tokens}
        self._pages.gather(request.block_ids, sequence, request.num_computed_tokens)

    def _fill_blocks(self, request: Request, num_blocks: int) -> None:
        """Publish blocks whose bytes have come, those after the filled ones."""
        first, end = request.num_filled_blocks, request.num_filled_blocks + num_blocks
        self._pool.publish(request.block_ids[first:end], request.block_hashes[first:end])
        request.num_filled_blocks = end

    def _load(self, request: Request, num_external_tokens: int) -> int:
        """Wait for the load and return how many tokens it brought before the first failed block."""
        assert self._link is not None, "only a link finds external tokens"
        failed = self._link.wait_for_load(request)
        first = request.num_filled_blocks
        last = first + num_external_tokens // request.block_size_tokens
        loaded = request.block_ids[first:last]
        request.num_failed_load_blocks = len(failed.intersection(loaded))
        num_good = next((i for i, block_id in enumerate(loaded) if block_id in failed), len(loaded))
        self._fill_blocks(request, num_good)
        request.num_computed_tokens = request.num_filled_blocks * request.block_size_tokens
        return num_good * request.block_size_tokens

    def _grow(self, request: Request, num_tokens: int) -> list[int]:
        """Allocate what the request lacks for that many tokens, and return it."""
        num_missing = request.num_blocks_for(num_tokens) - len(request.block_ids)
        with DeferredInterrupt():
            new_block_ids = self._pool.allocate([], max(0, num_missing))
            request.block_ids.extend(new_block_ids)
        return new_block_ids

    def _keep_full_blocks(self, request: Request, sequence: SequenceCache, num_tokens: int) -> None:
        first, last = request.num_filled_blocks, num_tokens // request.block_size_tokens
        self._pages.scatter(sequence, first, request.block_ids[first:last])
        self._pool.publish(request.block_ids[first:last], request.block_hashes[first:last])
        request.num_filled_blocks = max(first, last)


def split_origins(num_loaded_tokens: int, tokens_by_tier: Mapping[str, int]) -> dict[str, int]:
    """Divide loaded tokens among the tiers that promoted them and host memory. Pure.

    Args:
        num_loaded_tokens: tokens that arrived on the device.
        tokens_by_tier: tokens by where they were to come from, host memory or the type of a tier; more than were
            loaded when a block did not arrive.
    """
    origins: dict[str, int] = {}
    num_left = num_loaded_tokens
    for tier, num_tokens in tokens_by_tier.items():
        if tier != CPULoadStoreSpec.medium():
            origins[tier] = min(num_tokens, num_left)
            num_left -= origins[tier]
    return origins | {HOST: num_left}


def plan_step(request: Request, num_tokens: int, new_block_ids: list[int]) -> StepOutput:
    """Return the step that computes ``num_tokens`` tokens of ``request``. Pure.

    Args:
        request: the one request of the step.
        num_tokens: tokens to compute after those it has.
        new_block_ids: blocks appended to its table since its last step.
    """
    scheduled = {request.request_id: num_tokens}
    if not request.is_known:
        new = NewRequest(request.request_id, request.get_block_ids(), request.num_computed_tokens)
        return StepOutput(scheduled_new_reqs=[new], num_scheduled_tokens=scheduled)
    cached = CachedRequests(
        req_ids=[request.request_id],
        new_block_ids=[(new_block_ids,) if new_block_ids else None],
        num_computed_tokens=[request.num_computed_tokens],
    )
    return StepOutput(scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled)
