"""How the tokens of each KV group map to device blocks, offloaded blocks and content hashes.

A GroupLayout computes, for one group, which blocks a span of tokens touches. The group's kind decides how much of a
prefix must be loaded: a full-attention group needs each block, a sliding window only the last ones, a state-space group
only its last state.
"""

import math
from dataclasses import dataclass, field

from kvtier.base import OffloadingSpec
from kvtier.config import GroupKind, KVGroup


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Blocks of one group that a load covers, as half-open ranges of indices within the request.

    Attributes:
        first_device_block: first device block.
        end_device_block: one past the last.
        first_block: first offloaded block; the load may enter it in the middle.
        end_block: one past the last.
    """

    first_device_block: int
    end_device_block: int
    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The block sizes of one KV group.

    Attributes:
        idx: the group's index, part of every key.
        device_block_tokens: tokens in a device block.
        block_size_factor: device blocks in an offloaded block.
        hashes_per_block: content hashes that an offloaded block covers.
        num_tail_tokens: how many tokens before the end of a prefix must be held to go on from there; None
            means the whole prefix.
        num_live_tokens: an engine keeps the device blocks of so many tokens before the end; None means as many as
            ``num_tail_tokens``. A state is kept in the block of the last token, and only there.
        is_state: whether a block is a recurrent state after its last token, rather than the KV of its tokens.
        block_tokens: tokens in an offloaded block.
    """

    idx: int
    device_block_tokens: int
    block_size_factor: int
    hashes_per_block: int
    num_tail_tokens: int | None
    num_live_tokens: int | None = None
    is_state: bool = False
    block_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        # A property would compute the same product several times for each request in each step.
        object.__setattr__(self, "block_tokens", self.device_block_tokens * self.block_size_factor)

    @property
    def num_tail_blocks(self) -> int | None:
        """Offloaded blocks that cover the tail when it ends with a block; at least one."""
        if self.num_tail_tokens is None:
            return None
        return max(1, math.ceil(self.num_tail_tokens / self.block_tokens))

    @property
    def can_compute_last_token(self) -> bool:
        """Whether the last token of a loaded prefix can be computed again from what the load has brought.

        A window reads the token in front of its tail then, which is there when it shares a device block with the tail.
        A state cannot be taken back by a token: its tail is its block.
        """
        return self.num_tail_tokens is None or self.num_tail_tokens % self.device_block_tokens != 0

    def span(self, first_token: int, end_token: int) -> BlockSpan:
        """Return the blocks to load so that a request can go on after ``end_token`` tokens. Pure.

        Args:
            first_token: tokens before it are in device memory already.
            end_token: length of the prefix after the load.
        """
        if self.num_tail_tokens is not None:
            first_token = max(first_token, end_token - self.num_tail_tokens)
        first_device_block = first_token // self.device_block_tokens
        end_device_block = max(first_device_block, math.ceil(end_token / self.device_block_tokens))
        first_block = first_device_block // self.block_size_factor
        end_block = math.ceil(end_device_block / self.block_size_factor)
        return BlockSpan(first_device_block, end_device_block, first_block, max(first_block, end_block))

    def first_live_block(self, num_computed_tokens: int) -> int:
        """Return the first offloaded block whose device blocks the engine still keeps. Pure.

        Engines free the device blocks that have left a window, so such a block can no longer be stored.
        """
        if self.num_tail_tokens is None:
            return 0
        num_live_tokens = self.num_tail_tokens if self.num_live_tokens is None else self.num_live_tokens
        first_device_block = max(0, num_computed_tokens - num_live_tokens) // self.device_block_tokens
        return math.ceil(first_device_block / self.block_size_factor)


def make_group_layouts(spec: OffloadingSpec) -> tuple[GroupLayout, ...]:
    """Return the layout of each KV group of ``spec``. Pure."""
    factor = spec.block_size_factor
    return tuple(
        GroupLayout(
            idx=idx,
            device_block_tokens=device_block_tokens,
            block_size_factor=factor,
            hashes_per_block=device_block_tokens * factor // spec.hash_block_size,
            num_tail_tokens=_num_tail_tokens(group),
            num_live_tokens=1 if group.kind is GroupKind.STATE else None,
            is_state=group.kind is GroupKind.STATE,
        )
        for idx, (device_block_tokens, group) in enumerate(
            zip(spec.gpu_block_size, spec.config.groups, strict=True)
        )
    )


def _num_tail_tokens(group: KVGroup) -> int | None:
    if group.kind is GroupKind.STATE:
        return group.block_size_tokens
    # The next token sees itself and window - 1 tokens before it.
    return None if group.window_tokens is None else group.window_tokens - 1
