"""One request: its tokens, its block hashes, its device blocks, and where its prompt came from.

It has the attributes of ``kvtier.connector.protocols.Request``, so the connector reads it as it is; the engine writes
it. A block hash is a SHA-256 chained over the parent's digest, the salt and the token ids. It stands for the
block's tokens and every token before them, so equal digests mean equal keys and values. Only full blocks have one.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier.connector.common import StopReason
from kvtier.engines.common.step import CachedRequests, NewRequest, StepOutput
from kvtier.engines.transformers.config import BlockSizes
from kvtier.tenants import salt_hash

HASH_ALGORITHM = "sha256"
"""Name of the hash in the namespace."""

ID_TYPE_CODE = "q"
"""Token ids enter the hash as 64-bit integers, which hold the ids of any vocabulary."""

NO_BLOCK = -1
"""Stands in a block table for a device block that the request does not have."""

STATE_MARK = b"state:"
"""Begins the names of recurrent states in the device pool, so that none is the name of a block."""


@dataclass(eq=False, slots=True)
class Request:
    """A request and its state.

    Attributes:
        request_id: unique within the engine.
        token_ids: prompt, then output.
        num_prompt_tokens: length of the prompt.
        sizes: of its blocks.
        root: parent digest of the first block.
        min_step_end_tokens: each step computes at least up to this token; a shorter one would rotate keys differently.
        goes_on_by_token: whether steps after the first compute one token; see ``Continuation``.
        kv_transfer_params: hints for the connector.
        device_key: what the hashes under which the device's blocks are found are made anew with; empty: nothing.
        block_hashes: one digest for each full block of ``token_ids``.
        device_hashes: the same for the device's prefix cache; the same list without a ``device_key``.
        block_ids: its device blocks of keys and values, in order.
        state_block_ids: for each multiple of the state interval the device block with the recurrent states after so
            many tokens; NO_BLOCK where the request has none.
        num_released_states: leading entries of ``state_block_ids`` that the request does not use any more.
        num_computed_tokens: tokens whose keys and values exist.
        num_filled_blocks: leading blocks whose bytes are in the pool.
        origins: prompt tokens that were not computed, by where they were found.
        num_failed_load_blocks: device blocks whose load failed.
        is_known: whether a step with this request has reached the connector.
        started_s: clock reading at its start.
        first_token_s: clock reading at its first token.
        ended_s: clock reading at its end; None until then.
        logits: logits of each output token, or None when they are not kept.
        stop: why its answer ended, for a recorded trace.
        is_traffic: whether it is a user's request; a request that only stores computed blocks is not recorded.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sizes: BlockSizes
    root: bytes
    min_step_end_tokens: int = 0
    goes_on_by_token: bool = False
    kv_transfer_params: dict[str, Any] | None = None  # Any: the connector's contract
    device_key: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    device_hashes: list[bytes] = field(init=False)
    block_ids: list[int] = field(default_factory=list)
    state_block_ids: list[int] = field(default_factory=list)
    num_released_states: int = 0
    num_computed_tokens: int = 0
    num_filled_blocks: int = 0
    origins: dict[str, int] = field(default_factory=dict)
    num_failed_load_blocks: int = 0
    is_known: bool = False
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float | None = None
    logits: list[torch.Tensor] | None = None
    stop: StopReason = StopReason.UNKNOWN
    is_traffic: bool = True

    def __post_init__(self) -> None:
        self.device_hashes = [] if self.device_key else self.block_hashes
        self._extend_hashes()

    @property
    def block_size_tokens(self) -> int:
        """Tokens in a block."""
        return self.sizes.block_size_tokens

    @property
    def used_state_blocks(self) -> list[int]:
        """The device blocks with recurrent states that it uses, first to last; at most two."""
        return [block for block in self.state_block_ids[self.num_released_states :] if block != NO_BLOCK]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Add an output token."""
        self.token_ids.append(token_id)
        self._extend_hashes()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of keys and values ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size_tokens) if self.sizes.has_keys else 0

    def num_states_for(self, num_tokens: int) -> int:
        """Return how many multiples of the state interval ``num_tokens`` tokens have reached."""
        interval = self.sizes.state_interval_tokens
        return 0 if interval is None else num_tokens // interval

    def state_hash(self, num_tokens: int) -> bytes:
        """Return the name on the device of the recurrent states after ``num_tokens`` tokens, whole blocks."""
        return STATE_MARK + self.device_hashes[num_tokens // self.block_size_tokens - 1]

    def end_of_step(self, first_token: int, max_tokens: int) -> int:
        """Return up to which token a step computes that begins at ``first_token``.

        Args:
            first_token: tokens before it are computed.
            max_tokens: the step computes at most so many tokens, unless the prompt's positions need more at once.
        """
        end = max(first_token + max_tokens, self.min_step_end_tokens)
        interval = self.sizes.state_interval_tokens
        if interval is None:
            return min(end, self.num_tokens)
        if self.goes_on_by_token:
            # The one step of several tokens goes as far as a state can be of use to another request.
            longest = (self.num_tokens - 1) // interval * interval or self.num_tokens
            return first_token + 1 if first_token else longest
        # A model returns its states at the end of a step only, so the step ends where they are kept.
        return min(end, (first_token // interval + 1) * interval, self.num_tokens)

    def plan_step(self, num_tokens: int, new_block_ids: tuple[list[int], ...] = ()) -> StepOutput:
        """Return the step that computes ``num_tokens`` tokens after those already computed.

        Args:
            num_tokens: tokens to compute.
            new_block_ids: for each KV group the blocks appended to its table since its last step.
        """
        scheduled = {self.request_id: num_tokens}
        if not self.is_known:
            new = NewRequest(self.request_id, self.get_block_ids(), self.num_computed_tokens)
            return StepOutput(scheduled_new_reqs=[new], num_scheduled_tokens=scheduled)
        cached = CachedRequests(
            req_ids=[self.request_id],
            new_block_ids=[new_block_ids if any(new_block_ids) else None],
            num_computed_tokens=[self.num_computed_tokens],
        )
        return StepOutput(scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block table of each of its KV groups."""
        return self.split_by_group(list(self.block_ids), list(self.state_block_ids))

    def split_by_group(self, block_ids: list[int], state_block_ids: list[int]) -> tuple[list[int], ...]:
        """Return blocks of keys and values and blocks of states as one list for each KV group that there is."""
        if self.sizes.state_interval_tokens is None:
            return (block_ids,)
        return (block_ids, state_block_ids) if self.sizes.has_keys else (state_block_ids,)

    def _extend_hashes(self) -> None:
        extend_block_hashes(self.block_hashes, self.token_ids, self.block_size_tokens, self.root)
        if self.device_key:
            new = self.block_hashes[len(self.device_hashes) :]
            self.device_hashes += [salt_hash(block_hash, self.device_key) for block_hash in new]


