"""The device pool: keys and values in pages, one page of contiguous bytes for a block of all layers.

A page holds, layer after layer, the keys and then the values of its tokens, tokens first. So a transfer of a block to
host memory is one copy. Within a page a layer's keys are contiguous too, so gathering a prefix for the model is a plain
copy. For a model with recurrent states a page holds either such a block or the states after some number of tokens, all
of them one after another; every page has room for the larger of both.
"""

from collections.abc import Sequence
from math import prod

import torch

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.engines.transformers.block_sizes import BlockSizes, page_bytes
from kvtier.engines.transformers.model_adapter import KVShape
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
