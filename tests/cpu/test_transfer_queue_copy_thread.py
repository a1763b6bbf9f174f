"""A copy thread reports every accepted job exactly once, in order, whatever becomes of the copy or the thread."""

import logging
import threading
from collections.abc import Callable

import pytest

from kvtier.base import TransferJobId, TransferType
from kvtier.cpu.transfer_queue import CopyThread
from kvtier.testing.clock import ManualClock

GPU_TO_CPU = TransferType("GPU", "CPU")
HANG_GUARD_S = 60


class Gate:
    """A copy that waits until the test opens it."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> None:
        """Copy nothing."""
        self.has_begun.set()
        assert self.may_end.wait(HANG_GUARD_S)


def job(number: int) -> TransferJobId:
    """Return a job id."""
    return TransferJobId(number)


def succeed() -> None:
    """Copy nothing."""


def fail() -> None:
    """Fail as a copy may."""
    raise OSError("no such memory")


def die() -> None:
    """End the thread."""
    raise SystemExit


def test_results_carry_size_media_and_the_copys_own_time() -> None:
    clock = ManualClock()
    thread = CopyThread(GPU_TO_CPU, clock)
    gate = Gate()
    thread.submit(job(1), 10, gate)
    thread.submit(job(2), 20, lambda: clock.advance(2.0))
    assert gate.has_begun.wait(HANG_GUARD_S)
    clock.advance(5.0)
    gate.may_end.set()

    thread.wait({job(1), job(2)})

    first, second = thread.drain_finished()
    assert (first.job_id, first.transfer_size, first.transfer_time) == (1, 10, 5.0)
    assert (second.job_id, second.transfer_size, second.transfer_time) == (2, 20, 2.0)
    assert first.transfer_type == GPU_TO_CPU
    thread.shutdown()


def test_waiting_for_one_job_does_not_wait_for_the_ones_behind_it() -> None:
    thread = CopyThread(GPU_TO_CPU)
    gate = Gate()
    thread.submit(job(1), 1, succeed)
    thread.submit(job(2), 1, gate)

    thread.wait({job(1), job(77)})

    assert [result.job_id for result in thread.drain_finished()] == [1]
    gate.may_end.set()
    thread.shutdown()
    assert [result.job_id for result in thread.drain_finished()] == [2]


def test_a_failed_copy_fails_its_own_job_only(caplog: pytest.LogCaptureFixture) -> None:
    thread = CopyThread(GPU_TO_CPU)
    thread.submit(job(1), 1, fail)
    thread.submit(job(2), 1, succeed)

    thread.wait({job(1), job(2)})

    results = [(result.job_id, result.success) for result in thread.drain_finished()]
    assert results == [(1, False), (2, True)]
    assert "no such memory" in caplog.text
    thread.shutdown()


def test_a_thread_that_died_fails_all_its_jobs_and_accepts_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    thread = CopyThread(GPU_TO_CPU)
    gate = Gate()
    copies: list[Callable[[], None]] = [gate, die, succeed, succeed]
    for number, copy in enumerate(copies):
        assert thread.submit(job(number), 1, copy)
    gate.may_end.set()

    thread.wait({job(3)})

    results = [(result.job_id, result.success) for result in thread.drain_finished()]
    assert results == [(0, True), (1, False), (2, False), (3, False)]
    assert not thread.submit(job(4), 1, succeed)
    thread.shutdown()
    assert thread.drain_finished() == []


def test_shutdown_ends_the_begun_copy_well_and_fails_the_queued_ones() -> None:
    thread = CopyThread(GPU_TO_CPU)
    gate = Gate()
    thread.submit(job(0), 1, gate)
    assert gate.has_begun.wait(HANG_GUARD_S)
    thread.submit(job(1), 1, succeed)
    closer = threading.Thread(target=thread.shutdown)
    closer.start()
    num_accepted = 2
    while thread.submit(job(num_accepted), 1, succeed):
        num_accepted += 1

    gate.may_end.set()
    closer.join(HANG_GUARD_S)

    results = [(result.job_id, result.success) for result in thread.drain_finished()]
    assert results == [(0, True)] + [(number, False) for number in range(1, num_accepted)]
    assert not thread.submit(job(-1), 1, succeed)


def test_an_id_in_flight_is_declined() -> None:
    thread = CopyThread(GPU_TO_CPU)
    gate = Gate()

    assert thread.submit(job(1), 1, gate)
    assert not thread.submit(job(1), 1, succeed)

    gate.may_end.set()
    thread.shutdown()
    assert [result.job_id for result in thread.drain_finished()] == [1]


def test_joined_jobs_are_copied_once_and_each_has_its_share_of_the_time() -> None:
    clock = ManualClock()
    thread = CopyThread(GPU_TO_CPU, clock)
    alone: list[TransferJobId] = []

    assert thread.submit_joined({job(4): 10, job(2): 30}, lambda: clock.advance(8.0), alone.append)
    thread.wait({job(2)})

    results = thread.drain_finished()
    assert [(result.job_id, result.transfer_size, result.transfer_time) for result in results] == [
        (4, 10, 2.0),
        (2, 30, 6.0),
    ]
    assert alone == []
    thread.shutdown()


def test_joined_jobs_of_no_bytes_share_the_time_evenly() -> None:
    clock = ManualClock()
    thread = CopyThread(GPU_TO_CPU, clock)

    thread.submit_joined({job(1): 0, job(2): 0}, lambda: clock.advance(8.0), lambda _: None)
    thread.wait({job(1), job(2)})

    assert [result.transfer_time for result in thread.drain_finished()] == [4.0, 4.0]
    thread.shutdown()


def test_when_a_joined_copy_fails_each_job_has_the_outcome_that_it_has_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = CopyThread(GPU_TO_CPU)

    def copy_alone(job_id: TransferJobId) -> None:
        if job_id == 2:
            fail()

    thread.submit_joined({job(1): 1, job(2): 1, job(3): 1}, fail, copy_alone)
    thread.submit(job(4), 1, succeed)
    thread.wait({job(3), job(4)})

    results = [(result.job_id, result.success) for result in thread.drain_finished()]
    assert results == [(1, True), (2, False), (3, True), (4, True)]
    assert "no such memory" in caplog.text
    thread.shutdown()


def test_joined_jobs_are_declined_together_when_one_is_open_or_the_thread_has_ended() -> None:
    thread = CopyThread(GPU_TO_CPU)
    gate = Gate()
    thread.submit(job(1), 1, gate)

    assert not thread.submit_joined({job(2): 1, job(1): 1}, succeed, lambda _: None)
    gate.may_end.set()
    thread.shutdown()
    assert not thread.submit_joined({job(2): 1, job(3): 1}, succeed, lambda _: None)
    assert [result.job_id for result in thread.drain_finished()] == [1]


def test_a_thread_that_dies_in_a_joined_copy_fails_all_its_jobs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    thread = CopyThread(GPU_TO_CPU)
    gate = Gate()
    thread.submit(job(0), 1, gate)
    thread.submit_joined({job(1): 1, job(2): 1}, die, lambda _: None)
    gate.may_end.set()

    thread.wait({job(1), job(2)})

    results = [(result.job_id, result.success) for result in thread.drain_finished()]
    assert results == [(0, True), (1, False), (2, False)]
    thread.shutdown()
