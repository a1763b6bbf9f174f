"""The pool reports each job once, loads before stores, and nobody's slot while a thread may touch it."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvtier.base import JobId, OffloadKey, ReqContext
from kvtier.errors import TierError
from kvtier.testing.clock import ManualClock
from kvtier.tiering.base import JobMetadata, JobResult
from kvtier.tiering.kit.io_pool import IOPool, TransferOutcome

HANG_GUARD_S = 60.0
TIMEOUT_S = 30.0


def job_of(job_id: int, num_blocks: int, *, is_promotion: bool = False) -> JobMetadata:
    """Return a job whose keys tell job and block, and whose slots count from the job's number times 1000."""
    keys = tuple(OffloadKey(f"{job_id}:{n}".encode()) for n in range(num_blocks))
    slots = np.arange(num_blocks, dtype=np.int64) + 1000 * job_id
    return JobMetadata(JobId(job_id), keys, slots, is_promotion, ReqContext("request"))


class Mover:
    """Moves blocks as told, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[OffloadKey], list[int]]] = []
        self.lost: set[OffloadKey] = set()
        self.is_fault = False
        self.error: Exception | None = None

    def __call__(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Move some blocks."""
        self.calls.append((list(keys), list(slots)))
        if self.error is not None:
            raise self.error
        return TransferOutcome([key for key in keys if key not in self.lost], self.is_fault)


class Gate(Mover):
    """A mover that holds each call until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self._entered = threading.Semaphore(0)
        self._opened = threading.Event()

    def __call__(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Hold the thread, then move."""
        moved = super().__call__(keys, slots)
        self._entered.release()
        assert self._opened.wait(HANG_GUARD_S)
        return moved

    def await_entered(self) -> None:
        """Block until one more call holds a thread."""
        assert self._entered.acquire(timeout=HANG_GUARD_S)

    def open(self) -> None:
        """Let every call go on."""
        self._opened.set()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pool(clock: ManualClock) -> Iterator[IOPool]:
    """A pool of one thread, so that order is certain."""
    pool = IOPool("test", 1, clock=clock, max_queued_blocks=100)
    yield pool
    assert pool.shutdown(HANG_GUARD_S)


def finish(pool: IOPool) -> list[JobResult]:
    """Wait for every job and return the reports."""
    assert pool.drain(HANG_GUARD_S)
    return pool.get_finished()


def test_a_job_moves_each_block_to_its_own_slot_and_is_reported_once(pool: IOPool) -> None:
    mover = Mover()
    pool.submit(job_of(1, 5), mover, TIMEOUT_S)
    assert finish(pool) == [JobResult(JobId(1), success=True)]
    assert pool.get_finished() == []
    moved = {key: slot for keys, slots in mover.calls for key, slot in zip(keys, slots, strict=True)}
    assert moved == dict(zip(job_of(1, 5).keys, range(1000, 1005), strict=True))


def test_a_job_without_blocks_is_reported_at_once(pool: IOPool) -> None:
    pool.submit(job_of(1, 0, is_promotion=True), Mover(), TIMEOUT_S)
    assert pool.get_finished() == [JobResult(JobId(1), success=True)]


def test_a_report_says_when_the_job_ended_and_not_when_somebody_looked(
    pool: IOPool, clock: ManualClock
) -> None:
    gate = Gate()
    pool.submit(job_of(1, 1, is_promotion=True), gate, TIMEOUT_S)
    gate.await_entered()
    clock.advance(2.0)
    gate.open()
    assert pool.drain(HANG_GUARD_S)
    clock.advance(TIMEOUT_S)
    assert [result.took_s for result in pool.get_finished()] == [2.0]


def test_a_job_that_lost_blocks_says_which_arrived(pool: IOPool) -> None:
    mover = Mover()
    first, second, third = job_of(1, 3).keys
    mover.lost = {second}
    pool.submit(job_of(1, 3, is_promotion=True), mover, TIMEOUT_S)
    assert finish(pool) == [JobResult(JobId(1), False, frozenset({first, third}), is_fault=False)]


