"""The scheduler half's state of one request, from its first search to its end.

RequestState keeps the engine's own request object, which it reads in each step because hashes and confirmed tokens
grow, and the keys of its blocks. The rest is in four parts, each with one writer:

    SearchState     get_num_new_matched_tokens      the result of the last search
    LoadState       the start and end of a load     the loaded tokens
    BlockTables     the engine's allocations        which device blocks it has
    StoreState      planning                        which blocks were offered to the manager

A reset changes them: ``RequestState.on_reset``. What features know of a request is theirs (``features``).
"""

import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvtier.base import OffloadingManager, OffloadKey, ReqContext, TransferJobId, make_offload_keys
from kvtier.config import OffloadingConfig
from kvtier.connector.groups import GroupLayout
from kvtier.connector.protocols import Request, SchedulerOutput
from kvtier.connector.request_limits import (
    NO_LIMITS,
    NOTHING_ALLOWED,
    RequestLimits,
    parse_request_limits,
)
from kvtier.connector.tenant_finder import TenantFinder, make_tenant_finder
from kvtier.hints.envelope import add_envelope
from kvtier.tenants import NO_TENANT, Tenant, salt_hash

logger = logging.getLogger(__name__)


class FoundPrefix(NamedTuple):
    """The prefix that device memory and the tiers hold together.

    Attributes:
        end_token: its length: whole blocks of every group, or what the device holds when nothing can be loaded.
        first_end_token: how far the full-attention group reaches that was searched first; beyond ``end_token`` another
            group holds less.
        short_group: index of the group that ended the prefix.
    """

    end_token: int
    first_end_token: int
    short_group: int


@dataclass(slots=True)
class SearchState:
    """The last search for the request.

    Attributes:
        num_local_tokens: tokens found in device memory; None before the first search.
        max_end_token: where a load ends at the latest, whatever its client says; None before the first search.
        blocking_job: the load, for another request, that this one waits for.
        is_touched: whether its keys were touched since it arrived.
        waits_since_s: when the first search began that was not final; None while the request does not wait.
        found: the prefix that the last search has found; None before its final answer.
        began_s: the clock's reading at the first search.
        first_missing: key of the first block that is missing, where one is.
    """

    num_local_tokens: int | None = None
    max_end_token: int | None = None
    blocking_job: TransferJobId | None = None
    is_touched: bool = False
    waits_since_s: float | None = None
    found: FoundPrefix | None = None
    began_s: float = 0.0
    first_missing: OffloadKey | None = None


@dataclass(slots=True)
class LoadState:
    """The loads of the request.

    Attributes:
        tokens_by_tier: where the tokens of the last one came from.
        has_failed: whether one failed; the request never loads again then.
    """

    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    has_failed: bool = False


class KeptState(NamedTuple):
    """A device block that holds a recurrent state after a step.

    Attributes:
        group_idx: its KV group.
        device_block: the device block.
        num_tokens: the state is the one after so many tokens of its request.
    """

    group_idx: int
    device_block: int
    num_tokens: int


@dataclass(slots=True)
class BlockTables:
    """The device blocks of the request.

    Attributes:
        block_ids: for each group the device block table; empty while the request has none.
        num_computed_tokens: tokens whose KV is in the blocks before the step being planned.
        num_freed_tokens: tokens computed when the engine last freed what had left a window.
        is_allocated: whether device blocks are allocated to it.
        is_stale: whether its device blocks were computed before a reset; then they are not stored.
        kept_states: the recurrent states that its device blocks hold after the step being planned; None: each block of
            a state group holds the one after its last token, as far as the engine does not say otherwise.
    """

    block_ids: list[list[int]]
    num_computed_tokens: int = 0
    num_freed_tokens: int = 0
    is_allocated: bool = False
    is_stale: bool = False
    kept_states: Sequence[KeptState] | None = None

    def replace(self, block_ids: Sequence[Sequence[int]], num_computed_tokens: int) -> None:
        """Replace the whole block table."""
        self.block_ids = [list(ids) for ids in block_ids]
        self.num_computed_tokens = self.num_freed_tokens = num_computed_tokens
        self.is_allocated = True
        if num_computed_tokens == 0:
            self.is_stale = False

    def append(self, block_ids: Sequence[Sequence[int]] | None, num_computed_tokens: int) -> None:
        """Append the new blocks of one step."""
        if block_ids is not None:
            for table, ids in zip(self.block_ids, block_ids, strict=False):
                table.extend(ids)
        self.num_computed_tokens = num_computed_tokens
        # Rejected drafts lower the count, but what was freed for the higher one stays freed.
        if num_computed_tokens > self.num_freed_tokens:
            self.num_freed_tokens = num_computed_tokens

    def drop(self) -> None:
        """Forget the block table, which the engine has freed."""
        self.block_ids = [[] for _ in self.block_ids]
        self.is_allocated = False


@dataclass(slots=True)
class StoreState:
    """The blocks that were offered to the manager.

    Attributes:
        next_blocks: for each group the first offloaded block that was not offered yet.
        next_tokens: below so many storable tokens no further block is full.
        batch_blocks: blocks to offer in one call; None means as many as there are.
    """

    next_blocks: list[int]
    next_tokens: int = 0
    batch_blocks: int | None = None

    def offer_again(self) -> None:
        """Offer every block once more: the manager may have dropped those that it has stored."""
        self.next_blocks = [0] * len(self.next_blocks)
        self.next_tokens = 0


