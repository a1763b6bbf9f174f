"""Small jobs of many requests are moved with few calls, and each has the outcome that it would have had alone."""

import random
from collections.abc import Iterator, Sequence

import pytest
from tests.tiering.kit.test_io_pool import HANG_GUARD_S, TIMEOUT_S, Gate, Mover, finish, job_of

from kvtier.base import JobId, OffloadKey
from kvtier.testing.clock import ManualClock
from kvtier.tiering.base import JobResult
from kvtier.tiering.kit.io_pool import IOPool, TransferOutcome

MAX_JOINED = 16


class Verdicts(Mover):
    """A mover that names the faults among what fails, and notes which jobs each call had blocks of."""

    def __init__(self, faults: frozenset[OffloadKey] = frozenset()) -> None:
        super().__init__()
        self.faults = faults

    def __call__(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Move some blocks."""
        moved = super().__call__(keys, slots)
        faults = [key for key in keys if key in self.lost & self.faults]
        return TransferOutcome(moved.succeeded, bool(faults), faults)

    def jobs_of_calls(self) -> list[list[int]]:
        """Return the numbers of the jobs in each call, in order."""
        return [list(dict.fromkeys(int(key.split(b":")[0]) for key in keys)) for keys, _ in self.calls]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pool(clock: ManualClock) -> Iterator[IOPool]:
    """A pool of one thread that joins jobs, so that what waits is joined for certain."""
    pool = IOPool("test", 1, clock=clock, max_task_blocks=64, max_joined_blocks=MAX_JOINED)
    yield pool
    assert pool.shutdown(HANG_GUARD_S)


def block(pool: IOPool, *, num_threads: int = 1) -> Gate:
    """Keep every thread of the pool busy until the gate is opened, so that what is submitted meanwhile waits."""
    gate = Gate()
    for number in range(num_threads):
        pool.submit(job_of(900 + number, 1, is_promotion=True), gate, TIMEOUT_S)
        gate.await_entered()
    return gate


def results_behind(gate: Gate, pool: IOPool) -> dict[int, JobResult]:
    """Open the gate; return the reports of the jobs that waited behind it, by number."""
    gate.open()
    reports = [result for result in finish(pool) if result.job_id < 900]
    by_id = {int(result.job_id): result for result in reports}
    assert len(by_id) == len(reports), "a job was reported twice"
    return by_id


@pytest.mark.parametrize("is_promotion", [True, False], ids=["loads", "stores"])
def test_small_jobs_are_moved_with_few_calls_and_reported_one_by_one(
    pool: IOPool, *, is_promotion: bool
) -> None:
    gate, mover = block(pool), Verdicts()
    for number in range(64):
        pool.submit(job_of(number, 1, is_promotion=is_promotion), mover, TIMEOUT_S)
    results = results_behind(gate, pool)
    assert results == {number: JobResult(JobId(number), success=True) for number in range(64)}
    assert [len(jobs) for jobs in mover.jobs_of_calls()] == [MAX_JOINED] * 4
    moved = {key: slot for keys, slots in mover.calls for key, slot in zip(keys, slots, strict=True)}
    assert moved == {key: 1000 * number for number in range(64) for key in job_of(number, 1).keys}
    assert pool.stats()["joined_jobs"] == 64
    assert pool.stats()["queued_blocks"] == 0


def test_a_job_alone_is_not_joined_with_anything(pool: IOPool) -> None:
    mover = Verdicts()
    pool.submit(job_of(1, 3), mover, TIMEOUT_S)
    assert finish(pool) == [JobResult(JobId(1), success=True)]
    assert pool.stats()["joined_jobs"] == 0


def test_a_large_job_is_joined_with_none_and_small_ones_behind_it_are(pool: IOPool) -> None:
    gate, mover = block(pool), Verdicts()
    for number, num_blocks in enumerate((2, 40, 3, 3)):
        pool.submit(job_of(number, num_blocks), mover, TIMEOUT_S)
    assert all(result.success for result in results_behind(gate, pool).values())
    assert mover.jobs_of_calls() == [[0], [1], [2, 3]]


def test_a_call_has_no_more_blocks_than_may_be_joined_and_cuts_no_job(pool: IOPool) -> None:
    gate, mover = block(pool), Verdicts()
    for number in range(6):
        pool.submit(job_of(number, 6), mover, TIMEOUT_S)
    assert all(result.success for result in results_behind(gate, pool).values())
    assert mover.jobs_of_calls() == [[0, 1], [2, 3], [4, 5]]


def test_loads_and_stores_and_jobs_moved_otherwise_share_no_call(pool: IOPool) -> None:
    gate, first, second = block(pool), Verdicts(), Verdicts()
    for number, mover, is_promotion in (
        (1, first, False), (2, first, True), (3, second, True), (4, second, True), (5, first, True),
    ):  # fmt: skip
        pool.submit(job_of(number, 1, is_promotion=is_promotion), mover, TIMEOUT_S)
    assert all(result.success for result in results_behind(gate, pool).values())
    assert first.jobs_of_calls() == [[2], [5], [1]]
    assert second.jobs_of_calls() == [[3, 4]]


def test_a_block_is_not_twice_in_a_call(pool: IOPool) -> None:
    gate, mover = block(pool), Verdicts()
    twice = job_of(1, 2)
    pool.submit(twice, mover, TIMEOUT_S)
    again = job_of(2, 2)
    pool.submit(
        type(again)(again.job_id, twice.keys, again.block_ids, False, again.req_context), mover, TIMEOUT_S
    )
    assert all(result.success for result in results_behind(gate, pool).values())
    assert [len(keys) for keys, _ in mover.calls] == [2, 2]


def test_idle_threads_share_what_waits(clock: ManualClock) -> None:
    pool = IOPool("test", 4, clock=clock, max_task_blocks=64, max_joined_blocks=MAX_JOINED)
    gate, mover = block(pool, num_threads=4), Verdicts()
    for number in range(4):
        pool.submit(job_of(number, 1), mover, TIMEOUT_S)
    assert all(result.success for result in results_behind(gate, pool).values())
    assert sorted(mover.jobs_of_calls()) == [[0], [1], [2], [3]]
    assert pool.shutdown(HANG_GUARD_S)


def test_where_calls_cost_much_a_few_jobs_are_one_call_although_threads_are_idle(clock: ManualClock) -> None:
    pool = IOPool("test", 4, clock=clock, max_task_blocks=64, max_joined_blocks=MAX_JOINED, cuts_evenly=True)
    gate, mover = block(pool, num_threads=4), Verdicts()
    for number in range(4):
        pool.submit(job_of(number, 1), mover, TIMEOUT_S)
    assert all(result.success for result in results_behind(gate, pool).values())
    assert mover.jobs_of_calls() == [[0, 1, 2, 3]]
    assert pool.shutdown(HANG_GUARD_S)


def test_a_lost_block_costs_its_own_job_and_only_that_says_whose_fault_it_was(pool: IOPool) -> None:
    jobs = [job_of(number, 2, is_promotion=True) for number in range(5)]
    mover = Verdicts(faults=frozenset(jobs[1].keys[:1]))
    mover.lost = {jobs[1].keys[0], jobs[3].keys[1]}
    gate = block(pool)
    for job in jobs:
        pool.submit(job, mover, TIMEOUT_S)
    results = results_behind(gate, pool)
    assert len(mover.calls) == 1
    assert results == {
        0: JobResult(JobId(0), success=True),
        1: JobResult(JobId(1), False, frozenset(jobs[1].keys[1:]), is_fault=True),
        2: JobResult(JobId(2), success=True),
        3: JobResult(JobId(3), False, frozenset(jobs[3].keys[:1]), is_fault=False),
        4: JobResult(JobId(4), success=True),
    }


class Picky(Mover):
    """A mover that raises when one block is among those of a call: what a client may do for a damaged reply."""

    def __init__(self, bad: OffloadKey) -> None:
        super().__init__()
        self.bad = bad

    def __call__(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Move some blocks, or none."""
        self.error = RuntimeError("broken") if self.bad in keys else None
        return super().__call__(keys, slots)


def test_a_call_that_fails_as_a_whole_is_made_again_for_each_of_its_jobs(pool: IOPool) -> None:
    jobs = [job_of(number, 2, is_promotion=True) for number in range(4)]
    gate, mover = block(pool), Picky(jobs[2].keys[0])
    for job in jobs:
        pool.submit(job, mover, TIMEOUT_S)
    results = results_behind(gate, pool)
    assert [results[number].success for number in range(4)] == [True, True, False, True]
    assert results[2].is_fault
    assert [len(keys) for keys, _ in mover.calls] == [8, 2, 2, 2, 2]
    assert pool.stats()["queued_blocks"] == 0


class Late(Mover):
    """A mover whose calls fail after a while, as those of a server that hangs."""

    def __init__(self, clock: ManualClock, wait_s: float) -> None:
        super().__init__()
        self._clock, self._wait_s = clock, wait_s

    def __call__(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
        """Wait, and fail."""
        super().__call__(keys, slots)
        self._clock.advance(self._wait_s)
        return TransferOutcome((), is_fault=True)


def test_jobs_of_a_call_that_outlived_their_deadline_are_not_tried_again(
    pool: IOPool, clock: ManualClock
) -> None:
    gate, mover = block(pool), Late(clock, TIMEOUT_S)
    for number in range(4):
        pool.submit(job_of(number, 2), mover, TIMEOUT_S)
    results = results_behind(gate, pool)
    assert not any(result.success for result in results.values())
    assert len(results) == 4
    assert len(mover.calls) == 1


def test_jobs_of_a_call_that_fails_during_the_shutdown_are_reported(clock: ManualClock) -> None:
    pool = IOPool("test", 1, clock=clock, max_task_blocks=64, max_joined_blocks=MAX_JOINED)

    class Ending(Mover):
        """A mover during whose call the pool is shut down."""

        def __call__(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> TransferOutcome:
            super().__call__(keys, slots)
            pool.shutdown(0.0)
            return TransferOutcome((), is_fault=True)

    gate, mover = block(pool), Ending()
    for number in range(3):
        pool.submit(job_of(number, 1), mover, TIMEOUT_S)
    results = results_behind(gate, pool)
    assert sorted(results) == [0, 1, 2]
    assert not any(result.success for result in results.values())
    assert pool.shutdown(HANG_GUARD_S)
    assert len(mover.calls) == 1


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_jobs_has_the_outcomes_that_each_would_have_alone(seed: int, clock: ManualClock) -> None:
    rng = random.Random(seed)
    jobs = [
        job_of(number, rng.randint(1, 9), is_promotion=rng.random() < 0.5)
        for number in range(rng.randint(1, 60))
    ]
    keys = [key for job in jobs for key in job.keys]
    lost = {key for key in keys if rng.random() < 0.1}
    faults = frozenset(key for key in lost if rng.random() < 0.5)
    bad = rng.choice(keys) if rng.random() < 0.3 else OffloadKey(b"")
    movers: list[Mover] = [Verdicts(faults), Picky(bad)]
    pool = IOPool(
        "test",
        rng.randint(1, 4),
        clock=clock,
        max_task_blocks=rng.randint(1, 64),
        max_joined_blocks=rng.randint(1, 64),
        cuts_evenly=rng.random() < 0.5,
    )
    for mover in movers:
        mover.lost = set(lost)
    chosen = [rng.choice(movers) for _ in jobs]
    for job, mover in zip(jobs, chosen, strict=True):
        pool.submit(job, mover, TIMEOUT_S)
    results = {int(result.job_id): result for result in finish(pool)}
    assert pool.stats()["queued_blocks"] == pool.stats()["open_jobs"] == 0
    for job, mover in zip(jobs, chosen, strict=True):
        arrived = frozenset(job.keys) - lost
        result = results[int(job.job_id)]
        if mover is movers[1] and bad in job.keys:
            assert not result.success
            assert result.is_fault
        elif arrived == frozenset(job.keys):
            assert result.success
        else:
            assert not result.success
            assert (result.successful_keys or frozenset()) == arrived
            assert mover is movers[1] or result.is_fault == bool(faults & set(job.keys))
    assert pool.shutdown(HANG_GUARD_S)
