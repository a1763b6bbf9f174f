"""The worker half: when transfers begin, and that each one is reported once."""

from collections.abc import Collection

import pytest
from tests.connector.fakes import FakeHandler, FakeJoiningHandler, FakeRegionSpec, FakeSpec, make_config

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    HandlerEntry,
    LoadStoreSpec,
    TransferJobId,
    TransferSpec,
    TransferType,
)
from kvtier.connector.common import (
    LostLoadStoreSpec,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
    TransferSample,
)
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec

NO_CACHES = CanonicalKVCaches([], [])
LOAD, STORE = TransferJobId(1), TransferJobId(2)
DEVICE_BLOCKS = [3, 4]


def device() -> GPULoadStoreSpec:
    """Return two device blocks."""
    return GPULoadStoreSpec(DEVICE_BLOCKS, [2], [0])


def load_step(
    job_id: TransferJobId = LOAD,
    req_id: str = "r",
    source: LoadStoreSpec | None = None,
    *,
    is_idle: bool = False,
) -> OffloadingConnectorMetadata:
    """Return a step that loads."""
    spec = TransferSpec(source or CPULoadStoreSpec([0, 1]), device())
    return OffloadingConnectorMetadata({job_id: TransferJob(req_id, spec)}, {}, is_idle=is_idle)


def store_step(job_id: TransferJobId = STORE) -> OffloadingConnectorMetadata:
    """Return a step that stores."""
    spec = TransferSpec(device(), CPULoadStoreSpec([0, 1]))
    return OffloadingConnectorMetadata({}, {job_id: TransferJob("r", spec)})


def empty_step(
    flush: Collection[TransferJobId] = (), fail: Collection[TransferJobId] = (), *, is_idle: bool = False
) -> OffloadingConnectorMetadata:
    """Return a step without transfers."""
    return OffloadingConnectorMetadata({}, {}, set(flush) or None, set(fail) or None, is_idle)


class Bench:
    """A worker half whose handlers end jobs when told to, and its loads while it pauses."""

    def __init__(self, *, is_declining: bool = False, is_joining: bool = False) -> None:
        self.pauses_s: list[float] = []
        self.loads = FakeHandler(TransferType("CPU", "GPU"), is_declining=is_declining)
        self.stores = FakeHandler(TransferType("GPU", "CPU"), is_declining=is_declining)
        if is_joining:
            self.loads = FakeJoiningHandler(TransferType("CPU", "GPU"))
            self.stores = FakeJoiningHandler(TransferType("GPU", "CPU"))
        entries = [
            HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, self.loads),
            HandlerEntry(GPULoadStoreSpec, CPULoadStoreSpec, self.stores),
        ]
        self.half = OffloadingConnectorWorker(FakeSpec(make_config(), entries=entries), self.pause)
        self.half.register_kv_caches(NO_CACHES)

    def pause(self, seconds: float) -> None:
        """Let the thread that copies run."""
        self.pauses_s.append(seconds)
        self.loads.end(*self.loads.begun)

    def step(self, metadata: OffloadingConnectorMetadata) -> tuple[set[str], OffloadingWorkerMetadata | None]:
        """Do one step; return the requests whose load ended, and the report."""
        self.half.handle_preemptions(metadata)
        self.half.start_kv_transfers(metadata)
        self.half.prepare_store_kv(metadata)
        sent, received = self.half.get_finished(set())
        assert sent == set()
        return received, self.half.build_connector_worker_meta()


def test_a_store_begins_in_the_step_after_the_one_that_computed_it() -> None:
    bench = Bench()

    bench.step(store_step())
    assert bench.stores.begun == []
    bench.step(empty_step())
    assert bench.stores.begun == [STORE]


def test_a_store_is_reported_once_and_names_no_request() -> None:
    bench = Bench()
    bench.step(store_step())
    bench.step(empty_step())
    bench.stores.end(STORE)

    received, report = bench.step(empty_step())

    assert received == set()
    assert report == OffloadingWorkerMetadata({STORE: 1})
    assert bench.step(empty_step()) == (set(), None)


def test_a_store_to_flush_has_ended_before_anything_is_written_even_if_it_had_not_begun() -> None:
    bench = Bench()
    bench.step(store_step())

    bench.half.handle_preemptions(empty_step(flush=[STORE]))

    assert bench.stores.begun == []
    assert bench.step(empty_step()) == (set(), OffloadingWorkerMetadata({STORE: 1}))


