"""The ways to copy between device and rows, and what speaks against each on this machine.

It builds copiers and measures nothing; ``copier_choice`` does.
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


@dataclass(frozen=True, slots=True)
class CopyMethod:
    """One way to copy.

    Attributes:
        name: what the setting calls it.
        build: makes a copier.
        objection: why it cannot be used here; None where it can.
    """

    name: CudaCopier
    build: Build
    objection: str | None = None


def list_candidates(device: torch.device, *, is_pinned: bool) -> list[CopyMethod]:
    """Return each way, those first that leave most of the device to the model.

    Args:
        device: a CUDA device.
        is_pinned: whether the rows are.
    """
    bindings, no_batch = find_batch_bindings()
    # A kernel that touches pageable memory ends CUDA for the whole process, so nobody may try.
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
    """Build a copier whose spans a launcher carries out."""
    return SpanCopier(layout, pages, rows, slots_per_chunk, make_launcher)


def build_staged_copier(
    layout: RowLayout, pages: Sequence[torch.Tensor], rows: torch.Tensor, _slots_per_chunk: int | None
) -> DeviceCopier:
    """Build a copier with a buffer; its copies end within a row, so chunks do not matter to it."""
    return StagedCopier(layout, pages, rows)


def _current_stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


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


logger = logging.getLogger(__name__)

UNPROVEN = CudaCopier.RUNS
"""What is taken where there is no memory for a trial: torch's own copies, and no buffer on the device."""

MIN_SHARE = 0.95
"""A candidate further ahead in the list is taken when it reaches this share of the fastest: measurements scatter by a
few per cent, and those ahead leave more of the device to the model."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How bytes are moved, by direction."""

    store: CopyMethod
    load: CopyMethod


def choose(candidates: Sequence[CopyMethod], wanted: CudaCopier, trial: Trial | None) -> Choice:
    """Choose among ``candidates``.

    Args:
        candidates: every way, in order of preference.
        wanted: the setting.
        trial: scratch memory; None where there was no room for any.

    Raises:
        ConfigError: the way that was asked for cannot be used, or moves wrong bytes.
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
    """Return those that the setting allows and this machine has. Pure but for the log.

    Raises:
        ConfigError: the one that was asked for is not among them.
    """
    for candidate in candidates:
        if candidate.name is wanted and candidate.objection is not None:
            raise ConfigError("cuda_copier", wanted.value, f'{candidate.objection}; or set it to "auto"')
        if candidate.objection is not None:
            logger.info("copies with %r are passed over: %s", candidate.name.value, candidate.objection)
    return [
        candidate
        for candidate in candidates
        if candidate.objection is None and wanted in (candidate.name, CudaCopier.AUTO)
    ]


def pick(rates: Mapping[CudaCopier, float]) -> CudaCopier:
    """Return the first, in the order of the mapping, that is about as fast as the fastest. Pure."""
    enough = MIN_SHARE * max(rates.values())
    return next(name for name, rate in rates.items() if rate >= enough)


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
            logger.warning("%s with %r are passed over: %s", direction, candidate.name.value, fault)
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
    """Put a copier into ``proven``, or say what is wrong with it."""
    try:
        fault = trial.find_fault(candidate.build, is_store=is_store)
        if fault is None:
            proven[candidate.name] = trial.build(candidate.build)
    except Exception as error:  # noqa: BLE001  # thread top: runtimes and compilers raise what they like; another way is taken
        return f"{type(error).__name__}: {error}"
    return fault


def _measure(
    proven: Mapping[CudaCopier, DeviceCopier], trial: Trial, *, is_store: bool
) -> dict[CudaCopier, float]:
    """Return the median rate of each that does not fail.

    They take turns, so that a passing disturbance hits each alike. A transfer is larger than a proof's: one that
    found room there may find none here.
    """
    rates: dict[CudaCopier, list[float]] = {name: [] for name in proven}
    for _ in range(1 + NUM_ROUNDS):
        for name in list(rates):
            try:
                rates[name].append(trial.measure(proven[name], is_store=is_store))
            except Exception as error:  # noqa: BLE001  # thread top: as in a proof
                logger.warning("%r is passed over: %s: %s", name.value, type(error).__name__, error)
                del rates[name]
    return {name: median(measured[1:]) for name, measured in rates.items()}