def make_root_digest(salt: str) -> bytes:
    """Return the parent digest of every first block; engines with different salts share no block. Pure."""
    return hashlib.sha256(b"kvtier.block_hash.1\0" + salt.encode()).digest()


def make_range_root(root: bytes, length_range: str) -> bytes:
    """Return the parent digest of first blocks of sequences in one range of lengths. Pure.

    Args:
        root: the engine's root digest, which is returned for an empty ``length_range``.
        length_range: name of the range; keys of different ranges differ, so they share no block.
    """
    if not length_range:
        return root
    return hashlib.sha256(b"kvtier.length_range.1\0" + root + length_range.encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of one full block after ``parent``, 32 bytes. Pure."""
    return hashlib.sha256(parent + array(ID_TYPE_CODE, token_ids).tobytes()).digest()


def extend_block_hashes(
    digests: list[bytes], token_ids: Sequence[int], block_size_tokens: int, root: bytes
) -> None:
    """Append to ``digests`` one digest for each full block of ``token_ids`` that has none yet."""
    for index in range(len(digests), len(token_ids) // block_size_tokens):
        first = index * block_size_tokens
        parent = digests[-1] if digests else root
        digests.append(hash_block(parent, token_ids[first : first + block_size_tokens]))


def make_prompt_hasher(
    salt: str, block_size_tokens: int, name_range: Callable[[int], str]
) -> Callable[[Sequence[int]], list[bytes]]:
    """Return a function that makes the hashes of a prompt's full blocks.

    Args:
        salt: the engine's.
        block_size_tokens: tokens in a block.
        name_range: names the range of lengths in which a prompt of so many tokens is.
    """
    engine_root = make_root_digest(salt)

    def hash_prompt(token_ids: Sequence[int]) -> list[bytes]:
        digests: list[bytes] = []
        root = make_range_root(engine_root, name_range(len(token_ids)))
        extend_block_hashes(digests, token_ids, block_size_tokens, root)
        return digests

    return hash_prompt