@dataclass(eq=False, slots=True)
class RequestState:
    """One request; compared by identity, because an engine may use a name again.

    Attributes:
        request: the engine's own object.
        context: what every manager and tier call for this request gets.
        limits: what may be loaded and stored.
        key_salt: decides the bytes of its blocks beyond their tokens, such as the weights of an adapter.
        tenant: whose it is; None: of a tenant that is not served, so that it has no keys at all.
        keys: for each group the keys of its full blocks, as far as hashed; only ``grow_keys`` adds to them.
        blocks: its device blocks.
        stores: what was offered to the manager.
        search: what the last search found.
        load: what its loads brought.
    """

    request: Request
    context: ReqContext
    limits: RequestLimits
    key_salt: bytes
    keys: list[list[OffloadKey]]
    blocks: BlockTables
    stores: StoreState
    tenant: Tenant | None = NO_TENANT
    search: SearchState = field(default_factory=SearchState)
    load: LoadState = field(default_factory=LoadState)

    def grow_keys(self, layouts: Sequence[GroupLayout]) -> None:
        """Make the keys of the blocks that were hashed since the last call."""
        tenant = self.tenant
        if tenant is None:
            return
        hashes = self.request.block_hashes
        for layout, keys in zip(layouts, self.keys, strict=True):
            step = layout.hashes_per_block
            first_end = (len(keys) + 1) * step
            if first_end > len(hashes):
                continue
            new = [hashes[end - 1] for end in range(first_end, len(hashes) + 1, step)]
            if self.key_salt:
                new = [salt_hash(block_hash, self.key_salt) for block_hash in new]
            if tenant.hash_key:
                new = list(map(tenant.own_hash, new))
            keys.extend(make_offload_keys(new, layout.idx, tenant.number))

    def keys_by_position(self, layouts: Sequence[GroupLayout], end_token: int) -> list[OffloadKey]:
        """Return the keys of the blocks that end at or before ``end_token``, first positions first."""
        if len(layouts) == 1:
            return self.keys[0][: end_token // layouts[0].block_tokens]
        runs = [
            [((block + 1) * layout.block_tokens, layout.idx, key) for block, key in enumerate(keys)]
            for layout, keys in zip(layouts, self.keys, strict=True)
        ]
        return [key for end, _, key in heapq.merge(*runs) if end <= end_token]

    def touch(self, manager: OffloadingManager, layouts: Sequence[GroupLayout], end_token: int) -> None:
        """Touch its blocks up to a token, the first most recent, so that its tail is evicted first."""
        if keys := self.keys_by_position(layouts, end_token):
            manager.touch(keys, self.context)

    def on_reset(self) -> None:
        """Start again with the primary tier empty; device blocks computed before must not be stored."""
        self.blocks.is_stale = self.blocks.is_allocated
        self.search.is_touched = False
        self.stores.offer_again()


def make_request_state(
    request: Request,
    num_groups: int,
    *,
    is_prompt_only: bool = False,
    key_salt: bytes = b"",
    tenants: TenantFinder | None = None,
) -> RequestState:
    """Return the state of a request that was never seen before. Pure.

    Args:
        request: the request.
        num_groups: number of KV groups.
        is_prompt_only: whether nothing beyond its prompt is stored.
        key_salt: what decides the bytes of its blocks beyond their tokens, such as the weights of an adapter.
        tenants: finds the request's tenant; None where there are none.
    """
    # vLLM from 0.32 on; other engines have no such attribute.
    params, envelope = request.kv_transfer_params, getattr(request, "kv_hints", None)
    if envelope is not None:
        params = add_envelope(params, envelope)
    context = ReqContext(request.request_id, params)
    tenant: Tenant | None = NO_TENANT
    if tenants is not None:
        tenant = tenants.find(request, params, context.hints)
    limits = parse_request_limits(params) if params else NO_LIMITS
    if tenant is None:
        limits = NOTHING_ALLOWED
    return RequestState(
        request=request,
        context=context,
        limits=limits.within_prompt(request.num_prompt_tokens) if is_prompt_only else limits,
        key_salt=key_salt,
        keys=[[] for _ in range(num_groups)],
        blocks=BlockTables([[] for _ in range(num_groups)]),
        stores=StoreState([0] * num_groups),
        tenant=tenant,
    )


def make_state_maker(config: OffloadingConfig, num_groups: int) -> Callable[..., RequestState]:
    """Return ``make_request_state`` with what is the same for every request of an engine.

    Raises:
        ConfigError, UnknownNameError: the setting ``tenants`` cannot work.
    """
    return partial(
        make_request_state,
        num_groups=num_groups,
        is_prompt_only=config.settings.offload_prompt_only,
        tenants=make_tenant_finder(config.settings),
    )


def follow_allocations(requests: Mapping[str, RequestState], output: SchedulerOutput) -> None:
    """Bring the block tables of the known requests up to date with a step.

    Args:
        requests: the requests that are known; those of others are skipped.
        output: the step.
    """
    for req_id in output.preempted_req_ids or ():
        if (state := requests.get(req_id)) is not None:
            state.blocks.drop()
    for new in output.scheduled_new_reqs:
        if (state := requests.get(new.req_id)) is not None:
            state.blocks.replace(new.block_ids, new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for req_id, block_ids, num_computed_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        state = requests.get(req_id)
        if state is None:
            continue
        if block_ids is not None and req_id in resumed:
            state.blocks.replace(block_ids, num_computed_tokens)
        else:
            state.blocks.append(block_ids, num_computed_tokens)
