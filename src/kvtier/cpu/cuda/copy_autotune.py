"""Chooses the way to copy between device and rows: each candidate is proven and timed on scratch memory at start.

``list_candidates`` returns the ways, with a reason for each that this machine cannot use. ``Trial`` checks that a
copier moves the right bytes, and measures it. ``choose`` takes the best for each direction.
"""

import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from kvtier.config import CudaCopier
from kvtier.cpu.cuda.copy_methods import (
    BatchLauncher,
    KernelLauncher,
    RunLauncher,
    StagedCopier,
    find_batch_bindings,
    find_kernel,
)
from kvtier.cpu.cuda.span_copier import Build, DeviceCopier, Memories, SpanCopier, SpanLauncher
from kvtier.cpu.row_copy import RowCopier
from kvtier.cpu.row_layout import GroupMoves, RowLayout, count_bytes
from kvtier.errors import ConfigError, DeviceCopyError

TRIAL_BYTES = 32 << 20
"""Most bytes of scratch rows, and of scratch pages, unless two blocks need more. It takes device memory beside the
engine's KV cache at start; with much less the trial would measure the launch and not the link."""

MIN_SLOTS = 2
"""Fewer slots could not be scattered."""

MAX_SLOTS = 1024
"""Most scratch rows: with pages of a few bytes, more would measure Python, for seconds."""

PROOF_SHARE = 8
"""A proof uses this fraction of the scratch memory. Its bytes are made and compared on the host, for each candidate,
direction and group: with all of the memory a start would take seconds."""

NUM_ROUNDS = 3
"""Timed transfers of each candidate and direction, after one that is not timed."""

Timer = Callable[[Callable[[], None]], float]
"""Runs a copy on the device, waits for it and returns the seconds it took."""

logger = logging.getLogger(__name__)

UNPROVEN = CudaCopier.RUNS
"""The choice without memory for a trial: torch's own copies, and no buffer on the device."""

MIN_SHARE = 0.95
"""A candidate earlier in the list is taken when it reaches this share of the fastest: measurements vary by a few per
cent, and earlier candidates leave more of the device to the model."""


