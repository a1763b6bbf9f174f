"""A tier without a manager: calls return when their work is done, each with its own result."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.base import JobId, ReqContext
from kvtier.errors import TierError
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import ROW_BYTES, key_of, make_config, make_rows
from kvtier.tiering.base import JobMetadata
from kvtier.tiering.fs import FSTier
from kvtier.tiering.kit.io_pool import IOPool, TransferOutcome

HANG_GUARD_S = 60.0


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FSTier]:
    """A tier on a directory, with rows of its own."""
    rows = make_rows()
    found = FSTier(make_config(), rows, root_dir=str(tmp_path / "kv"), capacity_bytes="64MiB")
    yield found
    assert found.shutdown(HANG_GUARD_S)


def rows_of(tier: FSTier) -> "np.ndarray[tuple[int, int], np.dtype[np.int8]]":
    """Return the rows of a tier, shape (rows, bytes)."""
    return np.asarray(tier.primary_kv_view)


def test_what_is_stored_is_found_at_once_and_loaded_into_other_rows(tier: FSTier) -> None:
    keys = [key_of(1), key_of(2)]
    rows = rows_of(tier)
    rows[0], rows[1] = 1, 2
    assert list(tier.direct.find_held(keys)) == []
    assert tier.direct.store(keys, [0, 1]).success
    assert set(tier.direct.find_held([*keys, key_of(3)])) == set(keys)
    result = tier.direct.load([*keys, key_of(3)], [4, 5, 6])
    assert result.successful_keys == frozenset(keys)
    assert rows[4].tolist() == [1] * ROW_BYTES
    assert rows[5].tolist() == [2] * ROW_BYTES


def test_a_job_that_cannot_be_is_refused_and_so_is_one_after_the_end(tier: FSTier) -> None:
    with pytest.raises(TierError, match="slots"):
        tier.direct.load([key_of(1)], [10_000])
    assert tier.shutdown(HANG_GUARD_S)
    with pytest.raises(TierError, match="after shutdown"):
        tier.direct.store([key_of(1)], [0])


def test_calls_of_many_threads_each_get_their_own_result(tier: FSTier) -> None:
    rows = rows_of(tier)
    failures: list[int] = []

    def run(thread: int) -> None:
        for number in range(20):
            key = key_of(100 * (thread + 1) + number)
            rows[thread] = number
            if (
                not tier.direct.store([key], [thread]).success
                or tier.direct.load([key_of(99)], [thread]).success
            ):
                failures.append(thread)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_job_is_reported_to_who_waits_and_to_no_other() -> None:
    pool = IOPool("test", 1, clock=ManualClock())
    slots = np.zeros(1, np.int64)
    for number in (1, 2):
        job = JobMetadata(
            JobId(number), (key_of(number),), slots, is_promotion=True, req_context=ReqContext("r")
        )
        pool.submit(job, lambda keys, _: TransferOutcome(keys), 30.0)
    assert pool.wait(JobId(2)).job_id == 2
    assert pool.drain(HANG_GUARD_S)
    assert [result.job_id for result in pool.get_finished()] == [1]
    assert pool.shutdown(HANG_GUARD_S)


def test_a_job_that_no_thread_begins_in_time_fails_while_it_is_waited_for() -> None:
    clock = ManualClock()
    pool = IOPool("test", 1, clock=clock)
    entered, opened = threading.Event(), threading.Event()

    def hang(keys: object, _: object) -> TransferOutcome:
        entered.set()
        assert opened.wait(HANG_GUARD_S)
        return TransferOutcome(())

    slots = np.zeros(1, np.int64)
    for number in (1, 2):
        job = JobMetadata(
            JobId(number), (key_of(number),), slots, is_promotion=True, req_context=ReqContext("r")
        )
        pool.submit(job, hang, 30.0)
    assert entered.wait(HANG_GUARD_S)
    clock.advance(31.0)
    assert not pool.wait(JobId(2)).success
    opened.set()
    assert not pool.wait(JobId(1)).success
    assert pool.shutdown(HANG_GUARD_S)