def test_a_fault_in_any_part_is_a_fault_of_the_job(pool: IOPool) -> None:
    mover, faulty = Mover(), Mover()
    mover.lost = faulty.lost = set(job_of(1, 3).keys) | set(job_of(2, 3).keys)
    faulty.is_fault = True
    pool.submit(job_of(1, 3, is_promotion=True), mover, TIMEOUT_S)
    pool.submit(job_of(2, 3, is_promotion=True), faulty, TIMEOUT_S)
    assert [result.is_fault for result in finish(pool)] == [False, True]


def test_a_job_whose_transfer_raises_has_failed_and_the_thread_goes_on(pool: IOPool) -> None:
    mover = Mover()
    mover.error = RuntimeError("broken")
    pool.submit(job_of(1, 2, is_promotion=True), mover, TIMEOUT_S)
    pool.submit(job_of(2, 1, is_promotion=True), Mover(), TIMEOUT_S)
    assert finish(pool) == [JobResult(JobId(1), success=False), JobResult(JobId(2), success=True)]


def test_loads_overtake_waiting_stores_and_both_keep_their_order(pool: IOPool) -> None:
    gate, mover = Gate(), Mover()
    pool.submit(job_of(1, 1), gate, TIMEOUT_S)
    gate.await_entered()
    for job_id, is_promotion in ((2, False), (3, True), (4, True)):
        pool.submit(job_of(job_id, 1, is_promotion=is_promotion), mover, TIMEOUT_S)
    gate.open()
    assert [result.job_id for result in finish(pool)] == [1, 3, 4, 2]


def test_a_load_overtakes_the_rest_of_a_store_that_has_begun(pool: IOPool) -> None:
    gate, mover = Gate(), Mover()
    pool.submit(job_of(1, 3), gate, TIMEOUT_S)
    gate.await_entered()
    pool.submit(job_of(2, 1, is_promotion=True), mover, TIMEOUT_S)
    gate.open()
    assert [result.job_id for result in finish(pool)] == [2, 1]


def test_one_large_job_keeps_every_thread_busy(clock: ManualClock) -> None:
    pool = IOPool("test", 4, clock=clock, max_task_blocks=64)
    gate = Gate()
    pool.submit(job_of(1, 8, is_promotion=True), gate, TIMEOUT_S)
    for _ in range(4):
        gate.await_entered()
    gate.open()
    assert finish(pool) == [JobResult(JobId(1), success=True)]
    assert pool.shutdown(HANG_GUARD_S)


def test_threads_that_may_not_store_are_there_for_loads(clock: ManualClock) -> None:
    pool = IOPool("test", 3, clock=clock, num_store_threads=2, max_task_blocks=64)
    stores = Gate()
    pool.submit(job_of(1, 4), stores, TIMEOUT_S)
    for _ in range(2):
        stores.await_entered()
    pool.submit(job_of(2, 1), stores, TIMEOUT_S)
    for job_id in (3, 4):
        load = Gate()
        pool.submit(job_of(job_id, 1, is_promotion=True), load, TIMEOUT_S)
        load.await_entered()
        load.open()
    assert [len(keys) for keys, _ in stores.calls] == [2, 1]
    stores.open()
    assert {result.job_id for result in finish(pool)} == {1, 2, 3, 4}
    assert sum(len(keys) for keys, _ in stores.calls) == 5
    assert pool.shutdown(HANG_GUARD_S)


def test_no_part_is_larger_than_allowed(clock: ManualClock) -> None:
    pool = IOPool("test", 1, clock=clock, max_task_blocks=3)
    mover = Mover()
    pool.submit(job_of(1, 8, is_promotion=True), mover, TIMEOUT_S)
    assert finish(pool)
    assert [len(keys) for keys, _ in mover.calls] == [3, 3, 2]
    assert pool.shutdown(HANG_GUARD_S)


