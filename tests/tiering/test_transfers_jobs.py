"""Jobs are numbered once and taken back once, only by the tier that has them."""

from kvtier.base import JobId, ReqContext
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_suite import key_of, make_config, make_rows
from kvtier.tiering.example import ExampleSecondaryTier
from kvtier.tiering.guard import GuardedTier
from kvtier.tiering.transfers import TierJob, TierJobs


def make_tier() -> GuardedTier:
    """An example tier, guarded."""
    return GuardedTier(ExampleSecondaryTier(make_config(), make_rows()), 2**20, 2**12, ManualClock())


def open_job(table: TierJobs, tier: GuardedTier) -> TierJob:
    """Open a store of one block."""
    return table.open(tier, [key_of(1)], [7], ReqContext("a"), is_promotion=False, now_s=3.0)


def test_a_job_is_closed_once() -> None:
    tier = make_tier()
    table = TierJobs([tier])
    job = open_job(table, tier)
    assert table.close(job.metadata.job_id, tier) is job
    assert table.close(job.metadata.job_id, tier) is None
    assert table.num_unknown_results == 1
    assert len(table) == 0


def test_a_tier_cannot_close_another_tiers_job() -> None:
    tier, other = make_tier(), make_tier()
    table = TierJobs([tier, other])
    job = open_job(table, tier)
    assert table.close(job.metadata.job_id, other) is None
    assert list(table.of_tier[tier].values()) == [job]


def test_a_job_that_never_was_is_counted() -> None:
    tier = make_tier()
    table = TierJobs([tier])
    assert table.close(JobId(5), tier) is None
    assert table.num_unknown_results == 1


def test_ids_are_unique_and_slots_keep_their_order() -> None:
    tier = make_tier()
    table = TierJobs([tier])
    jobs = [
        table.open(tier, [key_of(1), key_of(2)], [9, 3], ReqContext("a"), is_promotion=True, now_s=3.0)
        for _ in "ab"
    ]
    assert len({job.metadata.job_id for job in jobs}) == 2
    assert jobs[0].metadata.block_ids.tolist() == [9, 3]


def test_a_reset_makes_open_jobs_stale_and_later_ones_not() -> None:
    tier = make_tier()
    table = TierJobs([tier])
    old = open_job(table, tier)
    table.mark_stale()
    new = open_job(table, tier)
    assert [job.is_stale for job in (old, new)] == [True, False]
    assert list(table) == [old, new]
