"""The steps of one request: it gets blocks from the device and the tiers, then computes the rest, block by block.

A request gets its device blocks at admission, together with its cached tokens. Each step then computes some tokens and
publishes the blocks that became full, so that later requests find them on the device.
"""

from collections.abc import Callable, Collection, Mapping

from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.engines.common.step import CachedRequests, NewRequest, StepOutput
from kvtier.engines.transformers.connector_driver import ConnectorDriver
from kvtier.engines.transformers.interrupt import DeferredInterrupt
from kvtier.engines.transformers.paged_cache import PagedKVCache
from kvtier.engines.transformers.request import NO_BLOCK, Request
from kvtier.engines.transformers.result import DEVICE, HOST
from kvtier.engines.transformers.sequence_cache import SequenceCache


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

    def admit(self, request: Request) -> None:
        """Allocate the blocks of a new request and fill them with its cached tokens, of the device or a tier.

        Effects: sets ``num_computed_tokens``, a whole number of blocks, and ``origins``.

        Raises:
            DevicePoolError: the pool is too small for the request's tokens.
        """
        num_device_tokens = self._use_device_prefix(request)
        request.num_computed_tokens = num_device_tokens
        request.num_filled_blocks = len(request.block_ids)
        num_external_tokens = 0 if self._driver is None else self._driver.match(request)
        self._grow(request, request.num_tokens, num_device_tokens + num_external_tokens)
        tokens_by_tier: Mapping[str, int] = {}
        if self._driver is not None:
            tokens_by_tier = self._driver.on_allocated(request, num_external_tokens)
        num_loaded_tokens = self._load(request, num_external_tokens) if num_external_tokens else 0
        request.origins = {DEVICE: num_device_tokens} | split_origins(num_loaded_tokens, tokens_by_tier)

    def gather_prefix(self, request: Request, sequence: SequenceCache) -> None:
        """Copy the request's computed tokens into ``sequence``, except the last token of the request.

        A model gives logits only for tokens that it computes, so the last token of a fully cached prompt is computed
        again. Recurrent states cannot go back to it, so of such a prompt an earlier state is found, or none.

        Effects: subtracts one token from ``num_computed_tokens`` and ``origins`` in that case.
        """
        if request.num_computed_tokens >= request.num_tokens:
            request.num_computed_tokens -= 1
            latest = [origin for origin, num_tokens in request.origins.items() if num_tokens][-1]
            request.origins[latest] -= 1
        used = request.used_state_blocks
        self._pages.gather(
            request.block_ids,
            sequence,
            request.num_computed_tokens,
            state_block_id=used[-1] if used else None,
        )

    def advance(
        self, request: Request, sequence: SequenceCache, num_tokens: int, compute: Callable[[], None]
    ) -> None:
        """Do one step: allocate blocks, compute, write the blocks that became full into the pool.

        Args:
            request: the request.
            sequence: holds the keys and values of the new tokens when ``compute`` has returned.
            num_tokens: how many tokens to compute, at least one.
            compute: computes them; when it raises, none counts as computed.

        Raises:
            DevicePoolError: the pool is full.
        """
        end = request.num_computed_tokens + num_tokens
        plan = plan_step(request, num_tokens, self._grow(request, end, end))

        def compute_and_keep() -> None:
            compute()
            self._keep_full_blocks(request, sequence, request.num_computed_tokens + num_tokens)

        request.is_known = True
        if self._driver is None:
            compute_and_keep()
        else:
            self._driver.step(plan, compute_and_keep)
        request.num_computed_tokens += num_tokens

    def report_prefill(self, num_tokens: int, time_s: float) -> None:
        """Report how long ``num_tokens`` prompt tokens took, for the choice between loading and computing."""
        if self._driver is not None:
            self._driver.report_prefill(num_tokens, time_s)

    def store_rest(self, request: Request) -> None:
        """Wait for room in host memory for blocks of the computed request, where a tier must get every block."""
        if self._driver is not None and request.is_known:
            self._driver.wait_for_room(request, plan_step(request, 0, ()))

    def finish(self, request: Request) -> None:
        """End the request, complete or not: its blocks are freed even after an error, its stores go on."""
        with DeferredInterrupt():
            try:
                if self._driver is not None:
                    self._driver.finish(request)
            finally:
                self._pool.free([*request.block_ids, *request.used_state_blocks])
                request.block_ids = []
                request.num_released_states = len(request.state_block_ids)

    def _fill_blocks(self, request: Request, num_blocks: int) -> None:
        """Publish ``num_blocks`` loaded blocks after the filled ones."""
        first, end = request.num_filled_blocks, request.num_filled_blocks + num_blocks
        self._pool.publish(request.block_ids[first:end], request.device_hashes[first:end])
        request.num_filled_blocks = end

    def _use_device_prefix(self, request: Request) -> int:
        """Give the request the blocks of its prefix that the device holds; return its length in tokens."""
        interval, block_size = request.sizes.state_interval_tokens, request.block_size_tokens
        with DeferredInterrupt():  # an interrupt between allocation and assignment would leak the blocks
            prefix = self._pool.find_prefix(request.device_hashes) if request.sizes.has_keys else []
            if interval is None:
                request.block_ids = self._pool.allocate(prefix, 0)
                return len(prefix) * block_size
            longest = min(len(prefix) * block_size, request.num_tokens - 1)
            if not request.sizes.has_keys:
                longest = request.num_tokens - 1
            for num_tokens in range(longest // interval * interval, 0, -interval):
                states = self._pool.find_prefix([request.state_hash(num_tokens)])
                if states:
                    blocks = prefix[: num_tokens // block_size]
                    *request.block_ids, state = self._pool.allocate([*blocks, *states], 0)
                    request.num_released_states = num_tokens // interval - 1
                    request.state_block_ids = [*[NO_BLOCK] * request.num_released_states, state]
                    return num_tokens
            return 0

    def _load(self, request: Request, num_external_tokens: int) -> int:
        """Wait for the load; return how many tokens were loaded before the first failed block."""
        assert self._driver is not None, "external tokens are found only with a driver"
        failed = self._driver.wait_for_load(request)
        if request.sizes.state_interval_tokens is not None:
            return self._complete_load_of_states(request, num_external_tokens, failed)
        first = request.num_filled_blocks
        last = first + num_external_tokens // request.block_size_tokens
        loaded = request.block_ids[first:last]
        request.num_failed_load_blocks = len(failed.intersection(loaded))
        num_good = next((i for i, block_id in enumerate(loaded) if block_id in failed), len(loaded))
        self._fill_blocks(request, num_good)
        request.num_computed_tokens = request.num_filled_blocks * request.block_size_tokens
        return num_good * request.block_size_tokens

    def _complete_load_of_states(
        self, request: Request, num_external_tokens: int, failed: Collection[int]
    ) -> int:
        """Keep a load whose every block has arrived; without one of them its end cannot be reached."""
        end = request.num_computed_tokens + num_external_tokens
        num_blocks = request.num_blocks_for(end) - request.num_filled_blocks
        if failed:
            request.num_failed_load_blocks = len(failed)
            # What the device had is at the state before; what is behind is computed.
            self._release_states(request, num_kept=request.num_states_for(request.num_computed_tokens))
            return 0
        self._fill_blocks(request, num_blocks)
        self._pool.publish([request.state_block_ids[-1]], [request.state_hash(end)])
        self._release_before_last_state(request)
        request.num_computed_tokens = end
        return num_external_tokens

    def _grow(self, request: Request, num_tokens: int, num_state_tokens: int) -> tuple[list[int], ...]:
        """Allocate the missing blocks, and return them for each KV group.

        Args:
            request: the request.
            num_tokens: tokens whose keys and values need room.
            num_state_tokens: tokens after which the recurrent states are kept, if they end an interval.
        """
        num_missing = max(0, request.num_blocks_for(num_tokens) - len(request.block_ids))
        num_skipped = request.num_states_for(num_state_tokens) - len(request.state_block_ids) - 1
        with DeferredInterrupt():
            new = self._pool.allocate([], num_missing + (num_skipped >= 0))
            request.block_ids.extend(new[:num_missing])
            # A load brings the last state and none before it.
            new_states = [*[NO_BLOCK] * num_skipped, *new[num_missing:]]
            request.state_block_ids.extend(new_states)
        return request.split_by_group(new[:num_missing], new_states)

    def _keep_full_blocks(self, request: Request, sequence: SequenceCache, num_tokens: int) -> None:
        if request.sizes.has_keys:
            first, last = request.num_filled_blocks, num_tokens // request.block_size_tokens
            self._pages.scatter(sequence, first, request.block_ids[first:last])
            self._pool.publish(request.block_ids[first:last], request.device_hashes[first:last])
            request.num_filled_blocks = max(first, last)
        interval = request.sizes.state_interval_tokens
        if interval is not None and num_tokens % interval == 0:
            self._pages.write_states(sequence, request.state_block_ids[-1])
            self._pool.publish([request.state_block_ids[-1]], [request.state_hash(num_tokens)])
            self._release_before_last_state(request)

    def _release_before_last_state(self, request: Request) -> None:
        """Free all states of the request but the last; those that are published stay cached until room is needed."""
        with DeferredInterrupt():
            released = request.used_state_blocks[:-1]
            request.num_released_states = len(request.state_block_ids) - 1
            self._pool.free(released)

    def _release_states(self, request: Request, *, num_kept: int) -> None:
        """Free the states behind the first ``num_kept``, and take them out of the block table."""
        with DeferredInterrupt():
            released = [block for block in request.state_block_ids[num_kept:] if block != NO_BLOCK]
            del request.state_block_ids[num_kept:]
            self._pool.free(released)


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


def plan_step(request: Request, num_tokens: int, new_block_ids: tuple[list[int], ...]) -> StepOutput:
    """Return the step that computes ``num_tokens`` tokens of ``request``. Pure.

    Args:
        request: the one request of the step.
        num_tokens: tokens to compute after those already computed.
        new_block_ids: for each KV group the blocks appended to its table since its last step.
    """
    scheduled = {request.request_id: num_tokens}
    if not request.is_known:
        new = NewRequest(request.request_id, request.get_block_ids(), request.num_computed_tokens)
        return StepOutput(scheduled_new_reqs=[new], num_scheduled_tokens=scheduled)
    cached = CachedRequests(
        req_ids=[request.request_id],
        new_block_ids=[new_block_ids if any(new_block_ids) else None],
        num_computed_tokens=[request.num_computed_tokens],
    )
    return StepOutput(scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled)
