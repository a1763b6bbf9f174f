"""Which transfers of a step share a copy; that they move the right bytes is in the suites of handlers."""

from collections.abc import Callable, Mapping

import pytest
import torch

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferJobId,
    TransferResult,
    TransferSpec,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.row_handler import CPU_TO_GPU, GPU_TO_CPU, MAX_JOINED_BYTES, RowHandler, cut_batches
from kvtier.cpu.row_layout import plan_layout


def test_small_transfers_of_a_step_are_one_copy_and_large_ones_are_their_own() -> None:
    assert list(cut_batches(_sizes(1, 2, MAX_JOINED_BYTES - 3))) == [_sizes(1, 2, MAX_JOINED_BYTES - 3)]
    assert list(cut_batches(_sizes(2, MAX_JOINED_BYTES - 1, 4))) == [
        {J[0]: 2},
        {J[1]: MAX_JOINED_BYTES - 1},
        {J[2]: 4},
    ]
    assert list(cut_batches(_sizes(1, MAX_JOINED_BYTES + 1, 2, 3))) == [
        {J[0]: 1},
        {J[1]: MAX_JOINED_BYTES + 1},
        {J[2]: 2, J[3]: 3},
    ]
    assert list(cut_batches(_sizes(1, None, 2, 0))) == [{J[0]: 1}, {J[1]: 0}, {J[2]: 2, J[3]: 0}]
    assert list(cut_batches({})) == []


class HeldQueue:
    """Accepts copies and runs none until it is waited for."""

    def __init__(self) -> None:
        self.copies: list[list[TransferJobId]] = []
        self.waited_for: set[TransferJobId] = set()

    def submit(self, job_id: TransferJobId, num_bytes: int, *parts: Callable[[], None]) -> bool:
        self.copies.append([job_id])
        return True

    def submit_joined(
        self,
        sizes: Mapping[TransferJobId, int],
        copy: Callable[[], None],
        copy_alone: Callable[[TransferJobId], None],
    ) -> bool:
        self.copies.append(list(sizes))
        return True

    def drain_finished(self) -> list[TransferResult]:
        return []

    def wait(self, job_ids: set[TransferJobId]) -> None:
        self.waited_for |= job_ids

    def wait_for_part(self, job_ids: set[TransferJobId], part: int) -> bool:
        return True

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(
    ("slots", "blocks", "copies_of_stores", "copies_of_loads"),
    [
        ([0, 1, 2], [0, 1, 2], [[0, 1, 2]], [[0, 1, 2]]),
        ([0, 1, 0], [0, 1, 2], [[0], [1], [2]], [[0, 1, 2]]),
        ([0, 1, 2], [0, 1, 0], [[0, 1, 2]], [[0], [1], [2]]),
    ],
)
def test_transfers_that_write_to_the_same_place_are_not_one_copy(
    slots: list[int], blocks: list[int], copies_of_stores: list[list[int]], copies_of_loads: list[list[int]]
) -> None:
    tensor = CanonicalKVCacheTensor(torch.zeros((3, 8), dtype=torch.int8), 8)
    layout = plan_layout(CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 8)]]), 1)
    ends = [
        (GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([slot]))
        for block, slot in zip(blocks, slots, strict=True)
    ]
    for media, copies in ((GPU_TO_CPU, copies_of_stores), (CPU_TO_GPU, copies_of_loads)):
        queue = HeldQueue()
        handler = RowHandler(media, layout, 3, queue)
        handler.attach(lambda moves: None)
        specs = [TransferSpec(*pair) if media == GPU_TO_CPU else TransferSpec(*pair[::-1]) for pair in ends]

        assert handler.transfer_joined(dict(zip(J, specs, strict=False))) == set(J[:3])
        handler.detach()

        assert queue.copies == copies
        assert queue.waited_for == set(J[:3])


J = [TransferJobId(number) for number in range(4)]


def _sizes(*sizes: int | None) -> dict[TransferJobId, int | None]:
    return dict(zip(J, sizes, strict=False))
