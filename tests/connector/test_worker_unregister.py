"""The worker half while its KV cache is taken away and brought back: nothing lost, nothing wrong, no crash."""

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.connector.fakes import FakeHandler, FakeSpec
from tests.connector.fakes import make_config as make_fake_config

from kvtier.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    HandlerEntry,
    TransferJobId,
    TransferSpec,
    TransferType,
)
from kvtier.config import KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.common import OffloadingConnectorMetadata, OffloadingWorkerMetadata, TransferJob
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import EngineStateError

PAGE_BYTES = 1 << 20
NUM_DEVICE_BLOCKS = NUM_SLOTS = 8
STORE, LOAD, LATER = TransferJobId(1), TransferJobId(2), TransferJobId(3)


def make_caches(memory: np.ndarray[tuple[int, int], np.dtype[np.int8]]) -> CanonicalKVCaches:
    """Return a cache of one layer in ``memory``."""
    tensors = [CanonicalKVCacheTensor(torch.from_numpy(memory), PAGE_BYTES)]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, PAGE_BYTES)]])


def make_memory(first_value: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.int8]]:
    """Return device blocks of which each is full of a value of its own, or of zeros."""
    values = np.arange(NUM_DEVICE_BLOCKS, dtype=np.int8)[:, None] + first_value
    return np.repeat(values if first_value else values * 0, PAGE_BYTES, axis=1)


def storing(job_id: TransferJobId, block: int, slot: int) -> OffloadingConnectorMetadata:
    """Return a step that stores one block."""
    spec = TransferSpec(GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([slot]))
    return OffloadingConnectorMetadata({}, {job_id: TransferJob("stored", spec)})


def loading(job_id: TransferJobId, block: int, slot: int) -> OffloadingConnectorMetadata:
    """Return a step that loads one block."""
    spec = TransferSpec(CPULoadStoreSpec([slot]), GPULoadStoreSpec([block], [1], [0]))
    return OffloadingConnectorMetadata({job_id: TransferJob("loaded", spec)}, {})


def step(half: OffloadingConnectorWorker, metadata: OffloadingConnectorMetadata | None = None) -> set[str]:
    """Do what an engine does in a step; return the requests whose load ended."""
    metadata = metadata or OffloadingConnectorMetadata({}, {})
    half.handle_preemptions(metadata)
    half.start_kv_transfers(metadata)
    half.prepare_store_kv(metadata)
    _, ended = half.get_finished(set())
    return ended


def load(half: OffloadingConnectorWorker, job_id: TransferJobId, block: int, slot: int) -> None:
    """Load one block and take the report of it."""
    half.start_kv_transfers(loading(job_id, block, slot))
    half.worker.wait({job_id})
    assert half.get_finished(set()) == (set(), {"loaded"})


@pytest.fixture
def half() -> Iterator[OffloadingConnectorWorker]:
    """A worker half with rows of its own, and no KV cache yet."""
    group = KVGroup(16, ("layer",), PAGE_BYTES)
    extra = {"cpu_bytes_to_use": NUM_SLOTS * PAGE_BYTES}
    spec = CPUOffloadingSpec(
        OffloadingConfig("engine", ModelIdentity("m"), (group,), 16, rank=0, extra_config=extra)
    )
    yield OffloadingConnectorWorker(spec)
    spec.shutdown()


def test_what_was_stored_or_about_to_be_is_loaded_into_the_cache_that_came_back(
    half: OffloadingConnectorWorker,
) -> None:
    before, after = make_memory(first_value=10), make_memory()
    half.register_kv_caches(make_caches(before))
    step(half, storing(STORE, block=3, slot=0))
    step(half, storing(LATER, block=4, slot=1))

    half.unregister_kv_caches()
    before[:] = 0
    half.register_kv_caches(make_caches(after))

    assert half.build_connector_worker_meta() == OffloadingWorkerMetadata({STORE: 1, LATER: 1})
    for block, slot in [(6, 0), (7, 1)]:
        load(half, LOAD, block, slot)
        assert half.take_failed_loads() == {}
    assert after[:, 0].tolist() == [0] * 6 + [13, 14]
    assert after[:, -1].tolist() == [0] * 6 + [13, 14]


@pytest.mark.slow
def test_nothing_leads_to_a_cache_that_was_taken_away(half: OffloadingConnectorWorker) -> None:
    memory = make_memory()
    half.register_kv_caches(make_caches(memory))
    step(half, storing(STORE, block=3, slot=0))
    step(half, loading(LOAD, block=4, slot=1))
    found = weakref.ref(memory)
    del memory
    gc.collect()
    assert found() is not None

    half.unregister_kv_caches()
    gc.collect()

    assert found() is None


