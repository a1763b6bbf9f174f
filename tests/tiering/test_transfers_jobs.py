"""Jobs are numbered once and taken back once, only by the tier that has them."""

from kvtier.base import JobId, ReqContext
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of, make_config, make_rows
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.transfers import JobTable, TierJob


def make_guard() -> GuardedTier:
    """A guard around an example tier."""
    return GuardedTier(ExampleSecondaryTier(make_config(), make_rows()), 2**20, 2**12, ManualClock())


def open_job(table: JobTable, guard: GuardedTier) -> TierJob:
    """Open a store of one block."""
    return table.open(guard, [key_of(1)], [7], ReqContext("a"), is_promotion=False)


def test_a_job_is_closed_once() -> None:
    table, guard = JobTable(), make_guard()
    job = open_job(table, guard)
    assert table.close(job.metadata.job_id, guard) is job
    assert table.close(job.metadata.job_id, guard) is None
    assert table.num_unknown_results == 1
    assert len(table) == 0


def test_a_tier_cannot_close_another_tiers_job() -> None:
    table, guard, other = JobTable(), make_guard(), make_guard()
    job = open_job(table, guard)
    assert table.close(job.metadata.job_id, other) is None
    assert table.of_tier(guard) == [job]


def test_a_job_that_never_was_is_counted() -> None:
    table = JobTable()
    assert table.close(JobId(5), make_guard()) is None
    assert table.num_unknown_results == 1


def test_ids_are_unique_and_slots_keep_their_order() -> None:
    table, guard = JobTable(), make_guard()
    jobs = [
        table.open(guard, [key_of(1), key_of(2)], [9, 3], ReqContext("a"), is_promotion=True) for _ in "ab"
    ]
    assert len({job.metadata.job_id for job in jobs}) == 2
    assert jobs[0].metadata.block_ids.tolist() == [9, 3]


def test_a_reset_makes_open_jobs_stale_and_later_ones_not() -> None:
    table, guard = JobTable(), make_guard()
    old = open_job(table, guard)
    table.mark_stale()
    new = open_job(table, guard)
    assert [job.is_stale for job in (old, new)] == [True, False]
    assert list(table) == [old, new]
