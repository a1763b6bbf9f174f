"""A job ends when each worker has counted it, one failure fails it, and a store fences what it reads."""

import logging

import pytest
from tests.connector.fakes import FakeRequest

from kvtier.base import OffloadKey, TransferJobId
from kvtier.connector.common import OffloadingWorkerMetadata
from kvtier.connector.jobs import TransferJobs
from kvtier.connector.request_state import make_request_state

KEY = OffloadKey(b"key")
STATE = make_request_state(FakeRequest("r", []), 1)


def report(*job_ids: TransferJobId, failed: bool = False) -> OffloadingWorkerMetadata:
    """Return the report of one worker that ended these jobs."""
    made = OffloadingWorkerMetadata()
    for job_id in job_ids:
        made.mark_completed(job_id, not failed)
    return made


def test_a_job_ends_with_the_last_worker() -> None:
    jobs = TransferJobs(num_workers=2)
    job_id = jobs.open_store(STATE, [KEY], [])

    assert jobs.count(report(job_id)) == []
    [ended] = jobs.count(report(job_id))

    assert (ended.job_id, ended.has_failed) == (job_id, False)
    assert job_id not in jobs.by_id


@pytest.mark.parametrize("failing_worker", [0, 1])
def test_a_failure_on_one_worker_in_any_step_fails_the_job(failing_worker: int) -> None:
    jobs = TransferJobs(num_workers=2)
    job_id = jobs.open_store(STATE, [KEY], [])

    jobs.count(report(job_id, failed=failing_worker == 0))
    [ended] = jobs.count(report(job_id, failed=failing_worker == 1))

    assert ended.has_failed


def test_jobs_of_one_report_end_oldest_first() -> None:
    jobs = TransferJobs(num_workers=1)
    first, second = (jobs.open_store(STATE, [KEY], []) for _ in range(2))

    assert [job.job_id for job in jobs.count(report(second, first))] == [first, second]


def test_an_unknown_or_repeated_report_is_ignored_and_said(caplog: pytest.LogCaptureFixture) -> None:
    jobs = TransferJobs(num_workers=1)
    job_id = jobs.open_store(STATE, [KEY], [])
    jobs.count(report(job_id))

    with caplog.at_level(logging.ERROR):
        assert jobs.count(report(job_id)) == []
    assert "ignored" in caplog.text


def test_a_key_is_being_loaded_until_its_load_ends() -> None:
    jobs = TransferJobs(num_workers=1)
    job_id = jobs.open_load(STATE, [KEY])

    assert jobs.find_load_of([OffloadKey(b"other"), KEY]) == job_id
    jobs.count(report(job_id))
    assert jobs.find_load_of([KEY]) is None


def test_a_store_counts_as_open_until_its_last_worker_has_ended_it_and_a_load_never() -> None:
    jobs = TransferJobs(num_workers=2)
    store, load = jobs.open_store(STATE, [KEY], []), jobs.open_load(STATE, [KEY])

    counts = [jobs.num_stores]
    for _ in range(2):
        jobs.count(report(store, load))
        counts.append(jobs.num_stores)

    assert counts == [1, 1, 0]


def test_void_jobs_fail_and_keep_their_keys_from_being_stored_until_they_end() -> None:
    jobs = TransferJobs(num_workers=1)
    load = jobs.open_load(STATE, [KEY])
    store = jobs.open_store(STATE, [OffloadKey(b"other")], [])

    assert jobs.void_all() == {load}
    assert jobs.void_keys == {KEY, b"other"}
    assert jobs.find_load_of([KEY]) is None
    assert all(job.has_failed and job.is_void for job in jobs.count(report(load, store)))
    assert jobs.void_keys == set()


def test_a_block_that_is_taken_names_the_stores_that_read_it_once() -> None:
    jobs = TransferJobs(num_workers=1)
    one, two = jobs.open_store(STATE, [KEY], [5, 6]), jobs.open_store(STATE, [KEY], [6, 7])

    assert (jobs.take_fenced([6]), jobs.num_fenced_stores) == ({one, two}, 0)
    assert jobs.take_fenced([5, 6, 7]) == set()
    assert not jobs.fenced


def test_a_block_that_no_store_reads_is_not_fenced() -> None:
    jobs = TransferJobs(num_workers=1)
    store = jobs.open_store(STATE, [KEY], [5])
    jobs.open_load(STATE, [KEY])

    assert jobs.take_fenced([4]) == set()
    assert jobs.num_fenced_stores == 1
    assert jobs.take_fenced([5]) == {store}


def test_a_store_that_has_ended_fences_nothing() -> None:
    jobs = TransferJobs(num_workers=1)
    one, two = jobs.open_store(STATE, [KEY], [5, 6]), jobs.open_store(STATE, [KEY], [6])

    jobs.count(report(one))

    assert jobs.take_fenced([5, 6]) == {two}


def test_a_store_whose_fence_was_taken_ends_like_any_other() -> None:
    jobs = TransferJobs(num_workers=1)
    store = jobs.open_store(STATE, [KEY], [5, 5])

    jobs.take_fenced([5])

    assert [job.job_id for job in jobs.count(report(store))] == [store]
