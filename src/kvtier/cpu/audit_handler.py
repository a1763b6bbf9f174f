"""Compares device blocks with the rows of host memory that hold the same blocks; writes nothing.

To the connector it is a handler like that of stores: it has the same spec of device blocks, begins in the step after
the one that computed them, and ends before anything overwrites them. Where a store would copy, it decodes both sides
and measures how far they are apart (``compare``), each part of a page by itself. A thread of its own does it, started
with the first comparison.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

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
from kvtier.cpu.compare import Bytes, KVFormat, PageFormat, compare_pages
from kvtier.cpu.row_layout import GroupMoves, PagePlace, RowLayout, plan_moves
from kvtier.cpu.transfer_queue import CopyThread

AUDIT = TransferType(GPULoadStoreSpec.medium(), AuditLoadStoreSpec.medium())

MAX_PORTION_BYTES = 2**23
"""Bytes compared at a time. Decoded to floats they are up to eight times as many; less makes calls of a few pages."""

ReadPages = Callable[[int, BlockIds], Callable[[], npt.NDArray[np.int8]]]
"""Begins to read the pages of some device blocks of a tensor; what it returns gives the bytes, shape (num_blocks,
page_bytes). The bytes are those of when it began, or the device blocks are not written to before it has ended."""


class PlacePart(NamedTuple):
    """Bytes of one ref's page, and what they mean."""

    start: int
    end: int
    kv_format: KVFormat


def divide_places(places: Sequence[PagePlace], page_format: PageFormat) -> tuple[tuple[PlacePart, ...], ...]:
    """Return the parts of each ref of a group, whose parts are listed over all of them. Pure."""
    divided: list[tuple[PlacePart, ...]] = []
    left = list(page_format)
    for place in places:
        of_place: list[PlacePart] = []
        start = 0
        while left and start < place.page_size_bytes:
            part = left.pop(0)
            end = min(place.page_size_bytes, start + part.size_bytes)
            of_place.append(PlacePart(start, end, part.kv_format))
            if part.size_bytes > end - start:
                left.insert(0, part._replace(size_bytes=part.size_bytes - (end - start)))
            start = end
        divided.append(tuple(of_place))
    return tuple(divided)


class AuditHandler(OffloadingHandler):
    """The comparisons of one worker.

    Args:
        layout: the bytes within a row.
        rows: this worker's part of the rows, shape (num_slots, layout.part_bytes), int8.
        page_formats: what the bytes of each group mean.
    """

    def __init__(
        self, layout: RowLayout, rows: npt.NDArray[np.int8], page_formats: Sequence[PageFormat]
    ) -> None:
        self._layout = layout
        self._rows = rows
        self._parts = [
            divide_places(group.places, page_format)
            for group, page_format in zip(layout.groups, page_formats, strict=True)
        ]
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
        if not all(all(self._parts[part.group_idx]) for part in moves):
            return False  # a group whose numbers are not known
        deviations: list[float] = []
        comparisons = [partial(self._compare, part, self._begin_reads(part), deviations) for part in moves]

        def compare_groups() -> None:
            for compare in comparisons:
                compare()

        if self._thread is None:
            self._thread = CopyThread(AUDIT)
        self._deviations[job_id] = deviations
        return self._thread.submit(job_id, 0, compare_groups)

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
        for place, parts, read in zip(group.places, self._parts[moves.group_idx], reads, strict=True):
            size, offset = place.page_size_bytes, place.offset_bytes
            found = read()[:, :size].reshape(-1, factor, size)
            step = max(1, MAX_PORTION_BYTES // (factor * size))
            for first in range(0, len(moves.slots), step):
                slots = moves.slots[first : first + step]
                held = self._rows[slots, offset : offset + factor * size].reshape(-1, size)
                of_pages = _compare_parts(found[first : first + step].reshape(-1, size), held, parts)
                of_blocks = of_pages.reshape(-1, factor).max(axis=1)
                worst[first : first + step] = np.maximum(worst[first : first + step], of_blocks)
        deviations += worst.tolist()


def _compare_parts(
    found: npt.NDArray[np.int8], held: npt.NDArray[np.int8], parts: Sequence[PlacePart]
) -> npt.NDArray[np.float64]:
    """Return the deviation of each page, the largest of its parts."""
    worst = np.zeros(len(found))
    for start, end, kv_format in parts:
        of_part = compare_pages(_as_bytes(found[:, start:end]), _as_bytes(held[:, start:end]), kv_format)
        worst = np.maximum(worst, of_part)
    return worst


def _as_bytes(pages: npt.NDArray[np.int8]) -> Bytes:
    return np.ascontiguousarray(pages).view(np.uint8)
