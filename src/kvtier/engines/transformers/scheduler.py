"""The steps of one request: it gets blocks from the device and the tiers, then computes the rest, block by block.

A request gets its device blocks at admission, together with its cached tokens. Each step then computes some tokens and
publishes the blocks that became full, so that later requests find them on the device.
"""

import logging
from collections.abc import Callable, Mapping

from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.engines.common.step import CachedRequests, NewRequest, StepOutput
from kvtier.engines.transformers.connector_driver import ConnectorDriver
from kvtier.engines.transformers.interrupt import DeferredInterrupt
from kvtier.engines.transformers.paged_cache import PagedKVCache
from kvtier.engines.transformers.request import Request
from kvtier.engines.transformers.result import DEVICE, HOST
from kvtier.engines.transformers.sequence_cache import SequenceCache
from kvtier.errors import LayerLoadError

logger = logging.getLogger(__name__)


class RequestScheduler:
    """Allocates device blocks to requests and runs their steps. Used from one thread.

    Args:
        pool: the device blocks.
        pages: their bytes.
        driver: drives the connector; None without offloading.
    """

    def __init__(self, pool: DeviceBlockPool, pages: PagedKVCache, driver: ConnectorDriver | None) -> None:
        self._pool = pool
        self._pages = pages
        self._driver = driver

    def admit(self, request: Request, *, can_wait_by_layer: bool = False) -> None:
        """Allocate the request's blocks and fill them with its cached tokens, of the device or a tier.

        Args:
            request: a new request.
            can_wait_by_layer: whether the load may go on in ``advance``, while the model computes.

        Effects: sets ``num_computed_tokens``, a whole number of blocks, ``origins`` and ``num_loading_blocks``.

        Raises:
            DevicePoolError: the pool is too small for the request's tokens.
        """
        with DeferredInterrupt():  # an interrupt between allocation and assignment would leak the blocks
            request.block_ids = self._pool.allocate(self._pool.find_prefix(request.block_hashes), 0)
        num_device_tokens = len(request.block_ids) * request.block_size_tokens
        request.num_computed_tokens = num_device_tokens
        request.num_filled_blocks = len(request.block_ids)
        num_external_tokens, is_layerwise = 0, False
        if self._driver is not None:
            num_external_tokens, is_layerwise = self._driver.match(
                request, can_wait_by_layer=can_wait_by_layer
            )
        self._grow(request, request.num_tokens)
        tokens_by_tier: Mapping[str, int] = {}
        if self._driver is not None:
            tokens_by_tier = self._driver.on_allocated(
                request, num_external_tokens, is_layerwise=is_layerwise
            )
        num_loaded_tokens = num_external_tokens
        if is_layerwise:
            request.num_loading_blocks = num_external_tokens // request.block_size_tokens
            request.num_computed_tokens += num_external_tokens
        elif num_external_tokens:
            num_loaded_tokens = self._load(request, num_external_tokens)
        request.origins = {DEVICE: num_device_tokens} | split_origins(num_loaded_tokens, tokens_by_tier)

    def gather_prefix(self, request: Request, sequence: SequenceCache) -> None:
        """Copy the request's computed tokens into ``sequence``, except the last token of the request.

        A model gives logits only for tokens that it computes, so the last token of a fully cached prompt is computed
        again.

        Effects: subtracts one token from ``num_computed_tokens`` and ``origins`` in that case.
        """
        if request.num_computed_tokens >= request.num_tokens:
            request.num_computed_tokens -= 1
            latest = [origin for origin, num_tokens in request.origins.items() if num_tokens][-1]
            request.origins[latest] -= 1
        wait_for_layer = None
        if request.num_loading_blocks:
            assert self._driver is not None, "blocks are loaded only with a driver"
            wait_for_layer = self._driver.wait_for_layer
        self._pages.gather(request.block_ids, sequence, request.num_computed_tokens, wait_for_layer)

    def advance(
        self, request: Request, sequence: SequenceCache, num_tokens: int, compute: Callable[[], None]
    ) -> None:
        """Do one step: allocate blocks, compute, write the blocks that became full into the pool.

        When a load that the step computes with fails, the step computes nothing, and the tokens of the load are missing
        too.

        Args:
            request: the request.
            sequence: holds the keys and values of the new tokens when ``compute`` has returned.
            num_tokens: how many tokens to compute, at least one.
            compute: computes them; when it raises, none counts as computed.

        Raises:
            DevicePoolError: the pool is full.
        """
        new_block_ids = self._grow(request, request.num_computed_tokens + num_tokens)
        plan = plan_step(request, num_tokens, new_block_ids)

        def compute_and_keep() -> None:
            compute()
            self._complete_load(request)
            self._keep_full_blocks(request, sequence, request.num_computed_tokens + num_tokens)

        request.is_known = True
        if self._driver is None:
            compute_and_keep()
        else:
            try:
                self._driver.step(plan, compute_and_keep)
            except LayerLoadError as error:
                logger.warning("request %s: its tokens are computed instead: %s", request.request_id, error)
                self._fall_back(request, sequence)
                return
        request.num_computed_tokens += num_tokens

    def report_prefill(self, num_tokens: int, time_s: float) -> None:
        """Report how long ``num_tokens`` prompt tokens took, for the choice between loading and computing."""
        if self._driver is not None:
            self._driver.report_prefill(num_tokens, time_s)

    def finish(self, request: Request) -> None:
        """End the request, complete or not: its blocks are freed even after an error, its stores go on."""
        with DeferredInterrupt():
            try:
                if self._driver is not None:
                    self._driver.finish(request)
            finally:
                self._pool.free(request.block_ids)
                request.block_ids = []

    def _complete_load(self, request: Request) -> None:
        """Complete the load that ran during the step; raises LayerLoadError when it failed."""
        if not request.num_loading_blocks:
            return
        assert self._driver is not None, "blocks are loaded only with a driver"
        self._driver.end_layer_loads()
        self._fill_blocks(request, request.num_loading_blocks)
        request.num_loading_blocks = 0

    def _fall_back(self, request: Request, sequence: SequenceCache) -> None:
        """Return the request to the tokens that the device held before the failed load."""
        assert self._driver is not None, "blocks are loaded only with a driver"
        request.num_failed_load_blocks = len(self._driver.drain_failed_blocks(request))
        request.num_loading_blocks = 0
        request.num_computed_tokens = request.num_filled_blocks * request.block_size_tokens
        request.origins = {DEVICE: request.num_computed_tokens}
        self._pages.gather(request.block_ids, sequence, request.num_computed_tokens)

    def _fill_blocks(self, request: Request, num_blocks: int) -> None:
        """Publish ``num_blocks`` loaded blocks after the filled ones."""
        first, end = request.num_filled_blocks, request.num_filled_blocks + num_blocks
        self._pool.publish(request.block_ids[first:end], request.block_hashes[first:end])
        request.num_filled_blocks = end

    def _load(self, request: Request, num_external_tokens: int) -> int:
        """Wait for the load; return how many tokens were loaded before the first failed block."""
        assert self._driver is not None, "external tokens are found only with a driver"
        failed = self._driver.wait_for_load(request)
        first = request.num_filled_blocks
        last = first + num_external_tokens // request.block_size_tokens
        loaded = request.block_ids[first:last]
        request.num_failed_load_blocks = len(failed.intersection(loaded))
        num_good = next((i for i, block_id in enumerate(loaded) if block_id in failed), len(loaded))
        self._fill_blocks(request, num_good)
        request.num_computed_tokens = request.num_filled_blocks * request.block_size_tokens
        return num_good * request.block_size_tokens

    def _grow(self, request: Request, num_tokens: int) -> list[int]:
        """Allocate the missing blocks for ``num_tokens`` tokens, and return them."""
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
        num_loaded_tokens: tokens loaded to the device.
        tokens_by_tier: planned tokens by source, host memory or the type of a tier; more than were loaded when a block
            failed.

    Returns:
        Host memory first.
    """
    origins: dict[str, int] = {}
    num_left = num_loaded_tokens
    for tier, num_tokens in tokens_by_tier.items():
        if tier != CPULoadStoreSpec.medium():
            origins[tier] = min(num_tokens, num_left)
            num_left -= origins[tier]
    return {HOST: num_left} | origins


def plan_step(request: Request, num_tokens: int, new_block_ids: list[int]) -> StepOutput:
    """Return the step that computes ``num_tokens`` tokens of ``request``. Pure.

    Args:
        request: the one request of the step.
        num_tokens: tokens to compute after those already computed.
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