def test_an_even_cut_makes_no_part_smaller_than_a_thread_s_share(clock: ManualClock) -> None:
    pool = IOPool("test", 4, clock=clock, max_task_blocks=16, cuts_evenly=True)
    movers = [Mover() for _ in range(3)]
    for job_id, num_blocks, mover in zip((1, 2, 3), (64, 17, 3), movers, strict=True):
        pool.submit(job_of(job_id, num_blocks, is_promotion=True), mover, TIMEOUT_S)
        assert finish(pool)
    sizes = [sorted(len(keys) for keys, _ in mover.calls) for mover in movers]
    assert sizes == [[16, 16, 16, 16], [2, 5, 5, 5], [1, 1, 1]]
    assert pool.shutdown(HANG_GUARD_S)


def test_only_the_last_job_that_waits_is_cut_into_small_parts(clock: ManualClock) -> None:
    pool = IOPool("test", 2, clock=clock, max_task_blocks=4)
    gate, movers = Gate(), [Mover() for _ in range(3)]
    for job_id in (1, 2):
        pool.submit(job_of(job_id, 1), gate, TIMEOUT_S)
        gate.await_entered()
    for job_id, num_blocks, mover in zip((3, 4, 5), (2, 8, 8), movers, strict=True):
        pool.submit(job_of(job_id, num_blocks), mover, TIMEOUT_S)
    gate.open()
    assert all(result.success for result in finish(pool))
    sizes = [sorted(len(keys) for keys, _ in mover.calls) for mover in movers]
    assert sizes == [[2], [4, 4], [1, 1, 2, 4]]
    assert pool.shutdown(HANG_GUARD_S)


def test_an_overdue_job_that_nobody_began_is_failed_by_a_poll(pool: IOPool, clock: ManualClock) -> None:
    gate, mover = Gate(), Mover()
    pool.submit(job_of(1, 1), gate, timeout_s=1000.0)
    gate.await_entered()
    pool.submit(job_of(2, 3, is_promotion=True), mover, TIMEOUT_S)
    clock.advance(TIMEOUT_S - 0.1)
    assert pool.get_finished() == []
    clock.advance(0.2)
    assert pool.get_finished() == [JobResult(JobId(2), success=False)]
    assert pool.stats()["timeout"] == 3
    gate.open()
    assert finish(pool) == [JobResult(JobId(1), success=True)]
    assert mover.calls == []


def test_an_overdue_job_is_not_reported_while_a_thread_touches_its_slots(
    pool: IOPool, clock: ManualClock
) -> None:
    gate = Gate()
    pool.submit(job_of(1, 3, is_promotion=True), gate, TIMEOUT_S)
    gate.await_entered()
    clock.advance(TIMEOUT_S + 1.0)
    assert pool.get_finished() == []
    assert not pool.drain(0.01)
    gate.open()
    first = job_of(1, 3).keys[0]
    assert finish(pool) == [JobResult(JobId(1), success=False, successful_keys=frozenset({first}))]
    assert len(gate.calls) == 1


def test_an_overdue_job_is_given_up_by_the_thread_that_finds_it(pool: IOPool, clock: ManualClock) -> None:
    gate, mover = Gate(), Mover()
    pool.submit(job_of(1, 1), gate, timeout_s=1000.0)
    gate.await_entered()
    pool.submit(job_of(2, 1, is_promotion=True), mover, TIMEOUT_S)
    clock.advance(TIMEOUT_S)
    gate.open()
    assert pool.drain(HANG_GUARD_S)
    assert mover.calls == []
    assert {result.job_id: result.success for result in pool.get_finished()} == {1: True, 2: False}


