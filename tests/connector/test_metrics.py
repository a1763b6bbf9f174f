"""Sums of transfers, and their bound."""

from kvtier.base import TransferType
from kvtier.connector.metrics import MAX_RECORDED_OPERATIONS, OffloadingConnectorStats, SchedulerCounters

STORE = TransferType("GPU", "CPU")
LOAD = TransferType("CPU", "GPU")


def test_transfers_are_recorded_by_direction_and_summed() -> None:
    stats = OffloadingConnectorStats()
    stats.record_transfer(10, 0.5, STORE)
    stats.record_transfer(20, 0.25, STORE)
    stats.record_transfer(5, 1.0, LOAD)

    assert stats.data["CPU_to_GPU"] == [{"op_size": 5, "op_time": 1.0}]
    assert stats.reduce() == {
        "GPU_to_CPU_total_bytes": 30,
        "GPU_to_CPU_total_time": 0.75,
        "CPU_to_GPU_total_bytes": 5,
        "CPU_to_GPU_total_time": 1.0,
    }


def test_aggregate_adds_to_the_left_and_leaves_the_right_alone() -> None:
    left, right = OffloadingConnectorStats(), OffloadingConnectorStats()
    left.record_transfer(1, 1.0, STORE)
    right.record_transfer(2, 1.0, STORE)

    left.aggregate(right).record_transfer(4, 1.0, STORE)

    assert left.reduce()["GPU_to_CPU_total_bytes"] == 7
    assert right.reduce()["GPU_to_CPU_total_bytes"] == 2


def test_reset_empties() -> None:
    stats = OffloadingConnectorStats()
    assert stats.is_empty()
    stats.record_transfer(1, 1.0, STORE)
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_stats_that_nobody_takes_stay_bounded_and_keep_their_totals() -> None:
    stats = OffloadingConnectorStats()
    for _ in range(MAX_RECORDED_OPERATIONS + 10):
        stats.record_transfer(1, 0.5, STORE)

    assert len(stats.data["GPU_to_CPU"]) == MAX_RECORDED_OPERATIONS
    assert stats.reduce()["GPU_to_CPU_total_bytes"] == MAX_RECORDED_OPERATIONS + 10


def test_counters_are_read_by_dotted_name() -> None:
    assert SchedulerCounters(load_jobs=3).snapshot()["connector.load_jobs"] == 3.0
