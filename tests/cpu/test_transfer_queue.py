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
