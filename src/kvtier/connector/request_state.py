"""The scheduler half's state of one request, from its first search to its end.

RequestState keeps the engine's own request object, which it reads in each step because hashes and confirmed tokens
grow, and the keys of its blocks. The rest is in six parts, each with one writer:

    SearchState     get_num_new_matched_tokens      the result of the last search
    LoadState       the start and end of a load     the loaded tokens
    ChoiceState     load_or_compute                 how much is worth loading
    AuditState      audit                           whether it is computed to be compared, and its first token's time
    BlockTables     the engine's allocations        which device blocks it has
    StoreState      planning                        which blocks were offered to the manager

A reset changes all of them: ``RequestState.on_reset``.
"""

import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvtier.base import OffloadKey, ReqContext, TransferJobId, make_offload_keys
from kvtier.config import OffloadingConfig
from kvtier.connector.groups import GroupLayout
from kvtier.connector.prefix_search import FoundPrefix
from kvtier.connector.protocols import Request, SchedulerOutput
from kvtier.connector.request_limits import (
    NO_LIMITS,
    NOTHING_ALLOWED,
    RequestLimits,
    parse_request_limits,
)
from kvtier.connector.tenant_finder import TenantFinder, make_tenant_finder
from kvtier.hints.envelope import add_envelope
from kvtier.misses import Miss, MissedRun
from kvtier.tenants import NO_TENANT, Tenant, salt_hash

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unwanted:
    """Hits of a search that the request does not load.

    Attributes:
        tokens: how many, by where they are: "CPU", or a tier's type.
        to_probe: blocks to measure anew, by the position of their tier; nothing else is loaded from these tiers.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)
    to_probe: Mapping[int, Sequence[OffloadKey]] = field(default_factory=dict)


NOTHING_UNWANTED = Unwanted()


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


@dataclass(slots=True)
class ChoiceState:
    """How much of the request is worth loading.

    Attributes:
        num_begun_tokens: tokens that it had, those of its load included, when the engine began it; None before.
        wanted_end_token: how far to load it, once chosen and until the engine begins it; None otherwise.
        unwanted: what was found and not loaded because computing it is faster.
    """

    num_begun_tokens: int | None = None
    wanted_end_token: int | None = None
    unwanted: Unwanted = NOTHING_UNWANTED


class Arm(Enum):
    """What is done with the hit of a request, for the sake of measuring it."""

    LOADED = "loaded"
    AUDITED = "audited"
    """It is computed, and its blocks are compared with those held."""

    SKIPPED = "skipped"
    """It is computed, because loads of its length from its tier turned out slower, or to find out whether they are."""

    STOPPED = "stopped"
    """It is computed, because too many blocks were wrong: nothing is loaded."""


class PinnedBlock(NamedTuple):
    """A block of a request that is computed and was found in host memory.

    Attributes:
        group_idx: its KV group.
        block: its index within the request.
        slot: where it is held.
    """

    group_idx: int
    block: int
    slot: int


@dataclass(slots=True)
class AuditState:
    """The part of the request in the audit.

    Attributes:
        arm: what is done with its hit.
        is_searched: whether the search for its hit is final.
        is_begun: whether the engine has begun it.
        is_watched: whether its first token is waited for.
        tier: where its hit is, "host" or a tier's type.
        num_tokens: tokens of its hit; 0 before that is known, or when there is none.
        time_s: seconds from its first search to its first token; None before that.
        is_counted: whether it is in the trial.
        is_forced: whether it is loaded although loads of its length are switched off.
        blocks: what is pinned and not compared yet.
        stored: the blocks that it has stored itself while the search for its hit went on: they are no hit.
    """

    arm: Arm
    is_searched: bool = False
    is_begun: bool = False
    is_watched: bool = False
    tier: str = ""
    num_tokens: int = 0
    time_s: float | None = None
    is_counted: bool = False
    is_forced: bool = False
    blocks: dict[OffloadKey, PinnedBlock] = field(default_factory=dict)
    stored: set[OffloadKey] = field(default_factory=set)

    @property
    def is_computed(self) -> bool:
        """Whether the request is computed whatever is held of it."""
        return self.arm is Arm.AUDITED or self.arm is Arm.STOPPED

    @property
    def is_open(self) -> bool:
        """Whether the request is computed and the search for its hit goes on."""
        return self.arm is Arm.AUDITED and not self.is_searched


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


class BegunRequest(NamedTuple):
    """What is known of a request since the engine began it, until its load has ended.

    Attributes:
        began_s: when it began, seconds since 1970.
        num_device_tokens: tokens that the device had.
        first_token: tokens before it are on the device or loaded, unless the load fails.
        missed: why tokens from there on are computed; those behind the last of them are the partial block.
        waited_s: seconds since its first search.
        first_key: key of the first block that is missing.
    """

    began_s: float
    num_device_tokens: int
    first_token: int
    missed: tuple[MissedRun, ...]
    waited_s: float
    first_key: OffloadKey | None


class EndedRequest(NamedTuple):
    """What is known of a request since its load has ended, or since it began without one.

    Attributes:
        req_id: the request.
        num_prompt_tokens: length of its prompt.
        begun: what was known when it began.
        tokens_by_tier: tokens that its load has brought, by medium or type of their tier.
        failure: why the load has failed, so that its tokens were computed; None: it has not.
    """

    req_id: str
    num_prompt_tokens: int
    begun: BegunRequest
    tokens_by_tier: Mapping[str, int]
    failure: Miss | None


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
        choice: how much of it is worth loading.
        audit: its part in the audit; None where there is none.
        begun: where its prompt came from, once the engine has begun it.
        ended: the same, once its load has ended.
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
    choice: ChoiceState = field(default_factory=ChoiceState)
    audit: AuditState | None = None
    begun: BegunRequest | None = None
    ended: EndedRequest | None = None

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

    def on_reset(self) -> None:
        """Start again with the primary tier empty; device blocks computed before must not be stored."""
        self.blocks.is_stale = self.blocks.is_allocated
        self.search.is_touched = False
        self.choice.wanted_end_token = None
        self.choice.unwanted = NOTHING_UNWANTED
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
