"""The ways to copy between device and rows, and what speaks against each on this machine.

It builds copiers and measures nothing; ``copier_choice`` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvtier.config import CudaCopier
from kvtier.cpu.cuda.batch_copy import BatchLauncher, find_batch_bindings
from kvtier.cpu.cuda.kernel_copy import KernelLauncher, find_kernel
from kvtier.cpu.cuda.run_copy import RunLauncher
from kvtier.cpu.cuda.span_copier import Build, DeviceCopier, Memories, SpanCopier, SpanLauncher
from kvtier.cpu.cuda.staged_copy import StagedCopier
from kvtier.cpu.row_layout import RowLayout


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to copy.

    Attributes:
        name: what the setting calls it.
        build: makes a copier.
        objection: why it cannot be used here; None where it can.
    """

    name: CudaCopier
    build: Build
    objection: str | None = None


def list_candidates(device: torch.device, *, is_pinned: bool) -> list[Candidate]:
    """Return each way, those first that leave most of the device to the model.

    Args:
        device: a CUDA device.
        is_pinned: whether the rows are.
    """
    bindings, no_batch = find_batch_bindings()
    # A kernel that touches pageable memory ends CUDA for the whole process, so nobody may try.
    kernel, no_kernel = find_kernel(device) if is_pinned else (None, "the rows are not pinned")
    return [
        Candidate(
            CudaCopier.BATCH,
            partial(
                build_span_copier,
                lambda memories: BatchLauncher(memories, bindings, partial(_current_stream, device)),
            ),
            no_batch,
        ),
        Candidate(CudaCopier.RUNS, partial(build_span_copier, RunLauncher)),
        Candidate(CudaCopier.STAGED, build_staged_copier),
        Candidate(
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