def test_a_load_into_a_flushed_block_begins_after_the_flush_though_only_transfers_are_started() -> None:
    bench = Bench()
    bench.half.prepare_store_kv(store_step())
    loading = load_step()

    bench.half.start_kv_transfers(OffloadingConnectorMetadata(loading.load_jobs, {}, jobs_to_flush={STORE}))

    assert (bench.stores.begun, bench.loads.begun) == ([], [LOAD])


def test_a_load_begins_at_once_and_is_reported_once() -> None:
    bench = Bench()
    assert bench.step(load_step()) == (set(), None)
    assert bench.loads.begun == [LOAD]
    bench.loads.end(LOAD)

    assert bench.step(empty_step()) == ({"r"}, OffloadingWorkerMetadata({LOAD: 1}))
    assert bench.half.take_failed_loads() == {}
    assert bench.step(empty_step()) == (set(), None)


def test_an_idle_step_lets_the_copies_run_before_it_looks_for_loads_that_ended() -> None:
    bench = Bench()

    assert bench.step(load_step(is_idle=True)) == ({"r"}, OffloadingWorkerMetadata({LOAD: 1}))


def test_a_step_that_computes_does_not_pause() -> None:
    bench = Bench()
    bench.step(load_step())
    bench.step(empty_step())

    assert bench.pauses_s == []


def test_an_idle_step_pauses_once() -> None:
    bench = Bench()
    bench.step(load_step())
    bench.loads.begun.clear()
    bench.step(empty_step(is_idle=True))
    bench.half.get_finished(set())

    assert len(bench.pauses_s) == 1


def test_loads_that_were_waited_for_are_reported_in_the_next_step() -> None:
    bench = Bench()
    bench.step(load_step())

    bench.half.wait_for_loads()

    assert bench.step(empty_step())[0] == {"r"}


def test_who_waits_for_loads_waits_for_no_store() -> None:
    bench = Bench()
    bench.step(store_step())
    bench.step(empty_step())

    bench.half.wait_for_loads()

    assert bench.step(empty_step()) == (set(), None)


def test_a_load_of_a_request_that_was_aborted_is_reported_all_the_same() -> None:
    bench = Bench()
    bench.step(load_step())
    bench.loads.end(LOAD)

    assert bench.half.get_finished({"r"}) == (set(), {"r"})


def test_a_failed_load_names_its_device_blocks_in_the_same_answer_only() -> None:
    bench = Bench()
    bench.loads.failing.add(LOAD)
    bench.step(load_step())
    bench.loads.end(LOAD)

    received, report = bench.step(empty_step())

    assert received == {"r"}
    assert bench.half.take_failed_loads() == {"r": DEVICE_BLOCKS}
    assert report == OffloadingWorkerMetadata({LOAD: 1}, frozenset({LOAD}))
    assert bench.half.take_failed_loads() == {}


def test_failed_loads_that_nobody_took_do_not_show_up_later() -> None:
    bench = Bench(is_declining=True)
    bench.step(load_step())
    bench.step(empty_step())

    assert bench.half.take_failed_loads() == {}


def test_a_declined_load_is_a_failed_one() -> None:
    bench = Bench(is_declining=True)

    received, report = bench.step(load_step())

    assert received == {"r"}
    assert report == OffloadingWorkerMetadata({LOAD: 1}, frozenset({LOAD}))
    assert bench.half.take_failed_loads() == {"r": DEVICE_BLOCKS}


def test_a_declined_store_is_a_failed_one() -> None:
    bench = Bench(is_declining=True)
    bench.step(store_step())

    assert bench.step(empty_step()) == (set(), OffloadingWorkerMetadata({STORE: 1}, frozenset({STORE})))


def test_a_lost_load_fails_without_reaching_a_handler() -> None:
    bench = Bench()

    received, report = bench.step(load_step(source=LostLoadStoreSpec()))

    assert (received, bench.loads.begun) == ({"r"}, [])
    assert report == OffloadingWorkerMetadata({LOAD: 1}, frozenset({LOAD}))


def test_a_load_that_became_void_is_reported_as_failed_when_its_bytes_have_come() -> None:
    bench = Bench()
    bench.step(load_step())
    assert bench.step(empty_step(fail=[LOAD])) == (set(), None)
    bench.loads.end(LOAD)

    received, report = bench.step(empty_step())

    assert received == {"r"}
    assert report == OffloadingWorkerMetadata({LOAD: 1}, frozenset({LOAD}))
    assert bench.half.take_failed_loads() == {"r": DEVICE_BLOCKS}


