"""What the scheduler half remembers of one request, from first sight to its end.

It plans nothing. The engine's own request object is kept and read each step, because hashes and confirmed
tokens grow; everything else here is the connector's.
"""

import heapq
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from kvtier.base import OffloadKey, ReqContext, TransferJobId, make_offload_keys
from kvtier.connector.groups import GroupLayout
from kvtier.connector.protocols import Request, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What may be loaded and stored: what the client allows, and what the settings leave of it.

    Attributes:
        max_load_tokens: tokens from this position on are not loaded; None sets no limit.
        max_store_tokens: tokens from this position on are not stored; None sets no limit.
    """

    max_load_tokens: int | None = None
    max_store_tokens: int | None = None

    def within_prompt(self, num_prompt_tokens: int) -> "RequestLimits":
        """Return the same limits with nothing stored beyond the prompt. Pure."""
        limit = num_prompt_tokens
        if self.max_store_tokens is not None:
            limit = min(limit, self.max_store_tokens)
        return replace(self, max_store_tokens=limit)


def parse_request_limits(params: Mapping[str, Any] | None) -> RequestLimits:  # Any: a client's JSON
    """Read the limits of one request; a value that makes no sense is logged and ignored.

    A client's mistake must not end the engine, and no limit is always right, only slower or faster.
    """
    if not params:
        return RequestLimits()
    return RequestLimits(_read_limit(params, "load"), _read_limit(params, "store"))


def _read_limit(params: Mapping[str, Any], direction: str) -> int | None:  # Any: a client's JSON
    if params.get(f"skip_{direction}") is True:
        return 0
    name = f"max_{direction}_tokens"
    value = params.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    logger.warning("kv_transfer_params: %s=%r is ignored: give a whole number, zero or more", name, value)
    return None


@dataclass(frozen=True, slots=True)
class Unwanted:
    """What was found of a request and is not loaded.

    Attributes:
        tokens: how many, by where they are: "CPU", or a tier's type.
        to_probe: for tiers of which nothing is loaded, by position, blocks that they have.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)
    to_probe: Mapping[int, Sequence[OffloadKey]] = field(default_factory=dict)


NOTHING_UNWANTED = Unwanted()


