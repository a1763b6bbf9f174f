"""What the worker needs on a CUDA device: streams as device queues, pinned rows, and the choice of copiers.

The launches have not been confirmed on a device; their order is tested with a runtime that records it.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvtier.config import CudaCopier
from kvtier.cpu.cuda.copy_autotune import (
    PROOF_SHARE,
    Choice,
    Timer,
    Trial,
    TrialPlan,
    choose,
    list_candidates,
    plan_trial,
)
from kvtier.cpu.cuda.pinned_region import PinnedRows, PinRuntime, pin_rows
from kvtier.cpu.row_layout import RowLayout
from kvtier.cpu.shared_offload_region import SharedOffloadRegion
from kvtier.cpu.transfer_queue import CopyHandle

cuda: Any = torch.cuda  # Any: torch does not annotate its CUDA interface

TRIAL_CHUNKS = 4 * PROOF_SHARE
"""Registrations of the scratch rows. A proof must have spans that are cut at the end of a registration, so the half of
it that is in order spans two."""


class StreamQueue:
    """A stream beside the compute stream, for the copies of one direction.

    Args:
        device: the CUDA device.
        runtime: torch's interface to CUDA.
    """

    def __init__(self, device: torch.device, runtime: Any = cuda) -> None:  # noqa: ANN401  # Any: as above
        self._device = device
        self._cuda = runtime
        self._stream = runtime.Stream(device)

    def launch(self, copy: Callable[[], None]) -> CopyHandle:
        """Launch ``copy`` after the work that the compute stream holds now.

        A store needs what compute still writes; a load must not overwrite what compute still reads. When ``copy``
        raises, this waits until nothing of it runs any more before it passes on the error.
        """
        start = self._cuda.Event(enable_timing=True)
        end = self._cuda.Event(enable_timing=True)
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        try:
            with self._cuda.stream(self._stream):
                start.record()
                copy()
                end.record()
        except BaseException:
            self._stream.synchronize()
            raise
        return StreamCopyHandle(start, end, lambda: self._cuda.current_stream(self._device))


class StreamCopyHandle:
    """A launched copy on a stream."""

    def __init__(self, start: Any, end: Any, compute_stream: Callable[[], Any]) -> None:  # noqa: ANN401  # as above
        self._start = start
        self._end = end
        self._compute_stream = compute_stream

    def is_done(self) -> bool:
        """Return True when the device has passed the copy."""
        return bool(self._end.query())

    def block(self) -> None:
        """Block until the device has passed the copy."""
        self._end.synchronize()

    def publish(self) -> None:
        """Order compute launched from now on after the copy."""
        self._compute_stream().wait_event(self._end)

    def elapsed_s(self) -> float:
        """Return the seconds between the copy's first launch and its end, as the device measured them."""
        return float(self._start.elapsed_time(self._end)) / 1000


def pin_region(region: SharedOffloadRegion) -> PinnedRows:
    """Register all workers' rows of a region with CUDA."""
    address = np.frombuffer(region.mapping(), dtype=np.int8).ctypes.data
    return pin_rows(address, region.num_blocks, region.row_stride)


def map_rows(num_slots: int, row_stride: int) -> torch.Tensor:
    """Return private rows that can be pinned, with their memory reserved: shape (num_slots, row_stride), int8, CPU.

    Torch's own pinned memory is rounded up to a power of two and never returned to the system.
    """
    mapping = mmap.mmap(-1, num_slots * row_stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    rows = np.frombuffer(mapping, dtype=np.int8).reshape(num_slots, row_stride)
    return torch.from_numpy(rows).zero_()


def choose_copiers(
    layout: RowLayout,
    pages: Sequence[torch.Tensor],
    rows: torch.Tensor,
    pinned: PinnedRows,
    wanted: CudaCopier,
    *,
    timer: Timer | None = None,
) -> Choice:
    """Choose how to move bytes between ``pages``, or others with the same layout, and ``rows``.

    Args:
        layout: the bytes within a row.
        pages: the canonical tensors; only their shapes are read.
        rows: the worker's part of all rows; its bytes are not read or written.
        pinned: the result of registering them.
        wanted: the setting.
        timer: runs trial copies; None: on a stream of the device.

    Raises:
        ConfigError: the way that the setting names cannot be used.
        DeviceCopyError: no way moves the right bytes.
    """
    device = pages[0].device
    plan = plan_trial(
        layout, [page.stride(0) for page in pages], pinned.row_stride, rows.data_ptr() - pinned.address
    )
    candidates = list_candidates(device, is_pinned=pinned.is_pinned)
    runtime = pinned.runtime if pinned.is_pinned else None
    with _open_trial(plan, device, runtime, timer or _make_timer(device)) as trial:
        choice = choose(candidates, wanted, trial)
    torch.cuda.empty_cache()
    return choice


@contextmanager
def _open_trial(
    plan: TrialPlan, device: torch.device, runtime: PinRuntime | None, timer: Timer
) -> Iterator[Trial | None]:
    """Allocate scratch memory, pinned if there is a runtime for it; None without memory for it."""
    whole_rows = map_rows(plan.num_slots, plan.row_stride)
    pinned: PinnedRows | None = None
    if runtime is not None:
        chunk_bytes = plan.num_slots * plan.row_stride // TRIAL_CHUNKS
        pinned = pin_rows(
            whole_rows.data_ptr(), plan.num_slots, plan.row_stride, chunk_bytes=chunk_bytes, runtime=runtime
        )
    try:
        if pinned is not None and not pinned.is_pinned:
            yield None
            return
        slots_per_chunk = None if pinned is None else pinned.slots_per_chunk
        yield _make_trial(plan, device, whole_rows, slots_per_chunk, timer)
    finally:
        if pinned is not None:
            pinned.unpin()


def _make_trial(
    plan: TrialPlan,
    device: torch.device,
    whole_rows: torch.Tensor,
    slots_per_chunk: int | None,
    timer: Timer,
) -> Trial | None:
    try:
        return Trial(plan, device, whole_rows, slots_per_chunk, timer)
    except torch.OutOfMemoryError:
        return None


def _make_timer(device: torch.device) -> Timer:
    queue = StreamQueue(device)

    def run(copy: Callable[[], None]) -> float:
        handle = queue.launch(copy)
        handle.block()
        handle.publish()
        return handle.elapsed_s()

    return run