def test_a_load_that_ended_before_it_became_void_leaves_no_trace() -> None:
    bench = Bench()
    bench.step(load_step())
    bench.loads.end(LOAD)
    bench.half.get_finished(set())
    bench.step(empty_step(fail=[LOAD]))

    bench.step(load_step(LOAD, "again"))
    bench.loads.end(LOAD)

    assert bench.half.get_finished(set()) == (set(), {"again"})
    assert bench.half.take_failed_loads() == {}


def test_the_first_report_carries_the_region_and_later_ones_do_not() -> None:
    half = OffloadingConnectorWorker(FakeRegionSpec(make_config()))
    half.register_kv_caches(NO_CACHES)

    assert half.build_connector_worker_meta() == OffloadingWorkerMetadata(region_identities=((1, 2),))
    assert half.build_connector_worker_meta() is None


def test_a_job_that_was_never_begun_here_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.loads.begun.append(TransferJobId(99))
    bench.loads.end(TransferJobId(99))

    assert bench.step(empty_step()) == (set(), None)
    assert "99" in caplog.text


def test_copies_are_reported_that_succeeded_and_said_what_they_moved() -> None:
    bench = Bench()
    other = TransferJobId(3)
    bench.loads.failing.add(other)
    bench.step(load_step())
    bench.step(load_step(other))
    bench.loads.end(LOAD, other)

    _, report = bench.step(empty_step())

    assert report is not None
    assert report.completed_jobs == {LOAD: 1, other: 1}
    assert report.transfers == (TransferSample(is_load=True, num_bytes=64, time_s=0.5),)


def test_shutdown_drops_deferred_stores_and_may_be_repeated() -> None:
    bench = Bench()
    bench.step(store_step())

    bench.half.shutdown()
    bench.half.shutdown()

    bench.step(empty_step())
    assert bench.stores.begun == []


def many_requests(*, source: LoadStoreSpec | None = None) -> OffloadingConnectorMetadata:
    """Return a step with a load of each of the requests r0 to r3, r1's from ``source``, and four stores."""
    rows = CPULoadStoreSpec([0, 1])
    sources: list[LoadStoreSpec] = [rows, source or rows, rows, rows]
    loads = {
        TransferJobId(number): TransferJob(f"r{number}", TransferSpec(own, device()))
        for number, own in enumerate(sources)
    }
    stores = {
        TransferJobId(number): TransferJob("s", TransferSpec(device(), rows)) for number in range(10, 14)
    }
    return OffloadingConnectorMetadata(loads, stores)


def test_the_transfers_of_many_requests_begin_with_one_call_and_each_ends_by_itself() -> None:
    bench = Bench(is_joining=True)
    loads, stores = bench.loads, bench.stores
    assert isinstance(loads, FakeJoiningHandler)
    assert isinstance(stores, FakeJoiningHandler)
    loads.refused, stores.refused = {TransferJobId(2)}, {TransferJobId(12)}
    loads.failing = {TransferJobId(3)}

    received, report = bench.step(many_requests(source=LostLoadStoreSpec()))

    assert loads.calls == [[0, 2, 3]]
    assert (received, set(bench.half.take_failed_loads())) == ({"r1", "r2"}, {"r1", "r2"})
    assert report == OffloadingWorkerMetadata({TransferJobId(1): 1, TransferJobId(2): 1}, frozenset({1, 2}))  # type: ignore[arg-type]  # ids are numbers
    loads.end(TransferJobId(3))
    received, report = bench.step(empty_step())
    assert stores.calls == [[10, 11, 12, 13]]
    assert (received, bench.half.take_failed_loads()) == ({"r3"}, {"r3": DEVICE_BLOCKS})
    assert report is not None
    assert report.completed_jobs == {3: 1, 12: 1}
    loads.end(TransferJobId(0))
    stores.end(TransferJobId(10), TransferJobId(13))
    received, report = bench.step(empty_step())
    assert (received, bench.half.take_failed_loads()) == ({"r0"}, {})
    assert report is not None
    assert (report.completed_jobs, report.failed_jobs) == ({0: 1, 10: 1, 13: 1}, frozenset())
    bench.step(empty_step(flush=[TransferJobId(11)]))
    assert stores.begun == []
