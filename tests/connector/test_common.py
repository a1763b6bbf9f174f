"""What the halves say to each other: counting, summing, truth."""

import pickle

from kvtier.base import TransferJobId
from kvtier.connector.common import (
    BlockStored,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

ONE, TWO = TransferJobId(1), TransferJobId(2)


def test_aggregate_sums_counts_unites_failures_and_changes_neither() -> None:
    left, right = OffloadingWorkerMetadata(), OffloadingWorkerMetadata(region_identities=((1, 2),))
    left.mark_completed(ONE)
    right.mark_completed(ONE, success=False)
    right.mark_completed(TWO)

    both = left.aggregate(right)

    assert both.completed_jobs == {ONE: 2, TWO: 1}
    assert both.failed_jobs == {ONE}
    assert both.region_identities == ((1, 2),)
    assert (left.completed_jobs, left.failed_jobs) == ({ONE: 1}, frozenset())
    assert right.completed_jobs == {ONE: 1, TWO: 1}
    assert right.failed_jobs == {ONE}


def test_identities_of_workers_that_agree_are_counted_not_merged() -> None:
    one = OffloadingWorkerMetadata(region_identities=((1, 2),))

    assert one.aggregate(one).region_identities == ((1, 2), (1, 2))


def test_two_reports_share_no_default() -> None:
    first = OffloadingWorkerMetadata()
    first.mark_completed(ONE)

    assert OffloadingWorkerMetadata().completed_jobs == {}


def test_metadata_without_jobs_is_neither_false_nor_of_length_zero() -> None:
    assert OffloadingConnectorMetadata({}, {})
    assert not hasattr(OffloadingConnectorMetadata, "__len__")
    assert not hasattr(OffloadingConnectorMetadata, "__bool__")


def test_a_report_survives_the_way_to_another_process() -> None:
    report = OffloadingWorkerMetadata({ONE: 1}, frozenset({ONE}), ((1, 2),))

    assert pickle.loads(pickle.dumps(report)) == report  # noqa: S301  our own bytes


def test_stored_events_leave_the_block_size_to_the_device_cache() -> None:
    assert BlockStored((b"hash",), "CPU").block_size == 0