@dataclass(eq=False, slots=True)
class RequestState:
    """One request; compared by identity, because an engine may use a name again.

    Attributes:
        request: the engine's own object.
        context: what every manager and tier call for this request gets.
        limits: what may be loaded and stored.
        keys: for each group the keys of its full blocks, as far as hashed.
        block_ids: for each group the device block table; empty while the request has none.
        next_store_blocks: for each group the first offloaded block that was not offered to the manager yet.
        num_computed_tokens: tokens whose KV is in the blocks before the step being planned.
        num_local_tokens: tokens found in device memory when the request was last searched; None before.
        blocking_job: the load, for another request, that this one waits for.
        has_blocks: whether device blocks are allocated to it.
        has_failed_load: whether a load failed; then it never loads again.
        is_touched: whether its keys were touched since it arrived.
        is_stale: whether its device blocks were computed before a reset; then they are not stored.
        store_batch_blocks: blocks to offer in one call; None means as many as there are.
        num_freed_tokens: tokens computed when the engine last freed what had left a window.
        next_store_tokens: below so many storable tokens no further block is full.
        hit_sources: where the tokens of its last load came from.
        is_layerwise: whether it was last told that it may compute while its load runs.
        num_begun_tokens: tokens that it had, those of its load included, when the engine began it; None before.
        wanted_end_token: how far it is loaded, when that was chosen and it waits for it; None before.
        unwanted: what was found of it and is not loaded because computing it is faster.
    """

    request: Request
    context: ReqContext
    limits: RequestLimits
    key_salt: bytes
    keys: list[list[OffloadKey]]
    block_ids: list[list[int]]
    next_store_blocks: list[int]
    num_computed_tokens: int = 0
    num_local_tokens: int | None = None
    blocking_job: TransferJobId | None = None
    has_blocks: bool = False
    has_failed_load: bool = False
    is_touched: bool = False
    is_stale: bool = False
    store_batch_blocks: int | None = None
    num_freed_tokens: int = 0
    next_store_tokens: int = 0
    hit_sources: Mapping[str, int] = field(default_factory=dict)
    is_layerwise: bool = False
    num_begun_tokens: int | None = None
    wanted_end_token: int | None = None
    unwanted: Unwanted = NOTHING_UNWANTED

    def may_fill_block(self, num_scheduled_tokens: int) -> bool:
        """Return whether so many more tokens could make another block full; a thousand ask in every step."""
        return self.num_computed_tokens + num_scheduled_tokens >= self.next_store_tokens

    def grow_keys(self, layouts: Sequence[GroupLayout]) -> None:
        """Make the keys of the blocks that were hashed since the last call."""
        hashes = self.request.block_hashes
        for layout, keys in zip(layouts, self.keys, strict=True):
            step = layout.hashes_per_block
            first_end = (len(keys) + 1) * step
            if first_end > len(hashes):
                continue
            new = [hashes[end - 1] for end in range(first_end, len(hashes) + 1, step)]
            if self.key_salt:
                new = [salt_hash(block_hash, self.key_salt) for block_hash in new]
            keys.extend(make_offload_keys(new, layout.idx))

    def keys_by_position(self, layouts: Sequence[GroupLayout], end_token: int) -> list[OffloadKey]:
        """Return the keys of the blocks that end at or before ``end_token``, first positions first."""
        if len(layouts) == 1:
            return self.keys[0][: end_token // layouts[0].block_tokens]
        runs = [
            [((block + 1) * layout.block_tokens, layout.idx, key) for block, key in enumerate(keys)]
            for layout, keys in zip(layouts, self.keys, strict=True)
        ]
        return [key for end, _, key in heapq.merge(*runs) if end <= end_token]

    def replace_blocks(self, block_ids: Sequence[Sequence[int]], num_computed_tokens: int) -> None:
        """Take a whole new block table."""
        self.block_ids = [list(ids) for ids in block_ids]
        self.num_computed_tokens = self.num_freed_tokens = num_computed_tokens
        self.has_blocks = True
        if num_computed_tokens == 0:
            self.is_stale = False

    def append_blocks(self, block_ids: Sequence[Sequence[int]] | None, num_computed_tokens: int) -> None:
        """Take what one step appended to the block table."""
        for table, ids in zip(self.block_ids, block_ids or (), strict=False):
            table.extend(ids)
        self.num_computed_tokens = num_computed_tokens
        # Rejected drafts lower the count, but what was freed for the higher one stays freed.
        self.num_freed_tokens = max(self.num_freed_tokens, num_computed_tokens)

    def drop_blocks(self) -> None:
        """Forget the block table: the engine has taken it back."""
        self.block_ids = [[] for _ in self.block_ids]
        self.has_blocks = False

    def offer_again(self) -> None:
        """Offer every block once more: what was stored of those offered may have been given up."""
        self.next_store_blocks = [0] * len(self.next_store_blocks)
        self.next_store_tokens = 0

    def on_reset(self) -> None:
        """Begin anew with the primary tier empty; blocks computed before may hold what a reset forbids."""
        self.is_stale = self.has_blocks
        self.is_touched = False
        self.wanted_end_token = None
        self.unwanted = NOTHING_UNWANTED
        self.offer_again()


def salt_hash(block_hash: bytes, key_salt: bytes) -> bytes:
    """Return another hash of the same length, for what decides a block's bytes beyond its tokens. Pure."""
    return blake2b(block_hash, key=key_salt, digest_size=len(block_hash)).digest()


def make_request_state(
    request: Request, num_groups: int, *, is_prompt_only: bool = False, key_salt: bytes = b""
) -> RequestState:
    """Return the state of a request that was never seen before. Pure.

    Args:
        request: the request.
        num_groups: number of KV groups.
        is_prompt_only: whether nothing beyond its prompt is stored.
        key_salt: what decides the bytes of its blocks beyond their tokens, such as the weights of an adapter.
    """
    params = request.kv_transfer_params
    limits = parse_request_limits(params)
    return RequestState(
        request=request,
        context=ReqContext(request.request_id, params),
        limits=limits.within_prompt(request.num_prompt_tokens) if is_prompt_only else limits,
        key_salt=key_salt,
        keys=[[] for _ in range(num_groups)],
        block_ids=[[] for _ in range(num_groups)],
        next_store_blocks=[0] * num_groups,
    )


def follow_allocations(
    layouts: Sequence[GroupLayout], requests: Mapping[str, RequestState], output: SchedulerOutput
) -> list[int]:
    """Bring the block tables up to date with a step.

    Args:
        layouts: the KV groups.
        requests: the requests that are known; blocks of others are returned all the same.
        output: the step.

    Returns:
        Device blocks that this step may write to, or that were taken from a request; stores that read them
        must end first.

    Effects:
        Changes the states' block tables and computed tokens.
    """
    written: list[int] = []
    for req_id in output.preempted_req_ids or ():
        if (state := requests.get(req_id)) is not None:
            written.extend(block_id for table in state.block_ids for block_id in table)
            state.drop_blocks()
    for new in output.scheduled_new_reqs:
        if (state := requests.get(new.req_id)) is not None:
            state.replace_blocks(new.block_ids, new.num_computed_tokens)
        written.extend(list_written_blocks(layouts, new.block_ids, new.num_computed_tokens))
    if output.scheduled_cached_reqs.req_ids:
        written.extend(_follow_cached_requests(layouts, requests, output))
    return written


def list_written_blocks(
    layouts: Sequence[GroupLayout], block_ids: Sequence[Sequence[int]], num_computed_tokens: int
) -> list[int]:
    """Return the device blocks of a new block table that do not hold computed tokens alone. Pure.

    The blocks before those may be shared with whoever computed them, and reading them needs no fence.
    """
    return [
        block_id
        for layout, table in zip(layouts, block_ids, strict=True)
        for block_id in table[num_computed_tokens // layout.device_block_tokens :]
    ]


def _follow_cached_requests(
    layouts: Sequence[GroupLayout], requests: Mapping[str, RequestState], output: SchedulerOutput
) -> list[int]:
    cached = output.scheduled_cached_reqs
    written: list[int] = []
    for req_id, block_ids, num_computed_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        state = requests.get(req_id)
        if req_id in cached.resumed_req_ids and block_ids is not None:
            written.extend(list_written_blocks(layouts, block_ids, num_computed_tokens))
            if state is not None:
                state.replace_blocks(block_ids, num_computed_tokens)
            continue
        if block_ids is not None:
            written.extend(block_id for ids in block_ids for block_id in ids)
        if state is not None:
            state.append_blocks(block_ids, num_computed_tokens)
    return written
