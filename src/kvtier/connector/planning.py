"""Which keys a load reads and which device blocks it writes. It pins nothing and asks nobody."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

from kvtier.base import GPULoadStoreSpec, LoadStoreSpec, OffloadKey, PrepareStoreOutput
from kvtier.connector.groups import GroupLayout
from kvtier.connector.request_state import RequestState
from kvtier.errors import InvariantError


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load.

    Attributes:
        keys: the blocks, ordered by group.
        device_spec: where their bytes go.
    """

    keys: list[OffloadKey]
    device_spec: GPULoadStoreSpec


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
    device_ids: list[int] = []
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
        device_ids.extend(ids)
        group_sizes.append(len(ids))
        block_indices.append(span.first_device_block)
    return LoadPlan(
        list(iterate_load_keys(layouts, keys, first_token, end_token)),
        GPULoadStoreSpec(device_ids, group_sizes, block_indices),
    )


NEVER_TOKENS = sys.maxsize
"""More tokens than a request can have."""

StoreOffer = Callable[[list[OffloadKey]], PrepareStoreOutput | None]


class StorableBlock(NamedTuple):
    """A block that could be stored; sorts by position."""

    end_token: int
    group_idx: int
    block: int
    key: OffloadKey


@dataclass(frozen=True, slots=True)
class StorePlan:
    """One store that the manager has made room for.

    Attributes:
        keys: the blocks, ordered by group.
        device_spec: where their bytes are.
        slots: where they go, in the same order.
    """

    keys: list[OffloadKey]
    device_spec: GPULoadStoreSpec
    slots: LoadStoreSpec


def list_storable_blocks(
    layouts: Sequence[GroupLayout], state: RequestState, num_scheduled_tokens: int
) -> list[StorableBlock]:
    """Return the blocks that were not offered yet and can be stored after this step, first positions first.

    Effects:
        Makes the keys of new blocks; moves past blocks that have left a window.
    """
    end_token = storable_tokens(state, num_scheduled_tokens)
    if end_token < state.next_store_tokens or state.is_stale:
        return []
    state.grow_keys(layouts)
    found: list[StorableBlock] = []
    for layout in layouts:
        idx = layout.idx
        first = max(state.next_store_blocks[idx], layout.first_live_block(state.num_freed_tokens))
        num_allocated = len(state.block_ids[idx]) // layout.block_size_factor
        keys, block_tokens = state.keys[idx], layout.block_tokens
        end = min(end_token // block_tokens, len(keys), num_allocated)
        state.next_store_blocks[idx] = first
        ends = range((first + 1) * block_tokens, (end + 1) * block_tokens, block_tokens)
        found += map(StorableBlock, ends, repeat(idx), range(first, end), keys[first:end])
    _note_next_store(layouts, state)
    return found if len(layouts) == 1 else sorted(found)


def storable_tokens(state: RequestState, num_scheduled_tokens: int) -> int:
    """Return how many leading tokens are confirmed, computed after this step, and allowed. Pure."""
    computed = min(state.num_computed_tokens + num_scheduled_tokens, state.request.num_tokens)
    limit = state.limits.max_store_tokens
    return computed if limit is None else min(computed, limit)


def offer_blocks(
    layouts: Sequence[GroupLayout], state: RequestState, storable: list[StorableBlock], offer: StoreOffer
) -> Iterator[StorePlan]:
    """Offer ``storable`` to the manager and yield the stores it has made room for.

    Args:
        layouts: the KV groups.
        state: the request.
        storable: what to offer, first positions first.
        offer: the manager's prepare_store for this request.

    Effects:
        Remembers what was offered, and how large an offer found room; each refusal halves it, so a step
        makes at most a logarithm of refused calls, and one when there was no room before.
    """
    batch_blocks = state.store_batch_blocks or len(storable)
    was_refused = False
    while storable:
        # Slots come back in the order of the call, and a transfer is ordered by group: so the call is too.
        batch = storable[:batch_blocks]
        if len(layouts) > 1:
            batch.sort(key=attrgetter("group_idx", "block"))
        output = offer([block.key for block in batch])
        if output is None and len(batch) == 1:
            state.store_batch_blocks = 1
            return
        if output is None:
            was_refused = True
            batch_blocks = len(batch) // 2
            continue
        storable = storable[batch_blocks:]
        for group_idx, last_block in {block.group_idx: block.block for block in batch}.items():
            state.next_store_blocks[group_idx] = last_block + 1
        _note_next_store(layouts, state)
        if output.keys_to_store:
            yield _plan_store(layouts, state, batch, output)
        # After a refusal larger offers would only be refused again; in a new step there may be room.
        batch_blocks = batch_blocks if was_refused else 2 * batch_blocks
    state.store_batch_blocks = None


def _plan_store(
    layouts: Sequence[GroupLayout],
    state: RequestState,
    batch: list[StorableBlock],
    output: PrepareStoreOutput,
) -> StorePlan:
    stored = batch
    if len(output.keys_to_store) < len(batch):
        by_key = {block.key: block for block in batch}
        stored = [by_key[key] for key in output.keys_to_store]
    device_ids: list[int] = []
    group_sizes: list[int] = []
    block_indices: list[int] = []
    for layout in layouts:
        factor, table = layout.block_size_factor, state.block_ids[layout.idx]
        blocks = [block.block for block in stored if block.group_idx == layout.idx]
        if blocks and blocks == list(range(blocks[0], blocks[-1] + 1)):  # as nearly always
            device_ids += table[blocks[0] * factor : (blocks[-1] + 1) * factor]
        else:
            for block in blocks:
                device_ids += table[block * factor : (block + 1) * factor]
        group_sizes.append(len(blocks) * factor)
        block_indices.append(blocks[0] * factor if blocks else 0)
    device_spec = GPULoadStoreSpec(device_ids, group_sizes, block_indices)
    return StorePlan(output.keys_to_store, device_spec, output.store_spec)


def _note_next_store(layouts: Sequence[GroupLayout], state: RequestState) -> None:
    """Remember the token at which the next block will be full: below it a step costs one comparison."""
    next_tokens = min((state.next_store_blocks[layout.idx] + 1) * layout.block_tokens for layout in layouts)
    limit = state.limits.max_store_tokens
    # A request that decodes past its limit would otherwise be planned for in each step, and for nothing.
    state.next_store_tokens = next_tokens if limit is None or next_tokens <= limit else NEVER_TOKENS
