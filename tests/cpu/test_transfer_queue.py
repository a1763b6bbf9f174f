"""A queue transfer_queue reports launched copies in order, on a queue that the test drives by hand."""

from collections.abc import Callable

import pytest

from kvtier.base import TransferJobId, TransferType
from kvtier.cpu.transfer_queue import DeviceTransferQueue

CPU_TO_GPU = TransferType("CPU", "GPU")


class FakeHandle:
    """A copy that ends when the test says so."""

    def __init__(self) -> None:
        self.has_ended = False
        self.is_published = False
        self.is_broken = False

    def is_done(self) -> bool:
        if self.is_broken:
            raise RuntimeError("CUDA error: device lost")
        return self.has_ended

    def block(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: device lost")
        self.has_ended = True

    def publish(self) -> None:
        assert self.has_ended
        self.is_published = True

    def elapsed_s(self) -> float:
        return 0.5


class FakeQueue:
    """Launches by calling, and keeps the handles."""

    def __init__(self) -> None:
        self.handles: list[FakeHandle] = []

    def launch(self, copy: Callable[[], None]) -> FakeHandle:
        copy()
        self.handles.append(FakeHandle())
        return self.handles[-1]


@pytest.fixture
def queue() -> FakeQueue:
    """Return the queue behind the transfer_queue."""
    return FakeQueue()


@pytest.fixture
def transfer_queue(queue: FakeQueue) -> DeviceTransferQueue:
    """Return a transfer_queue with three launched copies, ids 0, 1 and 2."""
    transfer_queue = DeviceTransferQueue(CPU_TO_GPU, queue)
    for number in range(3):
        assert transfer_queue.submit(TransferJobId(number), 10 * number, lambda: None)
    return transfer_queue


def ids(transfer_queue: DeviceTransferQueue) -> list[tuple[int, bool]]:
    """Return id and success of what has finished."""
    return [(result.job_id, result.success) for result in transfer_queue.drain_finished()]


def test_copies_are_reported_in_order_once_and_published(
    transfer_queue: DeviceTransferQueue, queue: FakeQueue
) -> None:
    queue.handles[1].has_ended = True
    before_the_first = ids(transfer_queue)
    queue.handles[0].has_ended = True

    results = transfer_queue.drain_finished()

    assert before_the_first == []
    assert [(result.job_id, result.transfer_size, result.transfer_time) for result in results] == [
        (0, 0, 0.5),
        (1, 10, 0.5),
    ]
    assert [handle.is_published for handle in queue.handles] == [True, True, False]
    assert ids(transfer_queue) == []


def test_waiting_blocks_for_the_named_copies_and_those_before_them_only(
    transfer_queue: DeviceTransferQueue, queue: FakeQueue
) -> None:
    transfer_queue.wait({TransferJobId(1), TransferJobId(77)})

    assert [handle.has_ended for handle in queue.handles] == [True, True, False]
    assert ids(transfer_queue) == [(0, True), (1, True)]


@pytest.mark.parametrize("poll", ["drain_finished", "wait"])
def test_a_device_that_failed_fails_every_open_copy_and_accepts_no_more(
    transfer_queue: DeviceTransferQueue, queue: FakeQueue, poll: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue.handles[0].has_ended = True
    queue.handles[1].is_broken = True

    if poll == "wait":
        transfer_queue.wait({TransferJobId(2)})

    assert ids(transfer_queue) == [(0, True), (1, False), (2, False)]
    assert "device lost" in caplog.text
    assert not transfer_queue.submit(TransferJobId(5), 1, lambda: None)


def test_a_copy_that_cannot_be_launched_is_declined_and_the_lane_goes_on(
    transfer_queue: DeviceTransferQueue,
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    assert not transfer_queue.submit(TransferJobId(7), 1, fail)
    assert not transfer_queue.submit(TransferJobId(1), 1, lambda: None)
    assert transfer_queue.submit(TransferJobId(8), 1, lambda: None)


def test_shutdown_waits_for_launched_copies_and_accepts_no_more(transfer_queue: DeviceTransferQueue) -> None:
    transfer_queue.shutdown()
    transfer_queue.shutdown()

    assert ids(transfer_queue) == [(0, True), (1, True), (2, True)]
    assert not transfer_queue.submit(TransferJobId(9), 1, lambda: None)


class LaterTicket(FakeHandle):
    """A handle that compute may be ordered after before it has ended."""

    def publish(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: device lost")
        self.is_published = True


class LaterQueue(FakeQueue):
    """Gives such handles, and refuses the launch that a test names."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: int | None = None

    def launch(self, copy: Callable[[], None]) -> FakeHandle:
        if len(self.handles) == self.refused:
            raise RuntimeError("CUDA error: out of resources")
        copy()
        self.handles.append(LaterTicket())
        return self.handles[-1]


def by_layer(queue: LaterQueue, *job_ids: TransferJobId) -> DeviceTransferQueue:
    """Return a transfer_queue with jobs of three parts."""
    transfer_queue = DeviceTransferQueue(CPU_TO_GPU, queue)
    for job_id in job_ids:
        transfer_queue.submit(job_id, 30, *[lambda: None] * 3)
    return transfer_queue


def test_compute_is_ordered_after_one_part_and_nobody_blocks() -> None:
    queue = LaterQueue()
    transfer_queue = by_layer(queue, TransferJobId(0), TransferJobId(1))

    assert transfer_queue.wait_for_part({TransferJobId(1), TransferJobId(9)}, 1)

    assert [handle.is_published for handle in queue.handles] == [False] * 4 + [True, False]
    assert not any(handle.has_ended for handle in queue.handles)
    assert ids(transfer_queue) == []


def test_a_copy_in_parts_ends_with_its_last_and_took_as_long_as_all() -> None:
    queue = LaterQueue()
    transfer_queue = by_layer(queue, TransferJobId(0))
    queue.handles[0].has_ended = queue.handles[1].has_ended = True
    before = ids(transfer_queue)
    queue.handles[2].has_ended = True

    (result,) = transfer_queue.drain_finished()

    assert before == []
    assert (result.success, result.transfer_size, result.transfer_time) == (True, 30, 1.5)


def test_a_copy_one_of_whose_parts_cannot_be_launched_is_declined_when_the_others_have_ended() -> None:
    queue = LaterQueue()
    queue.refused = 2
    transfer_queue = DeviceTransferQueue(CPU_TO_GPU, queue)

    is_begun = transfer_queue.submit(TransferJobId(0), 30, *[lambda: None] * 3)

    assert not is_begun
    assert [handle.has_ended for handle in queue.handles] == [False, True]
    assert ids(transfer_queue) == []


def test_a_device_that_fails_at_a_part_fails_its_jobs() -> None:
    queue = LaterQueue()
    transfer_queue = by_layer(queue, TransferJobId(0), TransferJobId(1))
    queue.handles[1].is_broken = True

    assert not transfer_queue.wait_for_part({TransferJobId(0)}, 1)

    assert not transfer_queue.wait_for_part({TransferJobId(1)}, 0)
    assert ids(transfer_queue) == [(0, False), (1, False)]
    assert transfer_queue.wait_for_part({TransferJobId(0)}, 0)


def test_joined_copies_are_launched_once_and_reported_each_with_its_share(queue: FakeQueue) -> None:
    transfer_queue = DeviceTransferQueue(CPU_TO_GPU, queue)

    assert transfer_queue.submit_joined(
        {TransferJobId(3): 10, TransferJobId(1): 30}, lambda: None, lambda _: None
    )
    before = ids(transfer_queue)
    transfer_queue.wait({TransferJobId(1)})

    assert before == []
    assert len(queue.handles) == 1
    results = transfer_queue.drain_finished()
    assert [(result.job_id, result.transfer_size, result.transfer_time) for result in results] == [
        (3, 10, 0.125),
        (1, 30, 0.375),
    ]


def test_joined_copies_are_declined_together_and_fail_with_the_device(
    transfer_queue: DeviceTransferQueue, queue: FakeQueue
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    assert not transfer_queue.submit_joined(
        {TransferJobId(5): 1, TransferJobId(1): 1}, lambda: None, lambda _: None
    )
    assert not transfer_queue.submit_joined({TransferJobId(5): 1, TransferJobId(6): 1}, fail, lambda _: None)
    assert transfer_queue.submit_joined(
        {TransferJobId(5): 1, TransferJobId(6): 1}, lambda: None, lambda _: None
    )
    queue.handles[-1].is_broken = True

    transfer_queue.wait({TransferJobId(6)})

    assert ids(transfer_queue) == [(0, True), (1, True), (2, True), (5, False), (6, False)]
