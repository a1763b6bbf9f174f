"""Scratch memory laid out like an engine's, on which copiers prove themselves and are timed.

It chooses nothing; ``copier_choice`` does. The engine's KV cache and held rows are never touched. A proof compares
every byte of rows and pages with what ``row_copy`` makes of the same transfer in host memory.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvtier.cpu.cuda.span_copier import Build, DeviceCopier
from kvtier.cpu.row_copy import RowCopier
from kvtier.cpu.row_layout import GroupMoves, RowLayout, count_bytes

TRIAL_BYTES = 32 << 20
"""Most bytes of scratch rows, and of scratch pages, unless two blocks need more. It is what a start pays in device
memory beside the engine's KV cache; much less would time the launch and not the link."""

MIN_SLOTS = 2
"""Fewer could not be scattered."""

MAX_SLOTS = 1024
"""Most scratch rows: with pages of a few bytes the trial would time Python, for seconds."""

PROOF_SHARE = 8
"""A proof uses this part of the scratch memory. Its bytes are made and compared on the host, for each candidate,
direction and group: with all of the memory a start would take seconds."""

NUM_ROUNDS = 3
"""Timed transfers of each candidate and direction, after one that is not timed."""

Timer = Callable[[Callable[[], None]], float]
"""Runs a copy on the device, waits for it and returns the seconds it took."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """How scratch memory is laid out.

    Attributes:
        layout: where bytes are in a row.
        page_strides: for each canonical tensor, bytes from one device block to the next.
        row_stride: bytes from one row to the next.
        part_offset: where in a row the worker's part begins.
        num_slots: rows; as many blocks.
    """

    layout: RowLayout
    page_strides: tuple[int, ...]
    row_stride: int
    part_offset: int
    num_slots: int

    @property
    def num_device_blocks(self) -> int:
        """Device blocks of each tensor."""
        return self.num_slots * self.layout.block_size_factor

    @property
    def num_proof_slots(self) -> int:
        """Rows, the first ones, on which copiers prove themselves, with as many blocks."""
        return max(MIN_SLOTS, self.num_slots // PROOF_SHARE)


def plan_trial(
    layout: RowLayout,
    page_strides: Sequence[int],
    row_stride: int,
    part_offset: int,
    max_bytes: int = TRIAL_BYTES,
) -> TrialPlan:
    """Size the scratch memory. Pure.

    Rows of several workers, and blocks of tensors that take turns in one allocation, are as far apart as their own
    bytes need, at addresses that the same powers of two divide; merging and words then come out as they do there.

    Args:
        layout: where bytes are in a row.
        page_strides: for each canonical tensor, bytes from one device block to the next.
        row_stride: bytes from one row to the next.
        part_offset: where in a row the worker's part begins.
        max_bytes: of rows, and of pages.
    """
    scratch_offset, scratch_stride = part_offset % mmap.PAGESIZE, row_stride
    if row_stride > layout.part_bytes:
        scratch_stride = _shorten(row_stride, scratch_offset + layout.part_bytes)
    page_bytes = _count_page_bytes(layout, len(page_strides))
    strides = tuple(map(_shorten, page_strides, page_bytes))
    device_bytes = layout.block_size_factor * sum(strides)
    num_slots = min(MAX_SLOTS, max_bytes // scratch_stride, max_bytes // device_bytes)
    return TrialPlan(layout, strides, scratch_stride, scratch_offset, max(MIN_SLOTS, num_slots))


def plan_proof(plan: TrialPlan, group_idx: int) -> GroupMoves:
    """Return a transfer that enters the middle of its first slot, half of it in order, half scattered. Pure."""
    random = np.random.default_rng(group_idx)
    factor, num_slots = plan.layout.block_size_factor, plan.num_proof_slots
    half = num_slots // 2
    slots = np.concatenate((np.arange(half), half + random.permutation(num_slots - half)))
    blocks = np.arange(factor // 2, num_slots * factor)
    scattered = half * factor - factor // 2
    blocks[scattered:] = random.permutation(blocks[scattered:])
    return GroupMoves(group_idx, blocks, slots, factor // 2)


def plan_timing(plan: TrialPlan) -> GroupMoves:
    """Return a transfer of whole scattered blocks of the group with the largest ones. Pure."""
    random = np.random.default_rng(0)
    groups = plan.layout.groups
    largest = max(range(len(groups)), key=lambda group: groups[group].used_bytes)
    blocks, slots = random.permutation(plan.num_device_blocks), random.permutation(plan.num_slots)
    return GroupMoves(largest, blocks, slots, 0)


def _count_page_bytes(layout: RowLayout, num_tensors: int) -> list[int]:
    """Return for each tensor the bytes of a block that are copied. Pure."""
    page_bytes = [0] * num_tensors
    for group in layout.groups:
        for place in group.places:
            page_bytes[place.tensor_idx] = max(page_bytes[place.tensor_idx], place.page_size_bytes)
    return page_bytes


def _shorten(stride: int, used_bytes: int) -> int:
    """Return a distance that leaves a gap behind ``used_bytes`` where ``stride`` does, but a short one. Pure."""
    if stride <= used_bytes:
        return stride
    return used_bytes + 1 + (stride - used_bytes - 1) % mmap.PAGESIZE


class Trial:
    """Scratch pages and rows.

    Args:
        plan: how they are laid out.
        device: where the pages are.
        whole_rows: shape (num_slots, row_stride), int8, host memory as the rows' is.
        slots_per_chunk: of ``whole_rows``; None where they are one piece.
        timer: runs copies.
    """

    def __init__(
        self,
        plan: TrialPlan,
        device: torch.device,
        whole_rows: torch.Tensor,
        slots_per_chunk: int | None,
        timer: Timer,
    ) -> None:
        self._plan = plan
        self._rows = whole_rows[:, plan.part_offset : plan.part_offset + plan.layout.part_bytes]
        self._slots_per_chunk = slots_per_chunk
        self._timer = timer
        self._pages = [
            torch.zeros((plan.num_device_blocks, stride), dtype=torch.int8, device=device)
            for stride in plan.page_strides
        ]

    def build(self, build: Build) -> DeviceCopier:
        """Return a copier of all scratch memory."""
        return build(self._plan.layout, self._pages, self._rows, self._slots_per_chunk)

    def find_fault(self, build: Build, *, is_store: bool) -> str | None:
        """Say what a copier moves wrongly; None when every byte is right.

        Effects: pages and rows hold other bytes afterwards.
        """
        num_slots = self._plan.num_proof_slots
        rows = self._rows[:num_slots]
        pages = [page[: num_slots * self._plan.layout.block_size_factor] for page in self._pages]
        copier = build(self._plan.layout, pages, rows, self._slots_per_chunk)
        try:
            for group_idx in range(len(self._plan.layout.groups)):
                fault = self._find_fault_of(copier, pages, rows, group_idx, is_store=is_store)
                if fault is not None:
                    return f"group {group_idx}: {fault}"
        finally:
            copier.release()
        return None

    def measure(self, copier: DeviceCopier, *, is_store: bool) -> float:
        """Return the GB/s of one transfer of scattered blocks, the host's part included."""
        moves = [plan_timing(self._plan)]
        seconds = self._timer(partial(copier.store if is_store else copier.load, moves))
        return count_bytes(self._plan.layout, moves) / 1e9 / max(seconds, 1e-9)

    def _find_fault_of(
        self,
        copier: DeviceCopier,
        pages: Sequence[torch.Tensor],
        rows: torch.Tensor,
        group_idx: int,
        *,
        is_store: bool,
    ) -> str | None:
        random = np.random.default_rng(group_idx)
        wanted_pages = [random.integers(-128, 128, tuple(page.shape), dtype=np.int8) for page in pages]
        wanted_rows = random.integers(-128, 128, tuple(rows.shape), dtype=np.int8)
        rows.numpy()[...] = wanted_rows
        for page, wanted in zip(pages, wanted_pages, strict=True):
            page.copy_(torch.from_numpy(wanted))
        moves = [plan_proof(self._plan, group_idx)]
        reference = RowCopier(self._plan.layout, wanted_pages, wanted_rows, num_threads=1)
        (reference.store if is_store else reference.load)(moves)
        reference.release()
        self._timer(partial(copier.store if is_store else copier.load, moves))
        if not np.array_equal(rows.numpy(), wanted_rows):
            return "rows have other bytes than they should"
        if any(
            not np.array_equal(page.cpu().numpy(), wanted)
            for page, wanted in zip(pages, wanted_pages, strict=True)
        ):
            return "pages have other bytes than they should"
        return None
