"""One direction between device blocks and rows: what a transfer moves, and which transfers of a step share a copy.

A transfer is planned when it is submitted (``row_layout``), and a queue copies it (``transfer_queue``). Small transfers
of one step are joined into one copy; each is checked and reported by itself.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from kvtier.base import (
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferJobId,
    TransferResult,
    TransferSpec,
    TransferType,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.row_layout import (
    GroupMoves,
    RowLayout,
    count_bytes,
    is_whole,
    join_moves,
    part_moves,
    plan_moves,
)
from kvtier.errors import KVCacheLayoutError

logger = logging.getLogger(__name__)

GPU_TO_CPU = TransferType(GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium())
CPU_TO_GPU = TransferType(CPULoadStoreSpec.medium(), GPULoadStoreSpec.medium())

MAX_JOINED_BYTES = 2 << 20
"""Most bytes of small transfers that one call copies. Each of them ends with the call: larger calls delay the first,
smaller ones pay more often for planning, the queue and waking its thread. 0 joins none."""

Copy = Callable[[Sequence[GroupMoves]], None]


class TransferQueue(Protocol):
    """Runs the copies of one direction in the order of submission."""

    def submit(self, job_id: TransferJobId, num_bytes: int, copy: Callable[[], None]) -> bool:
        """Accept a copy; False when the queue accepts none any more."""

    def submit_joined(
        self,
        sizes: Mapping[TransferJobId, int],
        copy: Callable[[], None],
        copy_alone: Callable[[TransferJobId], None],
    ) -> bool:
        """Accept one copy that moves the bytes of several jobs; False when it accepts none of them."""

    def drain_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call; does not block."""

    def wait(self, job_ids: set[TransferJobId]) -> None:
        """Block until each of ``job_ids`` has ended."""

    def shutdown(self) -> None:
        """Wait for started copies and accept no more; idempotent."""


class RowHandler(OffloadingHandler):
    """One direction between device blocks and rows: plans a transfer at once and submits its copy to a queue.

    Args:
        transfer_type: GPU_TO_CPU or CPU_TO_GPU.
        layout: the bytes within a row.
        num_slots: slots of the primary tier.
        queue: runs copies in order.
    """

    def __init__(
        self,
        transfer_type: TransferType,
        layout: RowLayout,
        num_slots: int,
        queue: TransferQueue,
    ) -> None:
        self._transfer_type = transfer_type
        self._layout = layout
        self._num_slots = num_slots
        self._queue = queue
        self._copy: Copy | None = None
        self._unreported: set[TransferJobId] = set()

    def attach(self, copy: Copy) -> None:
        """Use ``copy`` for each transfer from now on."""
        self._copy = copy

    def detach(self) -> None:
        """Decline transfers until ``attach``; blocks until the started ones have ended."""
        self._copy = None
        self._queue.wait(self._unreported)

    def transfer_async(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        if self._copy is None:
            logger.error(
                "job %d, %s to %s, is declined: no KV cache is registered", job_id, *self._transfer_type
            )
            return False
        try:
            moves = plan_moves(self._layout, *self._ends(spec), self._num_slots)
        except KVCacheLayoutError as error:
            logger.error("job %d, %s to %s, is declined: %s", job_id, *self._transfer_type, error)  # noqa: TRY400  # the message is enough
            return False
        is_begun = self._queue.submit(job_id, count_bytes(self._layout, moves), partial(self._copy, moves))
        if is_begun:
            self._unreported.add(job_id)
        return is_begun

    def transfer_joined(self, jobs: Mapping[TransferJobId, TransferSpec]) -> set[TransferJobId]:
        started: set[TransferJobId] = set()
        for batch in cut_batches({job_id: self._count_whole(spec) for job_id, spec in jobs.items()}):
            if len(batch) > 1 and self._begin_joined(batch, [jobs[job_id] for job_id in batch]):
                started.update(batch)
            else:
                started.update(job_id for job_id in batch if self.transfer_async(job_id, jobs[job_id]))
        return started

    def get_finished(self) -> list[TransferResult]:
        finished = self._queue.drain_finished()
        self._unreported.difference_update(result.job_id for result in finished)
        return finished

    def wait(self, job_ids: set[TransferJobId]) -> None:
        self._queue.wait(job_ids)

    def shutdown(self) -> None:
        self._queue.shutdown()

    def _count_whole(self, spec: TransferSpec) -> int | None:
        """Return the bytes of a transfer that can be joined; None when it cannot. Pure."""
        try:
            device, rows = self._ends(spec)
        except KVCacheLayoutError:
            return None
        if self._copy is None or not is_whole(self._layout, device, rows):
            return None
        groups = zip(device.group_sizes, self._layout.groups, strict=True)
        return sum(size * group.page_size_bytes for size, group in groups)

    def _begin_joined(self, sizes: Mapping[TransferJobId, int], specs: Sequence[TransferSpec]) -> bool:
        """Submit one copy for several jobs; False when none was accepted, so that each is tried alone."""
        copy = self._copy
        try:
            joined = join_moves(self._layout, [self._ends(spec) for spec in specs], self._num_slots)
        except KVCacheLayoutError:
            return False
        moves = [move for move, _ in joined]
        is_store = self._transfer_type == GPU_TO_CPU
        targets = [
            target for move in moves for target in (move.slots if is_store else move.device_blocks).tolist()
        ]
        # Threads share one call in any order, so that no two jobs may write to the same place.
        if copy is None or len(set(targets)) < len(targets):
            return False
        numbers = {job_id: number for number, job_id in enumerate(sizes)}

        def copy_alone(job_id: TransferJobId) -> None:
            copy(part_moves(joined, numbers[job_id], self._layout.block_size_factor))

        is_begun = self._queue.submit_joined(sizes, partial(copy, moves), copy_alone)
        if is_begun:
            self._unreported.update(sizes)
        return is_begun

    def _ends(self, spec: TransferSpec) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        is_store = self._transfer_type == GPU_TO_CPU
        device, rows = (spec.source, spec.destination) if is_store else (spec.destination, spec.source)
        if not isinstance(device, GPULoadStoreSpec) or not isinstance(rows, CPULoadStoreSpec):
            raise KVCacheLayoutError(
                f"{spec.source!r} to {spec.destination!r} is not a transfer of this direction"
            )
        return device, rows


def cut_batches(sizes: Mapping[TransferJobId, int | None]) -> Iterator[dict[TransferJobId, int]]:
    """Yield the jobs in their order, neighbours together that may share a call, each with its bytes. Pure.

    Args:
        sizes: the bytes of each job; None: it must be copied alone.
    """
    batch: dict[TransferJobId, int] = {}
    room_bytes = MAX_JOINED_BYTES
    for job_id, size in sizes.items():
        if batch and (size is None or size > room_bytes):
            yield batch
            batch, room_bytes = {}, MAX_JOINED_BYTES
        batch[job_id] = size or 0
        room_bytes -= MAX_JOINED_BYTES + 1 if size is None else size
    if batch:
        yield batch