def test_what_is_submitted_while_there_is_no_cache_fails_and_later_transfers_do_not(
    half: OffloadingConnectorWorker,
) -> None:
    half.register_kv_caches(make_caches(make_memory()))
    half.unregister_kv_caches()

    step(half, storing(STORE, block=3, slot=0))
    ended = step(half, loading(LOAD, block=4, slot=0))

    assert ended == {"loaded"}
    assert half.take_failed_loads() == {"loaded": [4]}
    failed = frozenset({STORE, LOAD})
    assert half.build_connector_worker_meta() == OffloadingWorkerMetadata({STORE: 1, LOAD: 1}, failed)
    half.register_kv_caches(make_caches(make_memory()))
    load(half, LATER, block=4, slot=0)
    assert half.build_connector_worker_meta() == OffloadingWorkerMetadata({LATER: 1})


def test_a_cache_may_be_taken_away_before_it_came_and_more_than_once(half: OffloadingConnectorWorker) -> None:
    half.unregister_kv_caches()
    for _ in range(2):
        half.register_kv_caches(make_caches(make_memory()))
        half.unregister_kv_caches()
        half.unregister_kv_caches()

    assert step(half, loading(LOAD, block=4, slot=0)) == {"loaded"}
    assert half.take_failed_loads() == {"loaded": [4]}


class DetachableFakeSpec(FakeSpec):
    """A spec whose handlers end jobs when told to, and which has no tensors to let go of."""

    def detach_kv_caches(self) -> None:
        pass


class Bench:
    """A worker half and its handlers."""

    def __init__(self, spec_class: type[FakeSpec]) -> None:
        self.loads = FakeHandler(TransferType("CPU", "GPU"))
        self.stores = FakeHandler(TransferType("GPU", "CPU"))
        entries = [
            HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, self.loads),
            HandlerEntry(GPULoadStoreSpec, CPULoadStoreSpec, self.stores),
        ]
        self.half = OffloadingConnectorWorker(spec_class(make_fake_config(), entries=entries))
        self.half.register_kv_caches(CanonicalKVCaches([], []))


def test_stores_under_way_are_ended_measured_and_reported_as_they_ended() -> None:
    bench = Bench(DetachableFakeSpec)
    bench.stores.failing.add(LATER)
    step(bench.half, storing(STORE, block=3, slot=0))
    step(bench.half, storing(LATER, block=4, slot=1))

    bench.half.unregister_kv_caches()

    assert step(bench.half) == set()
    report = bench.half.build_connector_worker_meta()
    assert report is not None
    assert (report.completed_jobs, report.failed_jobs) == ({STORE: 1, LATER: 1}, frozenset({LATER}))
    assert [copied.is_load for copied in report.transfers] == [False]
    step(bench.half)
    assert bench.half.build_connector_worker_meta() is None


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_load_that_was_not_reported_yet_fails_because_its_bytes_went_with_the_cache(
    has_ended: bool,
) -> None:
    bench = Bench(DetachableFakeSpec)
    step(bench.half, loading(LOAD, block=4, slot=0))
    if has_ended:
        bench.loads.end(LOAD)

    bench.half.unregister_kv_caches()

    assert bench.loads.begun == []
    assert step(bench.half) == {"loaded"}
    assert bench.half.take_failed_loads() == {"loaded": [4]}
    assert bench.half.build_connector_worker_meta() == OffloadingWorkerMetadata({LOAD: 1}, frozenset({LOAD}))
    assert step(bench.half) == set()


def test_a_load_that_was_declined_before_is_reported_once() -> None:
    bench = Bench(DetachableFakeSpec)
    bench.loads.is_declining = True
    bench.half.start_kv_transfers(loading(LOAD, block=4, slot=0))

    bench.half.unregister_kv_caches()

    assert step(bench.half) == {"loaded"}
    assert bench.half.build_connector_worker_meta() == OffloadingWorkerMetadata({LOAD: 1}, frozenset({LOAD}))


def test_a_spec_that_cannot_let_go_refuses_and_goes_on_as_before() -> None:
    bench = Bench(FakeSpec)
    step(bench.half, storing(STORE, block=3, slot=0))

    with pytest.raises(EngineStateError, match=r"FakeSpec cannot let go.*detach_kv_caches"):
        bench.half.unregister_kv_caches()

    assert bench.stores.begun == []
    step(bench.half)
    assert bench.stores.begun == [STORE]
