"""Which keys and device blocks a load or a store moves, or the audit compares.

A load reads every block of its tokens, group by group. A store has two steps: ``list_storable_blocks`` finds the blocks
that this step makes full, and ``offer_blocks`` reserves slots for them in the manager, for fewer at a time when there
is no room for all.

A recurrent state is overwritten as its request goes on, so most blocks of a state group never hold the state after
their last token. Where the engine names those that do (``KeptState``), they are stored and no others.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse, repeat
from operator import attrgetter
from typing import NamedTuple

from kvtier.base import GPULoadStoreSpec, LoadStoreSpec, OffloadKey, PrepareStoreOutput, ReqContext
from kvtier.connector.groups import GroupLayout
from kvtier.connector.request_state import BlockTables, KeptState, RequestState
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.errors import InvariantError

NEVER_TOKENS = sys.maxsize
"""More tokens than a request can have."""

PrepareStore = Callable[[list[OffloadKey], ReqContext], PrepareStoreOutput | None]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load.

    Attributes:
        keys: the blocks, ordered by group.
        device_blocks: where their bytes go, ordered by group.
        device_spec: the same for the workers.
    """

    keys: list[OffloadKey]
    device_blocks: list[int]
    device_spec: GPULoadStoreSpec


class StorableBlock(NamedTuple):
    """A block that could be stored; sorts by position.

    Attributes:
        end_token: the token behind it.
        group_idx: its KV group.
        block: its index within the request.
        key: its key.
        device_block: where its bytes are, when that is not its place in the block table.
    """

    end_token: int
    group_idx: int
    block: int
    key: OffloadKey
    device_block: int | None = None


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


class ComputedBlocks(NamedTuple):
    """Which pinned blocks of a group are on the device after a step.

    Attributes:
        device_blocks: those that are, with the device blocks of each.
        lost: those that were passed over: the device has them no more, or never had.
    """

    device_blocks: dict[OffloadKey, Sequence[int]]
    lost: list[OffloadKey]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """One store with reserved slots.

    Attributes:
        keys: the blocks, ordered by group.
        device_blocks: where their bytes are, ordered by group.
        device_spec: the same for the workers.
        slots: where the bytes go, in the same order.
    """

    keys: list[OffloadKey]
    device_blocks: list[int]
    device_spec: GPULoadStoreSpec
    slots: LoadStoreSpec


class StoreOffers(NamedTuple):
    """Result of offering blocks to the manager.

    Attributes:
        plans: the stores that it has made room for.
        num_refused: offers for which it had no room.
    """

    plans: list[StorePlan]
    num_refused: int


def iterate_load_keys(
    layouts: Sequence[GroupLayout], keys: Sequence[Sequence[OffloadKey]], first_token: int, end_token: int
) -> Iterator[OffloadKey]:
    """Yield the keys that a load of the tokens in between reads, ordered by group. Pure."""
    for layout in layouts:
        span = layout.span(first_token, end_token)
        yield from keys[layout.idx][span.first_block : span.end_block]


def plan_load(
    layouts: Sequence[GroupLayout],
    keys: Sequence[Sequence[OffloadKey]],
    block_ids: Sequence[Sequence[int]],
    first_token: int,
    end_token: int,
) -> LoadPlan:
    """Return the load that extends a prefix of ``first_token`` tokens to ``end_token``. Pure.

    Raises:
        InvariantError: the engine allocated fewer device blocks than it promised to load.
    """
    load_keys: list[OffloadKey] = []
    device_blocks: list[int] = []
    group_sizes: list[int] = []
    block_indices: list[int] = []
    for layout in layouts:
        span = layout.span(first_token, end_token)
        ids = block_ids[layout.idx][span.first_device_block : span.end_device_block]
        if len(ids) != span.end_device_block - span.first_device_block:
            raise InvariantError(
                f"group {layout.idx} has {len(block_ids[layout.idx])} device blocks, but loading up to token "
                f"{end_token} needs {span.end_device_block}: allocate them before update_state_after_alloc"
            )
        load_keys += keys[layout.idx][span.first_block : span.end_block]
        device_blocks += ids
        group_sizes.append(len(ids))
        block_indices.append(span.first_device_block)
    return LoadPlan(load_keys, device_blocks, GPULoadStoreSpec(device_blocks, group_sizes, block_indices))


