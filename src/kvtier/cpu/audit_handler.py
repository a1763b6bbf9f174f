"""Compares device blocks with the rows of host memory that hold the same blocks; writes nothing.

To the connector it is a handler like that of stores: it has the same spec of device blocks, begins in the step after
the one that computed them, and ends before anything overwrites them. Where a store would copy, it decodes both sides
and measures how far they are apart (``compare``). A thread of its own does it, started with the first comparison.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.base import (
    BlockIds,
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.cpu.common import AuditLoadStoreSpec, CPULoadStoreSpec
from kvtier.cpu.compare import Bytes, KVFormat, compare_pages
from kvtier.cpu.row_layout import GroupMoves, RowLayout, plan_moves
from kvtier.cpu.transfer_queue import CopyThread

AUDIT = TransferType(GPULoadStoreSpec.medium(), AuditLoadStoreSpec.medium())

MAX_PORTION_BYTES = 2**23
"""Bytes compared at a time. Decoded to floats they are up to eight times as many; less makes calls of a few pages."""

ReadPages = Callable[[int, BlockIds], Callable[[], npt.NDArray[np.int8]]]
"""Begins to read the pages of some device blocks of a tensor; what it returns gives the bytes, shape (num_blocks,
page_bytes). The bytes are those of when it began, or the device blocks are not written to before it has ended."""


class AuditHandler(OffloadingHandler):
    """The comparisons of one worker.

    Args:
        layout: the bytes within a row.
        rows: this worker's part of the rows, shape (num_slots, layout.part_bytes), int8.
        kv_format: what the bytes mean.
    """

    def __init__(self, layout: RowLayout, rows: npt.NDArray[np.int8], kv_format: KVFormat) -> None:
        self._layout = layout
        self._rows = rows
        self._kv_format = kv_format
        self._read: ReadPages | None = None
        self._thread: CopyThread | None = None
        self._deviations: dict[TransferJobId, list[float]] = {}

    def attach(self, read: ReadPages) -> None:
        """Read device blocks with ``read`` from now on."""
        self._read = read

    def detach(self) -> None:
        """Decline comparisons until ``attach``; blocks until those under way have ended."""
        self._read = None
        self.wait(set(self._deviations))

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        source, destination = spec
        if self._read is None or job_id in self._deviations:
            return False
        if not isinstance(source, GPULoadStoreSpec) or not isinstance(destination, BlockIDsLoadStoreSpec):
            return False
        slots = CPULoadStoreSpec(destination.block_ids)
        moves = plan_moves(self._layout, source, slots, len(self._rows))
        deviations: list[float] = []
        parts = [partial(self._compare, part, self._begin_reads(part), deviations) for part in moves]
        if self._thread is None:
            self._thread = CopyThread(AUDIT)
        self._deviations[job_id] = deviations
        return self._thread.submit(job_id, 0, *parts)

    def get_finished(self) -> list[TransferResult]:
        if self._thread is None:
            return []
        return [self._add_deviations(result) for result in self._thread.drain_finished()]

    def wait(self, job_ids: set[TransferJobId]) -> None:
        if self._thread is not None:
            self._thread.wait(job_ids)

    def shutdown(self) -> None:
        self._read = None
        if self._thread is not None:
            self._thread.shutdown()
        self._rows = self._rows[:0].copy()  # a view would keep the rows mapped

    def _add_deviations(self, result: TransferResult) -> TransferResult:
        deviations = self._deviations.pop(result.job_id, [])
        # Nothing was moved, so there is neither a size nor a time.
        empty = replace(result, transfer_size=None, transfer_time=None)
        return replace(empty, deviations=tuple(deviations)) if result.success else empty

    def _begin_reads(self, moves: GroupMoves) -> Sequence[Callable[[], npt.NDArray[np.int8]]]:
        assert self._read is not None, "checked by the caller"
        places = self._layout.groups[moves.group_idx].places
        return [self._read(place.tensor_idx, moves.device_blocks) for place in places]

    def _compare(
        self,
        moves: GroupMoves,
        reads: Sequence[Callable[[], npt.NDArray[np.int8]]],
        deviations: list[float],
    ) -> None:
        """Append the deviation of each block, the largest of its pages."""
        factor, group = self._layout.block_size_factor, self._layout.groups[moves.group_idx]
        worst = np.zeros(len(moves.slots))
        for place, read in zip(group.places, reads, strict=True):
            size, offset = place.page_size_bytes, place.offset_bytes
            found = read()[:, :size].reshape(-1, factor, size)
            step = max(1, MAX_PORTION_BYTES // (factor * size))
            for first in range(0, len(moves.slots), step):
                slots = moves.slots[first : first + step]
                held = self._rows[slots, offset : offset + factor * size].reshape(-1, size)
                of_pages = compare_pages(
                    _as_bytes(found[first : first + step].reshape(-1, size)), _as_bytes(held), self._kv_format
                )
                of_blocks = of_pages.reshape(-1, factor).max(axis=1)
                worst[first : first + step] = np.maximum(worst[first : first + step], of_blocks)
        deviations += worst.tolist()


def _as_bytes(pages: npt.NDArray[np.int8]) -> Bytes:
    return np.ascontiguousarray(pages).view(np.uint8)
