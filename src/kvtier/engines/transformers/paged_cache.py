"""The device pool: which blocks a request has there, and their bytes, one page for a block of all layers.

A page holds, layer after layer, the keys and then the values of its tokens, tokens first. So a transfer of a block to
host memory is one copy. Within a page a layer's keys are contiguous too, so gathering a prefix for the model is a plain
copy. For a model with recurrent states a page holds either such a block or the states after some number of tokens, all
of them one after another; every page has room for the larger of both.
"""

from collections.abc import Collection, Sequence
from math import prod

import torch

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.engines.transformers.config import BlockSizes, page_bytes
from kvtier.engines.transformers.interrupt import DeferredInterrupt
from kvtier.engines.transformers.model_adapter import KVShape
from kvtier.engines.transformers.request import NO_BLOCK, Request
from kvtier.engines.transformers.sequence_cache import SequenceCache

KV_LAYOUT = "page:layer,key|value,token,head,dim"
"""The order of the bytes in a page, as a part of the namespace."""

STATE_LAYOUT = "state:largest element first,layer,conv|recurrent"
"""The order of recurrent states in a page, as a further part of the namespace; the group's layer names list them."""


class PagedKVCache:
    """``num_blocks`` pages on the model's device. Used from one thread; other threads copy pages.

    Args:
        shape: what the model keeps of a sequence.
        num_blocks: pages.
        sizes: tokens in a page of keys and values.

    Attributes:
        page_size_bytes: bytes of one page.
        pages: the pages, shape (num_blocks, page_size_bytes), int8.
    """

    def __init__(self, shape: KVShape, num_blocks: int, sizes: BlockSizes) -> None:
        self._block_size_tokens = block_size_tokens = sizes.block_size_tokens
        self.page_size_bytes = page_bytes(shape, sizes)
        # Zeroed explicitly: torch.zeros maps memory at first touch, which would slow the first load or store of every
        # block.
        self.pages = torch.empty(
            (num_blocks, self.page_size_bytes), dtype=torch.int8, device=shape.device
        ).zero_()
        self._group_bytes = [
            size for size in (block_size_tokens * shape.token_bytes, shape.state_bytes) if size
        ]
        self._key_pages: list[torch.Tensor] = []
        self._value_pages: list[torch.Tensor] = []
        offset = 0
        for layer in shape.layers:
            keys = (block_size_tokens, layer.num_key_heads, layer.key_dim)
            values = (block_size_tokens, layer.num_value_heads, layer.value_dim)
            for views, size in ((self._key_pages, keys), (self._value_pages, values)):
                views.append(self._view(offset, size, shape.dtype))
                offset += prod(size) * shape.dtype.itemsize
        self._state_pages: list[torch.Tensor] = []
        offset = 0
        for state in shape.states:
            self._state_pages.append(self._view(offset, state.shape, state.dtype))
            offset += state.nbytes

    @property
    def canonical(self) -> CanonicalKVCaches:
        """The pool in the form of kvtier's handlers: one tensor of bytes, groups of keys and values and of states."""
        tensor = CanonicalKVCacheTensor(self.pages, self.page_size_bytes)
        return CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, size)] for size in self._group_bytes])

    @torch.no_grad()
    def gather(
        self,
        block_ids: Sequence[int],
        sequence: SequenceCache,
        num_tokens: int,
        state_block_id: int | None = None,
    ) -> None:
        """Copy the first ``num_tokens`` tokens of these blocks into ``sequence``, replacing its content.

        Args:
            block_ids: the blocks of keys and values; none for a model without any.
            sequence: the destination.
            num_tokens: tokens to copy.
            state_block_id: the page with the recurrent states after ``num_tokens``; None for a model without any, and
                without tokens.
        """
        num_blocks = -(-num_tokens // self._block_size_tokens)
        ids = torch.tensor(block_ids[:num_blocks], dtype=torch.int64, device=self.pages.device)
        sequence.set_num_tokens(0)
        sequence.reserve(num_blocks * self._block_size_tokens)
        for layer, keys, values in zip(
            sequence.sequence_layers, self._key_pages, self._value_pages, strict=True
        ):
            torch.index_select(keys, 0, ids, out=self._as_blocks(layer.key_buffer, 0, len(ids)))
            torch.index_select(values, 0, ids, out=self._as_blocks(layer.value_buffer, 0, len(ids)))
        if state_block_id is not None:
            for states, state in zip(self._state_pages, sequence.states, strict=True):
                state.copy_(states[state_block_id])
        sequence.set_num_tokens(num_tokens)

    @torch.no_grad()
    def write_states(self, sequence: SequenceCache, block_id: int) -> None:
        """Copy the recurrent states of ``sequence`` into a page.

        Effects: the rest of the page is as before; nothing reads it.
        """
        for states, state in zip(self._state_pages, sequence.states, strict=True):
            states[block_id].copy_(state)

    @torch.no_grad()
    def scatter(self, sequence: SequenceCache, first_block: int, block_ids: Sequence[int]) -> None:
        """Write full blocks of ``sequence`` into the pool.

        Args:
            sequence: holds every token of the blocks.
            first_block: index within the sequence of the first block to write.
            block_ids: the blocks to write, in the order of the sequence.
        """
        if not block_ids:
            return
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.pages.device)
        num_blocks = len(block_ids)
        for layer, keys, values in zip(
            sequence.sequence_layers, self._key_pages, self._value_pages, strict=True
        ):
            keys.index_copy_(0, ids, self._as_blocks(layer.key_buffer, first_block, num_blocks))
            values.index_copy_(0, ids, self._as_blocks(layer.value_buffer, first_block, num_blocks))

    def _view(self, offset_bytes: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the part of every page that begins at ``offset_bytes``, shape (num_blocks, *size)."""
        end = offset_bytes + prod(size) * dtype.itemsize
        return self.pages[:, offset_bytes:end].view(dtype).view(len(self.pages), *size)

    def _as_blocks(self, buffer: torch.Tensor, first_block: int, num_blocks: int) -> torch.Tensor:
        first = first_block * self._block_size_tokens
        tokens = buffer[first : first + num_blocks * self._block_size_tokens]
        return tokens.view(num_blocks, self._block_size_tokens, *buffer.shape[1:])


class DeviceCache:
    """The blocks that requests have in the device pool. Used from one thread.

    An interrupt between an allocation and its assignment would leak blocks, so it is deferred.

    Args:
        pool: which blocks are used and cached.
        pages: their bytes.
        sizes: tokens in a block, and between two states.

    Attributes:
        pool: as given.
        pages: as given.
        sizes: as given.
    """

    def __init__(self, pool: DeviceBlockPool, pages: PagedKVCache, sizes: BlockSizes) -> None:
        self.pool = pool
        self.pages = pages
        self.sizes = sizes

    def use_prefix(self, request: Request) -> int:
        """Give the request the blocks of its prefix that the pool holds; return its length in tokens.

        Effects: sets ``num_computed_tokens``.
        """
        interval, has_keys = self.sizes.state_interval_tokens, self.sizes.has_keys
        with DeferredInterrupt():
            prefix = self.pool.find_prefix(request.device_hashes) if has_keys else []
            num_tokens = len(prefix) * request.block_size_tokens
            if interval is None:
                request.block_ids = self.pool.allocate(prefix, 0)
            else:
                longest = request.num_tokens - 1
                longest = min(num_tokens, longest) if has_keys else longest
                num_tokens = self._use_states(request, prefix, longest, interval)
        request.num_computed_tokens = num_tokens
        request.num_filled_blocks = len(request.block_ids)
        return num_tokens

    def grow(self, request: Request, num_tokens: int, num_state_tokens: int) -> tuple[list[int], ...]:
        """Allocate the missing blocks, and return them for each KV group.

        Args:
            request: the request.
            num_tokens: tokens whose keys and values need room.
            num_state_tokens: tokens after which the recurrent states are kept, if they end an interval.

        Raises:
            DevicePoolError: the pool is full.
        """
        num_missing = max(0, request.num_blocks_for(num_tokens) - len(request.block_ids))
        num_skipped = request.num_states_for(num_state_tokens) - len(request.state_block_ids) - 1
        with DeferredInterrupt():
            new = self.pool.allocate([], num_missing + (num_skipped >= 0))
            request.block_ids.extend(new[:num_missing])
            # A load brings the last state and none before it.
            new_states = [*[NO_BLOCK] * num_skipped, *new[num_missing:]]
            request.state_block_ids.extend(new_states)
        return request.split_by_group(new[:num_missing], new_states)

    def complete_load(self, request: Request, num_external_tokens: int, failed: Collection[int]) -> int:
        """Publish what was loaded; return how many tokens were loaded before the first failed block.

        Args:
            request: the request.
            num_external_tokens: tokens of the load.
            failed: device blocks whose load failed. A state cannot be reached when any block before it is missing.
        """
        end = request.num_computed_tokens + num_external_tokens
        loaded = request.block_ids[request.num_filled_blocks : request.num_blocks_for(end)]
        if self.sizes.state_interval_tokens is None:
            request.num_failed_load_blocks = sum(block_id in failed for block_id in loaded)
            num_good = next((i for i, block_id in enumerate(loaded) if block_id in failed), len(loaded))
            end = (request.num_filled_blocks + num_good) * request.block_size_tokens
        elif failed:
            request.num_failed_load_blocks = len(failed)
            # What the device had is at the state before; what is behind is computed.
            self._release_states(request, num_kept=request.num_states_for(request.num_computed_tokens))
            return 0
        self._publish(request, request.num_blocks_for(end))
        if self.sizes.state_interval_tokens is not None:
            self._publish_last_state(request, end)
        num_loaded, request.num_computed_tokens = end - request.num_computed_tokens, end
        return num_loaded

    def gather(self, request: Request, sequence: SequenceCache) -> None:
        """Copy the request's computed tokens into ``sequence``, replacing its content."""
        used = request.used_state_blocks
        self.pages.gather(
            request.block_ids,
            sequence,
            request.num_computed_tokens,
            state_block_id=used[-1] if used else None,
        )

    def keep_full_blocks(self, request: Request, sequence: SequenceCache, num_tokens: int) -> None:
        """Write what became full with ``num_tokens`` computed tokens of ``sequence`` into the pool, and publish it."""
        first, last = request.num_filled_blocks, num_tokens // request.block_size_tokens
        if first < last and self.sizes.has_keys:
            self.pages.scatter(sequence, first, request.block_ids[first:last])
            self._publish(request, last)
        interval = self.sizes.state_interval_tokens
        if interval is not None and num_tokens % interval == 0:
            self.pages.write_states(sequence, request.state_block_ids[-1])
            self._publish_last_state(request, num_tokens)

    def free(self, request: Request) -> None:
        """Free every block of the request; those that are published stay cached until room is needed."""
        self.pool.free([*request.block_ids, *request.used_state_blocks])
        request.block_ids = []
        request.num_released_states = len(request.state_block_ids)

    def _use_states(self, request: Request, prefix: list[int], longest: int, interval: int) -> int:
        """Give the request the last states that the pool holds, with the blocks before them."""
        for num_tokens in range(longest // interval * interval, 0, -interval):
            states = self.pool.find_prefix([request.state_hash(num_tokens)])
            if states:
                blocks = prefix[: num_tokens // request.block_size_tokens]
                *request.block_ids, state = self.pool.allocate([*blocks, *states], 0)
                request.num_released_states = num_tokens // interval - 1
                request.state_block_ids = [*[NO_BLOCK] * request.num_released_states, state]
                return num_tokens
        return 0

    def _publish(self, request: Request, num_blocks: int) -> None:
        """Publish the blocks up to ``num_blocks`` that are not yet."""
        first = request.num_filled_blocks
        self.pool.publish(request.block_ids[first:num_blocks], request.device_hashes[first:num_blocks])
        request.num_filled_blocks = num_blocks

    def _publish_last_state(self, request: Request, num_tokens: int) -> None:
        """Publish the states after ``num_tokens``, and free those before; published ones stay cached."""
        self.pool.publish([request.state_block_ids[-1]], [request.state_hash(num_tokens)])
        with DeferredInterrupt():
            released = request.used_state_blocks[:-1]
            request.num_released_states = len(request.state_block_ids) - 1
            self.pool.free(released)

    def _release_states(self, request: Request, *, num_kept: int) -> None:
        """Free the states behind the first ``num_kept``, and take them out of the block table."""
        with DeferredInterrupt():
            released = [block for block in request.state_block_ids[num_kept:] if block != NO_BLOCK]
            del request.state_block_ids[num_kept:]
            self.pool.free(released)