def test_the_age_of_the_oldest_job_that_waits(pool: IOPool, clock: ManualClock) -> None:
    gate = Gate()
    assert pool.oldest_wait_s() == 0.0
    pool.submit(job_of(1, 2, is_promotion=True), gate, TIMEOUT_S)
    gate.await_entered()
    clock.advance(5.0)
    assert pool.oldest_wait_s() == 0.0
    pool.submit(job_of(2, 1), gate, TIMEOUT_S)
    clock.advance(3.0)
    pool.submit(job_of(3, 1, is_promotion=True), gate, TIMEOUT_S)
    clock.advance(1.0)
    assert pool.oldest_wait_s() == 4.0
    gate.open()
    finish(pool)
    assert pool.oldest_wait_s() == 0.0


def test_a_full_queue_refuses_a_job_and_starts_nothing(pool: IOPool) -> None:
    gate, mover = Gate(), Mover()
    pool.submit(job_of(1, 1), gate, TIMEOUT_S)
    gate.await_entered()
    pool.submit(job_of(2, 100), mover, TIMEOUT_S)
    with pytest.raises(TierError, match="at most 100 may"):
        pool.submit(job_of(3, 1, is_promotion=True), mover, TIMEOUT_S)
    gate.open()
    assert sorted(result.job_id for result in finish(pool)) == [1, 2]
    pool.submit(job_of(4, 100, is_promotion=True), mover, TIMEOUT_S)
    assert finish(pool) == [JobResult(JobId(4), success=True)]


def test_shutdown_hands_back_what_nobody_began(clock: ManualClock) -> None:
    pool, gate = IOPool("test", 1, clock=clock), Gate()
    pool.submit(job_of(1, 2, is_promotion=True), gate, TIMEOUT_S)
    gate.await_entered()
    pool.submit(job_of(2, 2), gate, TIMEOUT_S)
    assert not pool.shutdown(0.01)
    assert pool.get_finished() == [JobResult(JobId(2), success=False)]
    gate.open()
    assert pool.shutdown(HANG_GUARD_S)
    first = job_of(1, 2).keys[0]
    assert pool.get_finished() == [JobResult(JobId(1), success=False, successful_keys=frozenset({first}))]
    assert len(gate.calls) == 1


def test_a_job_after_shutdown_is_refused(clock: ManualClock) -> None:
    pool = IOPool("test", 1, clock=clock)
    assert pool.shutdown(HANG_GUARD_S)
    with pytest.raises(TierError, match="after shutdown"):
        pool.submit(job_of(1, 1), Mover(), TIMEOUT_S)
    assert pool.shutdown(HANG_GUARD_S)
    assert pool.get_finished() == []


def test_threads_are_named_after_the_tier_and_started_by_the_first_job(clock: ManualClock) -> None:
    pool = IOPool("named", 2, clock=clock)
    assert [thread for thread in threading.enumerate() if "named" in thread.name] == []
    gate = Gate()
    pool.submit(job_of(1, 2, is_promotion=True), gate, TIMEOUT_S)
    gate.await_entered()
    names = {thread.name for thread in threading.enumerate() if "named" in thread.name}
    assert names == {"kvtier-named-io-0", "kvtier-named-io-1"}
    gate.open()
    finish(pool)
    assert pool.shutdown(HANG_GUARD_S)


def test_many_jobs_from_many_threads_are_each_reported_once(clock: ManualClock) -> None:
    pool = IOPool("test", 4, clock=clock, max_task_blocks=2)

    def submit(first_id: int) -> None:
        for job_id in range(first_id, first_id + 50):
            job = job_of(job_id, job_id % 7, is_promotion=job_id % 3 > 0)
            pool.submit(job, Mover(), TIMEOUT_S)

    threads = [threading.Thread(target=submit, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = finish(pool)
    assert sorted(result.job_id for result in results) == [1000 * n + m for n in range(4) for m in range(50)]
    assert all(result.success for result in results)
    assert pool.shutdown(HANG_GUARD_S)