def count_tokens_by_tier(
    layouts: Sequence[GroupLayout],
    keys: Sequence[Sequence[OffloadKey]],
    promoted: Mapping[OffloadKey, str],
    first_token: int,
    end_token: int,
) -> dict[str, int]:
    """Return how many tokens of a load come from each tier, none of them zero. Pure.

    Args:
        layouts: the KV groups.
        keys: for each group the keys of the request's full blocks.
        promoted: blocks that were promoted while the request waited for them, by their tier's type.
        first_token: leading tokens that device memory has.
        end_token: one past the last token of the load.
    """
    num_tokens = end_token - first_token
    tokens_by_tier: dict[str, int] = {}
    if promoted:
        layout = next((layout for layout in layouts if layout.num_tail_tokens is None), layouts[0])
        span, block_tokens = layout.span(first_token, end_token), layout.block_tokens
        for block in range(span.first_block, span.end_block):
            tier = promoted.get(keys[layout.idx][block])
            if tier is not None:
                # Without a group that needs the whole prefix, the first block of the tail brings what is before it too.
                begin = first_token if block == span.first_block else block * block_tokens
                end = min(end_token, (block + 1) * block_tokens)
                tokens_by_tier[tier] = tokens_by_tier.get(tier, 0) + end - begin
    num_held_tokens = num_tokens - sum(tokens_by_tier.values())
    return (
        {CPULoadStoreSpec.medium(): num_held_tokens, **tokens_by_tier} if num_held_tokens else tokens_by_tier
    )