@dataclass(frozen=True, slots=True)
class CopyMethod:
    """One way to copy.

    Attributes:
        name: its name in the setting.
        build: makes a copier.
        unusable_reason: why it cannot be used on this machine; None where it can.
    """

    name: CudaCopier
    build: Build
    unusable_reason: str | None = None


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Layout of the scratch memory.

    Attributes:
        layout: the bytes within a row.
        page_strides: for each canonical tensor, bytes from one device block to the next.
        row_stride: bytes from one row to the next.
        part_offset: start of the worker's part within a row.
        num_slots: rows, and blocks.
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
        """The first rows, and as many blocks, that a proof uses."""
        return max(MIN_SLOTS, self.num_slots // PROOF_SHARE)


class Trial:
    """Scratch pages and rows.

    Args:
        plan: their layout.
        device: the device of the pages.
        whole_rows: shape (num_slots, row_stride), int8, host memory like that of the rows.
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
        """Return a copier of the whole scratch memory."""
        return build(self._plan.layout, self._pages, self._rows, self._slots_per_chunk)

    def find_fault(self, build: Build, *, is_store: bool) -> str | None:
        """Return what a copier moves wrongly; None when every byte is right.

        Effects: overwrites pages and rows.
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
        """Return the GB/s of one transfer of scattered blocks, including the host's part."""
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
            return "rows have wrong bytes"
        if any(
            not np.array_equal(page.cpu().numpy(), wanted)
            for page, wanted in zip(pages, wanted_pages, strict=True)
        ):
            return "pages have wrong bytes"
        return None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen way to copy, by direction."""

    store: CopyMethod
    load: CopyMethod


def list_candidates(device: torch.device, *, is_pinned: bool) -> list[CopyMethod]:
    """Return each way, those that leave most of the device to the model first.

    Args:
        device: a CUDA device.
        is_pinned: whether the rows are pinned.
    """
    bindings, no_batch = find_batch_bindings()
    # A kernel that touches pageable memory ends CUDA for the whole process, so it cannot be tried.
    kernel, no_kernel = find_kernel(device) if is_pinned else (None, "the rows are not pinned")
    return [
        CopyMethod(
            CudaCopier.BATCH,
            partial(
                build_span_copier,
                lambda memories: BatchLauncher(memories, bindings, partial(_current_stream, device)),
            ),
            no_batch,
        ),
        CopyMethod(CudaCopier.RUNS, partial(build_span_copier, RunLauncher)),
        CopyMethod(CudaCopier.STAGED, build_staged_copier),
        CopyMethod(
            CudaCopier.KERNEL,
            partial(build_span_copier, lambda memories: KernelLauncher(memories, kernel)),
            no_kernel,
        ),
    ]


def build_span_copier(
    make_launcher: Callable[[Memories], SpanLauncher],
    layout: RowLayout,
    pages: Sequence[torch.Tensor],
    rows: torch.Tensor,
    slots_per_chunk: int | None,
) -> DeviceCopier:
    """Build a copier that gives its spans to a launcher."""
    return SpanCopier(layout, pages, rows, slots_per_chunk, make_launcher)


def build_staged_copier(
    layout: RowLayout, pages: Sequence[torch.Tensor], rows: torch.Tensor, _slots_per_chunk: int | None
) -> DeviceCopier:
    """Build a copier with a staging buffer; its copies end within a row, so chunks do not matter to it."""
    return StagedCopier(layout, pages, rows)


def plan_trial(
    layout: RowLayout,
    page_strides: Sequence[int],
    row_stride: int,
    part_offset: int,
    max_bytes: int = TRIAL_BYTES,
) -> TrialPlan:
    """Size the scratch memory. Pure.

    Rows of several workers, and blocks of tensors that alternate in one allocation, keep only small gaps between them,
    at addresses with the same alignment as in the real memory, so that runs merge and words align as there.

    Args:
        layout: the bytes within a row.
        page_strides: for each canonical tensor, bytes from one device block to the next.
        row_stride: bytes from one row to the next.
        part_offset: start of the worker's part within a row.
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
    """Return a transfer that begins in the middle of its first slot, half of it in order, half scattered. Pure."""
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


def choose(candidates: Sequence[CopyMethod], wanted: CudaCopier, trial: Trial | None) -> Choice:
    """Choose among ``candidates``.

    Args:
        candidates: all ways, in order of preference.
        wanted: the setting.
        trial: scratch memory; None without memory for it.

    Raises:
        ConfigError: the way that the setting names cannot be used, or moves wrong bytes.
        DeviceCopyError: no way moves the right bytes.
    """
    usable = take_usable(candidates, wanted)
    if trial is None:
        unproven = UNPROVEN if wanted is CudaCopier.AUTO else wanted
        (taken,) = (candidate for candidate in usable if candidate.name is unproven)
        logger.warning("there is no memory for a trial: copies are made with %r, unproven", taken.name.value)
        return Choice(taken, taken)
    store = _choose_direction(usable, wanted, trial, is_store=True)
    load = _choose_direction(usable, wanted, trial, is_store=False)
    return Choice(store, load)


def take_usable(candidates: Sequence[CopyMethod], wanted: CudaCopier) -> list[CopyMethod]:
    """Return those that the setting allows and this machine supports. Pure except for logging.

    Raises:
        ConfigError: the way that the setting names is not among them.
    """
    for candidate in candidates:
        if candidate.name is wanted and candidate.unusable_reason is not None:
            raise ConfigError(
                "cuda_copier", wanted.value, f'{candidate.unusable_reason}; or set it to "auto"'
            )
        if candidate.unusable_reason is not None:
            logger.info("copies with %r are skipped: %s", candidate.name.value, candidate.unusable_reason)
    return [
        candidate
        for candidate in candidates
        if candidate.unusable_reason is None and wanted in (candidate.name, CudaCopier.AUTO)
    ]


def pick(rates: Mapping[CudaCopier, float]) -> CudaCopier:
    """Return the first, in the order of the mapping, that is about as fast as the fastest. Pure."""
    enough = MIN_SHARE * max(rates.values())
    return next(name for name, rate in rates.items() if rate >= enough)


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _count_page_bytes(layout: RowLayout, num_tensors: int) -> list[int]:
    """Return for each tensor the copied bytes of a block. Pure."""
    page_bytes = [0] * num_tensors
    for group in layout.groups:
        for place in group.places:
            page_bytes[place.tensor_idx] = max(page_bytes[place.tensor_idx], place.page_size_bytes)
    return page_bytes


def _shorten(stride: int, used_bytes: int) -> int:
    """Return a stride with a short gap behind ``used_bytes`` if ``stride`` has a gap. Pure."""
    if stride <= used_bytes:
        return stride
    return used_bytes + 1 + (stride - used_bytes - 1) % mmap.PAGESIZE


def _choose_direction(
    usable: Sequence[CopyMethod], wanted: CudaCopier, trial: Trial, *, is_store: bool
) -> CopyMethod:
    direction = "stores" if is_store else "loads"
    proven: dict[CudaCopier, DeviceCopier] = {}
    try:
        for candidate in usable:
            fault = _prove(candidate, trial, proven, is_store=is_store)
            if fault is None:
                continue
            logger.warning("%s with %r are skipped: %s", direction, candidate.name.value, fault)
            if wanted is not CudaCopier.AUTO:
                raise ConfigError("cuda_copier", wanted.value, f'{direction} fail: {fault}; set it to "auto"')
        if not proven:
            raise DeviceCopyError(
                "the trial", f"no way of {direction} moves the right bytes", len(usable), None
            )
        rates = _measure(proven, trial, is_store=is_store)
        if not rates:
            raise DeviceCopyError("the trial", f"every way of {direction} failed", len(proven), None)
    finally:
        for copier in proven.values():
            copier.release()
    (taken,) = (candidate for candidate in usable if candidate.name is pick(rates))
    logger.info(
        "%s are made with %r; measured %s",
        direction,
        taken.name.value,
        ", ".join(f"{name.value} {rate:.1f} GB/s" for name, rate in rates.items()),
    )
    return taken


def _prove(
    candidate: CopyMethod, trial: Trial, proven: dict[CudaCopier, DeviceCopier], *, is_store: bool
) -> str | None:
    """Put a copier into ``proven``, or return what is wrong with it."""
    try:
        fault = trial.find_fault(candidate.build, is_store=is_store)
        if fault is None:
            proven[candidate.name] = trial.build(candidate.build)
    except Exception as error:  # noqa: BLE001  # thread top: runtimes and compilers raise any type; others are tried
        return f"{type(error).__name__}: {error}"
    return fault


def _measure(
    proven: Mapping[CudaCopier, DeviceCopier], trial: Trial, *, is_store: bool
) -> dict[CudaCopier, float]:
    """Return the median rate of each that does not fail.

    They alternate, so that a passing disturbance affects each alike. A transfer is larger than a proof's, so one whose
    proof found enough device memory may find too little here.
    """
    rates: dict[CudaCopier, list[float]] = {name: [] for name in proven}
    for _ in range(1 + NUM_ROUNDS):
        for name in list(rates):
            try:
                rates[name].append(trial.measure(proven[name], is_store=is_store))
            except Exception as error:  # noqa: BLE001  # thread top: as in a proof
                logger.warning("%r is skipped: %s: %s", name.value, type(error).__name__, error)
                del rates[name]
    return {name: median(measured[1:]) for name, measured in rates.items()}
