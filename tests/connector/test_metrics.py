"""What the connector measures: sizes and durations of copies, searches, and waits."""

from kvtier.connector.common import OffloadingWorkerMetadata, TransferSample
from kvtier.connector.metrics import SchedulerCounters, SearchMeter, TransferMeter
from kvtier.connector.request_state import SearchState

LOAD = TransferSample(is_load=True, num_bytes=5_000, time_s=1.0)
STORES = (
    TransferSample(is_load=False, num_bytes=10, time_s=0.5),
    TransferSample(is_load=False, num_bytes=20, time_s=0.25),
)


def test_copies_are_counted_by_direction_with_size_and_time() -> None:
    meter = TransferMeter()
    meter.add([*STORES, LOAD])

    assert meter.stats() == {
        "connector.load_bytes": 5_000,
        "connector.load_time_s": 1.0,
        "connector.store_bytes": 30,
        "connector.store_time_s": 0.75,
    }
    assert meter.histograms()["connector.store_size_bytes"].count == 2
    assert meter.histograms()["connector.load_duration_s"].sum == 1.0


def test_the_copies_of_all_workers_are_in_the_sum_of_their_reports() -> None:
    first, second = OffloadingWorkerMetadata(transfers=(LOAD,)), OffloadingWorkerMetadata(transfers=STORES)

    assert first.aggregate(second).transfers == (LOAD, *STORES)
    assert first.transfers == (LOAD,)


def test_a_wait_lasts_from_the_first_search_that_is_not_final_to_the_one_that_is() -> None:
    meter, search = SearchMeter(), SearchState()
    meter.on_search(search, 10.0, 10.001, is_final=False)
    meter.on_search(search, 11.0, 11.001, is_final=False)
    meter.on_search(search, 12.0, 12.5, is_final=True)
    meter.on_search(search, 13.0, 13.001, is_final=True)

    waits = meter.histograms()["connector.wait_s"]
    assert (waits.count, waits.sum) == (1, 2.5)
    assert meter.histograms()["connector.search_s"].count == 4


def test_a_request_that_ends_while_it_waits_has_waited_until_then() -> None:
    meter, search = SearchMeter(), SearchState()
    meter.on_search(search, 10.0, 10.001, is_final=False)
    meter.on_wait_ended(search, 14.0)
    meter.on_wait_ended(search, 15.0)

    waits = meter.histograms()["connector.wait_s"]
    assert (waits.count, waits.sum) == (1, 4.0)


def test_a_request_that_never_waits_is_not_counted() -> None:
    meter, search = SearchMeter(), SearchState()
    meter.on_search(search, 10.0, 10.001, is_final=True)
    meter.on_wait_ended(search, 11.0)

    assert meter.histograms()["connector.wait_s"].count == 0


def test_counters_are_read_by_dotted_name() -> None:
    assert SchedulerCounters(load_jobs=3).stats()["connector.load_jobs"] == 3.0