def list_storable_blocks(
    layouts: Sequence[GroupLayout], state: RequestState, num_scheduled_tokens: int
) -> list[StorableBlock]:
    """Return the blocks that were not offered yet and can be stored after this step, first positions first.

    Effects:
        Makes the keys of new blocks. Moves past blocks that have left a window. ``state.stores.next_tokens`` becomes
        the token at which the block behind the returned ones will be full.
    """
    tables, stores = state.blocks, state.stores
    # Drafts may be rejected: only confirmed tokens make a block full.
    end_token = min(tables.num_computed_tokens + num_scheduled_tokens, state.request.num_tokens)
    limit = state.limits.max_store_tokens
    if limit is not None:
        end_token = min(end_token, limit)
    if end_token < stores.next_tokens or tables.is_stale:
        return []
    state.grow_keys(layouts)
    found: list[StorableBlock] = []
    next_tokens = NEVER_TOKENS
    # States that the engine names are where it says, not where the block table has a place for them.
    positional = layouts if tables.kept_states is None else filterfalse(attrgetter("is_state"), layouts)
    for layout in positional:
        idx, block_tokens, keys = layout.idx, layout.block_tokens, state.keys[layout.idx]
        first = stores.next_blocks[idx]
        if layout.num_tail_tokens is not None:
            first = max(first, layout.first_live_block(tables.num_freed_tokens))
            stores.next_blocks[idx] = first
        num_allocated = len(tables.block_ids[idx]) // layout.block_size_factor
        end = min(end_token // block_tokens, len(keys), num_allocated)
        if layout.num_tail_tokens is not None:
            first = _skip_unnamed(layout, tables.block_ids[idx], first, end)
        ends = range((first + 1) * block_tokens, (end + 1) * block_tokens, block_tokens)
        found += map(StorableBlock, ends, repeat(idx), range(first, end), keys[first:end])
        next_tokens = min(next_tokens, (max(first, end) + 1) * block_tokens)
    # A request that decodes past its limit would otherwise be planned for in each step, and for nothing.
    stores.next_tokens = next_tokens if limit is None or next_tokens <= limit else NEVER_TOKENS
    if tables.kept_states:
        found += _find_kept(layouts, state, tables.kept_states, end_token)
        tables.kept_states = ()
    return found if len(layouts) == 1 else sorted(found)


def _skip_unnamed(layout: GroupLayout, table: Sequence[int], first: int, end: int) -> int:
    """Return the first block with a device block: an engine may name none for a state that one step has passed over."""
    while first < end and table[first * layout.block_size_factor] < 0:
        first += 1
    return first


def _find_kept(
    layouts: Sequence[GroupLayout], state: RequestState, kept: Sequence[KeptState], end_token: int
) -> list[StorableBlock]:
    """Return the states that end with a block, have a key and are not beyond ``end_token``."""
    found: list[StorableBlock] = []
    for group_idx, device_block, num_tokens in kept:
        keys, block_tokens = state.keys[group_idx], layouts[group_idx].block_tokens
        block = num_tokens // block_tokens - 1
        if num_tokens % block_tokens == 0 and num_tokens <= end_token and 0 <= block < len(keys):
            found.append(StorableBlock(num_tokens, group_idx, block, keys[block], device_block))
    return found


def find_computed(
    layout: GroupLayout, tables: BlockTables, pinned: Mapping[OffloadKey, PinnedBlock], end_token: int
) -> ComputedBlocks:
    """Return which pinned blocks of a group a step completes, and which can no longer be compared. Pure.

    Args:
        layout: the group.
        tables: the request's device blocks, after the step was planned.
        pinned: its pinned blocks, of every group.
        end_token: tokens that are computed after the step.
    """
    factor, table = layout.block_size_factor, tables.block_ids[layout.idx]
    end, first = end_token // layout.block_tokens, layout.first_live_block(tables.num_freed_tokens)
    kept: dict[int, int] | None = None
    if layout.is_state and tables.kept_states is not None:
        of_group = [one for one in tables.kept_states if one.group_idx == layout.idx]
        kept = {one.num_tokens: one.device_block for one in of_group}
    if not layout.is_state:
        end = min(end, len(table) // factor)
    found = ComputedBlocks({}, [])
    for key, (group_idx, block, _) in pinned.items():
        if group_idx != layout.idx:
            continue
        if block < first:
            found.lost.append(key)
        elif block < end:
            num_tokens, start = (block + 1) * layout.block_tokens, block * factor
            if kept is None:
                device_blocks: Sequence[int] = table[start : start + factor]
            else:
                device_blocks = [kept[num_tokens]] if num_tokens in kept else ()
            # A state that one step has passed over has no device block, or none that an engine names.
            if device_blocks and min(device_blocks) >= 0:
                found.device_blocks[key] = device_blocks
            else:
                found.lost.append(key)
    return found


def offer_blocks(
    layouts: Sequence[GroupLayout],
    state: RequestState,
    storable: list[StorableBlock],
    prepare_store: PrepareStore,
) -> StoreOffers:
    """Offer ``storable`` to the manager; return the stores for which it has reserved slots.

    Args:
        layouts: the KV groups.
        state: the request.
        storable: what to offer, first positions first.
        prepare_store: the manager's.

    Effects:
        ``state.stores`` remembers what was offered, and how large an offer found room. Each refusal halves it, so a
        step makes at most a logarithm of refused calls, and one when there was no room before.
    """
    stores = state.stores
    plans: list[StorePlan] = []
    num_refused = 0
    batch_blocks = stores.batch_blocks or len(storable)
    while storable:
        # Slots come back in the order of the call, and a transfer is ordered by group: so the call is too.
        batch = storable[:batch_blocks]
        if len(layouts) > 1:
            batch.sort(key=attrgetter("group_idx", "block"))
        output = prepare_store([block.key for block in batch], state.context)
        if output is None:
            num_refused += 1
            if len(batch) == 1:
                # What is left is storable already: it is offered again in the next step.
                stores.batch_blocks, stores.next_tokens = 1, 0
                return StoreOffers(plans, num_refused)
            batch_blocks = len(batch) // 2
            continue
        storable = storable[batch_blocks:]
        for block in batch:
            stores.next_blocks[block.group_idx] = block.block + 1
        if output.keys_to_store:
            plans.append(_plan_store(layouts, state, batch, output))
        # After a refusal larger offers would only be refused again; in a new step there may be room.
        batch_blocks = batch_blocks if num_refused else 2 * batch_blocks
    stores.batch_blocks = None
    return StoreOffers(plans, num_refused)


def _plan_store(
    layouts: Sequence[GroupLayout],
    state: RequestState,
    batch: list[StorableBlock],
    output: PrepareStoreOutput,
) -> StorePlan:
    stored = batch
    if len(output.keys_to_store) < len(batch):
        by_key = dict(zip((block.key for block in batch), batch, strict=True))
        stored = [by_key[key] for key in output.keys_to_store]
    device_blocks: list[int] = []
    group_sizes: list[int] = []
    block_indices: list[int] = []
    for layout in layouts:
        factor, table = layout.block_size_factor, state.blocks.block_ids[layout.idx]
        own = [block for block in stored if block.group_idx == layout.idx]
        blocks = [block.block for block in own]
        named = [block.device_block for block in own if block.device_block is not None]
        if named:
            device_blocks += named
        elif blocks and blocks == list(range(blocks[0], blocks[-1] + 1)):  # as nearly always
            device_blocks += table[blocks[0] * factor : (blocks[-1] + 1) * factor]
        else:
            for block in blocks:
                device_blocks += table[block * factor : (block + 1) * factor]
        group_sizes.append(len(blocks) * factor)
        block_indices.append(blocks[0] * factor if blocks else 0)
    device_spec = GPULoadStoreSpec(device_blocks, group_sizes, block_indices)
    return StorePlan(output.keys_to_store, device_blocks, device_spec, output.store_spec)
