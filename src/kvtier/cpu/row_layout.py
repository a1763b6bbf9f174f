"""Where the bytes of a block are within a worker's part of a row, and which bytes a pair of specs moves.

A block of a group is its refs one after another, each as ``block_size_factor`` sub-blocks, one per device block,
unpadded and without gaps. Bytes that the largest group has beyond a smaller one are the smaller one's tail: they belong
to no block and are zeroed when the block is stored.

A store may begin in the middle of an offloaded block. It then writes its own sub-blocks and the tail; the other
sub-blocks keep their bytes, so only full blocks may be stored into a slot with other content.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvtier.base import BlockIds, CanonicalKVCaches, GPULoadStoreSpec
from kvtier.config import KVGroup
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.errors import KVCacheLayoutError

MAX_NAMED = 4
"""Layers and tensors that an error names; more would hide what it says."""


class PagePlace(NamedTuple):
    """One ref of a group: its tensor, and its bytes within a worker's part of a row.

    Attributes:
        tensor_idx: index of the canonical tensor.
        page_size_bytes: bytes of one device block, unpadded.
        offset_bytes: start of its first sub-block.
    """

    tensor_idx: int
    page_size_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The refs of one group in the order of their bytes.

    Attributes:
        places: the refs.
        used_bytes: bytes of a block of this group; the rest of the part is its tail.
        page_size_bytes: bytes of one device block over all refs.
        num_device_blocks: the smallest number of blocks of the group's tensors.
    """

    places: tuple[PagePlace, ...]
    used_bytes: int
    page_size_bytes: int
    num_device_blocks: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A worker's part of a row, for every group.

    Attributes:
        groups: the layout of each group.
        block_size_factor: device blocks in an offloaded block.
        part_bytes: bytes of a block of the largest group.
    """

    groups: tuple[GroupRows, ...]
    block_size_factor: int
    part_bytes: int


@dataclass(frozen=True, slots=True)
class GroupMoves:
    """The device blocks of one group in a transfer, and the slots they belong to.

    Device block ``i`` is sub-block ``(first_sub_block + i) % factor`` of slot
    ``slots[(first_sub_block + i) // factor]``.

    Attributes:
        group_idx: the group.
        device_blocks: shape (num_blocks,), int64.
        slots: shape (num_slots,), int64.
        first_sub_block: sub-block of the first slot at which the transfer begins.
    """

    group_idx: int
    device_blocks: BlockIds
    slots: BlockIds
    first_sub_block: int


class JoinedMoves(NamedTuple):
    """The blocks of one group in several transfers, one transfer after the other.

    Attributes:
        moves: whole slots only.
        sizes: device blocks of each transfer.
    """

    moves: GroupMoves
    sizes: tuple[int, ...]


class Run(NamedTuple):
    """Consecutive device blocks in consecutive slots and sub-blocks.

    It is a rectangle: ``num_slots`` slots, and in each the sub-blocks from ``first_sub_block`` on.
    """

    first_device_block: int
    first_slot: int
    num_slots: int
    first_sub_block: int
    num_sub_blocks: int

    @property
    def num_device_blocks(self) -> int:
        """Device blocks in the rectangle."""
        return self.num_slots * self.num_sub_blocks


class SlotRange(NamedTuple):
    """Bytes of one slot, within the worker's part.

    Attributes:
        nth: index of the slot among the moves' slots.
        slot: its number.
        start: first byte.
        end: the byte after the last.
    """

    nth: int
    slot: int
    start: int
    end: int


def plan_layout(kv_caches: CanonicalKVCaches, block_size_factor: int) -> RowLayout:
    """Place every ref of every group. Pure.

    Raises:
        KVCacheLayoutError: there is nothing to place, or a ref does not fit its tensor.
    """
    if block_size_factor < 1:
        raise KVCacheLayoutError(f"block_size_factor={block_size_factor}: must be at least 1")
    groups = tuple(
        _plan_group(kv_caches, group, block_size_factor) for group in range(_num_groups(kv_caches))
    )
    return RowLayout(groups, block_size_factor, max(group.used_bytes for group in groups))


def check_page_sizes(groups: Sequence[KVGroup], kv_caches: CanonicalKVCaches) -> None:
    """Refuse tensors whose pages are not those of the configured groups. Pure.

    Args:
        groups: the configured groups, in the order of the caches' refs.
        kv_caches: refs that ``plan_layout`` accepts.

    Raises:
        KVCacheLayoutError: the number of groups differs, or the refs of a group have more or fewer bytes than its
            page: the copy would then move a part of each page only, or the bytes of another layer.
    """
    if len(groups) != len(kv_caches.group_data_refs):
        raise KVCacheLayoutError(
            f"the KV cache has {len(kv_caches.group_data_refs)} groups, the configuration has {len(groups)}: register "
            "one list of refs for each configured group, in the same order"
        )
    for group_idx, (group, refs) in enumerate(zip(groups, kv_caches.group_data_refs, strict=True)):
        registered_bytes = sum(ref.page_size_bytes for ref in refs)
        if registered_bytes == group.page_size_bytes:
            continue
        pages = ", ".join(f"tensor {ref.tensor_idx}: {ref.page_size_bytes}" for ref in refs[:MAX_NAMED])
        more = ", ..." if len(refs) > MAX_NAMED else ""
        layers = ", ".join(group.layer_names[:MAX_NAMED]) + (
            ", ..." if len(group.layer_names) > MAX_NAMED else ""
        )
        raise KVCacheLayoutError(
            f"group {group_idx} (layers {layers}): the registered pages have {registered_bytes} bytes ({pages}{more}), "
            f"the configuration says page_size_bytes={group.page_size_bytes}: register every layer's page in full "
            "and without padding, or set page_size_bytes of the group to the sum over its layers"
        )


def plan_moves(
    layout: RowLayout, device: GPULoadStoreSpec, rows: CPULoadStoreSpec, num_slots: int
) -> list[GroupMoves]:
    """Pair device blocks with slots, group by group; groups without blocks are skipped. Pure.

    Args:
        layout: the bytes within a row.
        device: the device's side of the transfer.
        rows: the primary tier's side: for each group as many slots as its device blocks extend over.
        num_slots: slots of the primary tier.

    Raises:
        KVCacheLayoutError: the sides disagree, or name a block that does not exist.
    """
    if len(device.group_sizes) != len(layout.groups):
        raise KVCacheLayoutError(
            f"the transfer has {len(device.group_sizes)} groups, the cache has {len(layout.groups)}: "
            "give one size for each group, zero for those without blocks"
        )
    factor = layout.block_size_factor
    moves: list[GroupMoves] = []
    block_end = slot_end = 0
    for group_idx, (size, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
        if size < 0 or index < 0:
            raise KVCacheLayoutError(f"group {group_idx}: size {size} and index {index} must not be negative")
        if size == 0:
            continue
        first_sub_block = index % factor
        block_start, block_end = block_end, block_end + size
        slot_start, slot_end = slot_end, slot_end - (-(first_sub_block + size) // factor)
        # Copies: the transfer reads them later, when the caller may have changed its arrays.
        blocks = device.block_ids[block_start:block_end].copy()
        slots = rows.block_ids[slot_start:slot_end].copy()
        _check_range(f"group {group_idx}: device block", blocks, layout.groups[group_idx].num_device_blocks)
        moves.append(GroupMoves(group_idx, blocks, slots, first_sub_block))
    if slot_end != len(rows.block_ids):
        raise KVCacheLayoutError(
            f"{len(device.block_ids)} device blocks at {device.block_indices} extend over {slot_end} slots "
            f"(factor {factor}), but {len(rows.block_ids)} slots are given: give one for each block entered"
        )
    _check_range("slot", rows.block_ids, num_slots)
    return moves


def is_whole(layout: RowLayout, device: GPULoadStoreSpec, rows: CPULoadStoreSpec) -> bool:
    """Return whether a transfer moves whole slots only, one for each offloaded block of the device's side. Pure."""
    factor, sizes, indices = layout.block_size_factor, device.group_sizes, device.block_indices
    return (
        len(sizes) == len(layout.groups)
        and len(rows.block_ids) * factor == len(device.block_ids)
        and min(sizes) >= 0 <= min(indices)
        and (factor == 1 or not any(number % factor for number in (*sizes, *indices)))
    )


def join_moves(
    layout: RowLayout, transfers: Sequence[tuple[GPULoadStoreSpec, CPULoadStoreSpec]], num_slots: int
) -> list[JoinedMoves]:
    """Pair device blocks with slots for several transfers at once, group by group. Pure.

    Args:
        layout: the bytes within a row.
        transfers: both sides of each; each ``is_whole``.
        num_slots: slots of the primary tier.

    Raises:
        KVCacheLayoutError: one of them names a block that does not exist.
    """
    factor = layout.block_size_factor
    starts = [0] * len(transfers)
    joined: list[JoinedMoves] = []
    for group_idx, group in enumerate(layout.groups):
        ends = [
            start + device.group_sizes[group_idx]
            for start, (device, _) in zip(starts, transfers, strict=True)
        ]
        spans = list(zip(transfers, starts, ends, strict=True))
        # Copies, as in plan_moves.
        blocks = np.concatenate([device.block_ids[start:end] for (device, _), start, end in spans])
        slots = np.concatenate(
            [rows.block_ids[start // factor : end // factor] for (_, rows), start, end in spans]
        )
        if len(blocks):
            _check_range(f"group {group_idx}: device block", blocks, group.num_device_blocks)
            _check_range("slot", slots, num_slots)
            sizes = tuple(end - start for _, start, end in spans)
            joined.append(JoinedMoves(GroupMoves(group_idx, blocks, slots, 0), sizes))
        starts = ends
    return joined


def part_moves(joined: Sequence[JoinedMoves], number: int, block_size_factor: int) -> list[GroupMoves]:
    """Return the moves of one of the transfers that were joined. Pure."""
    parts: list[GroupMoves] = []
    for moves, sizes in joined:
        start = sum(sizes[:number])
        end = start + sizes[number]
        if start < end:
            slots = moves.slots[start // block_size_factor : end // block_size_factor]
            parts.append(GroupMoves(moves.group_idx, moves.device_blocks[start:end], slots, 0))
    return parts


def count_bytes(layout: RowLayout, moves: Sequence[GroupMoves]) -> int:
    """Return the bytes that ``moves`` copy, without padding. Pure."""
    return sum(len(move.device_blocks) * layout.groups[move.group_idx].page_size_bytes for move in moves)


def locate(moves: GroupMoves, block_size_factor: int) -> tuple[BlockIds, BlockIds]:
    """Return slot and sub-block of each device block, in order. Pure."""
    positions = np.arange(len(moves.device_blocks)) + moves.first_sub_block
    return moves.slots[positions // block_size_factor], positions % block_size_factor


def split_moves(moves: GroupMoves, block_size_factor: int, max_slots: int) -> Iterator[GroupMoves]:
    """Yield ``moves`` in portions of at most ``max_slots`` slots, in order. Pure."""
    for first_slot in range(0, len(moves.slots), max_slots):
        place = first_slot * block_size_factor - moves.first_sub_block
        blocks = moves.device_blocks[max(0, place) : place + max_slots * block_size_factor]
        slots = moves.slots[first_slot : first_slot + max_slots]
        yield GroupMoves(moves.group_idx, blocks, slots, moves.first_sub_block if first_slot == 0 else 0)


def plan_slot_ranges(layout: RowLayout, moves: GroupMoves, *, has_tail: bool) -> Iterator[SlotRange]:
    """Yield the bytes that ``moves`` cover in each slot. Pure.

    A slot that is covered from its first sub-block to its last is one range, with its tail if ``has_tail``.

    Args:
        layout: the bytes within a row.
        moves: what to move.
        has_tail: whether to include tails.
    """
    factor, group = layout.block_size_factor, layout.groups[moves.group_idx]
    has_tail = has_tail and group.used_bytes < layout.part_bytes
    last = moves.first_sub_block + len(moves.device_blocks)
    for index, slot in enumerate(moves.slots.tolist()):
        first = moves.first_sub_block if index == 0 else 0
        end = min(factor, last - index * factor)
        if end - first == factor:
            yield SlotRange(index, slot, 0, layout.part_bytes if has_tail else group.used_bytes)
            continue
        for _, size_bytes, offset in group.places:
            yield SlotRange(index, slot, offset + first * size_bytes, offset + end * size_bytes)
        if has_tail:
            yield SlotRange(index, slot, group.used_bytes, layout.part_bytes)


def plan_runs(moves: GroupMoves, block_size_factor: int) -> list[Run]:
    """Merge what is adjacent on both sides into the fewest rectangles. Pure."""
    slots, sub_blocks = locate(moves, block_size_factor)
    places = slots * block_size_factor + sub_blocks
    is_break = (np.diff(moves.device_blocks) != 1) | (np.diff(places) != 1)
    starts = np.concatenate(([0], np.flatnonzero(is_break) + 1, [len(places)])).tolist()
    blocks, flat = moves.device_blocks.tolist(), places.tolist()
    return [
        run
        for start, end in pairwise(starts)
        for run in _cut_rectangles(blocks[start], flat[start], end - start, block_size_factor)
    ]


def _cut_rectangles(device_block: int, place: int, length: int, factor: int) -> Iterator[Run]:
    """Cut a line of sub-blocks into a partial first slot, whole slots and a partial last one."""
    while length:
        slot, sub_block = divmod(place, factor)
        is_whole = sub_block == 0 and length >= factor
        num_slots = length // factor if is_whole else 1
        num_sub_blocks = factor if is_whole else min(length, factor - sub_block)
        yield Run(device_block, slot, num_slots, sub_block, num_sub_blocks)
        done = num_slots * num_sub_blocks
        device_block, place, length = device_block + done, place + done, length - done


def _num_groups(kv_caches: CanonicalKVCaches) -> int:
    if not kv_caches.tensors or not kv_caches.group_data_refs:
        raise KVCacheLayoutError("no KV cache tensors are registered: the model needs at least one KV group")
    return len(kv_caches.group_data_refs)


def _plan_group(kv_caches: CanonicalKVCaches, group_idx: int, factor: int) -> GroupRows:
    refs = kv_caches.group_data_refs[group_idx]
    if not refs:
        raise KVCacheLayoutError(f"group {group_idx} has no refs: a group has at least one layer")
    places: list[PagePlace] = []
    offset = 0
    for ref in refs:
        if not 0 <= ref.tensor_idx < len(kv_caches.tensors):
            raise KVCacheLayoutError(
                f"group {group_idx} names tensor {ref.tensor_idx}, there are {len(kv_caches.tensors)}"
            )
        padded_bytes = kv_caches.tensors[ref.tensor_idx].page_size_bytes
        if not 1 <= ref.page_size_bytes <= padded_bytes:
            raise KVCacheLayoutError(
                f"group {group_idx}: a page of {ref.page_size_bytes} bytes does not fit tensor "
                f"{ref.tensor_idx}, whose pages have {padded_bytes} bytes"
            )
        places.append(PagePlace(ref.tensor_idx, ref.page_size_bytes, offset))
        offset += ref.page_size_bytes * factor
    num_blocks = min(int(kv_caches.tensors[ref.tensor_idx].tensor.shape[0]) for ref in refs)
    return GroupRows(tuple(places), offset, offset // factor, num_blocks)


def _check_range(what: str, numbers: BlockIds, num_known: int) -> None:
    """Refuse numbers out of range: numpy would count negative ones from the end and copy wrong blocks."""
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= num_known):
        worst = int(numbers.min()) if numbers.min() < 0 else int(numbers.max())
        raise KVCacheLayoutError(f"{what} {worst} does not exist: there are {num_known}, counted from 0")
