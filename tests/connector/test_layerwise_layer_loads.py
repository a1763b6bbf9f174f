"""The worker half computes with a load, layer by layer, and trusts nothing that a failed one may have touched."""

import pytest
from tests.connector.fakes import FakeHandler, FakeSpec, make_config

from kvtier.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    HandlerEntry,
    LayerwiseHandler,
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
)
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.common import CPULoadStoreSpec

LOAD, STORE, OTHER_LOAD = TransferJobId(1), TransferJobId(2), TransferJobId(3)
DEVICE_BLOCKS = [3, 4]
LAYERS = ("a", "b", "c")
CACHES = CanonicalKVCaches([], [], dict(zip(LAYERS, range(3), strict=True)))


class FakeLayerHandler(FakeHandler, LayerwiseHandler):
    """Loads by layer; a job ends when it is waited for as a whole, or told to."""

    def __init__(self, num_refs: int = 3) -> None:
        super().__init__(TransferType("CPU", "GPU"))
        self._num_refs = num_refs
        self.by_ref: list[TransferJobId] = []
        self.waits: list[tuple[set[TransferJobId], int]] = []
        self.broken_ref: int | None = None

    def num_refs(self) -> int:
        return self._num_refs

    def transfer_by_ref(self, job_id: TransferJobId, spec: TransferSpec) -> bool:
        is_known = isinstance(spec.source, CPULoadStoreSpec)
        if is_known and not self.is_declining:
            self.begun.append(job_id)
            self.by_ref.append(job_id)
        return is_known and not self.is_declining

    def wait_for_ref(self, job_ids: set[TransferJobId], ref_idx: int) -> bool:
        self.waits.append((set(job_ids), ref_idx))
        return self.broken_ref is None or ref_idx < self.broken_ref


class Bench:
    """A worker half that may load by layer."""

    def __init__(
        self, caches: CanonicalKVCaches = CACHES, num_refs: int = 3, *, is_wanted: bool = True
    ) -> None:
        self.loads = FakeLayerHandler(num_refs)
        self.stores = FakeHandler(TransferType("GPU", "CPU"))
        entries = [
            HandlerEntry(CPULoadStoreSpec, GPULoadStoreSpec, self.loads),
            HandlerEntry(GPULoadStoreSpec, CPULoadStoreSpec, self.stores),
        ]
        config = make_config(layerwise_load=is_wanted)
        self.half = OffloadingConnectorWorker(FakeSpec(config, entries=entries), lambda _: None)
        self.half.register_kv_caches(caches)
        self.first_report = self.half.build_connector_worker_meta()

    def begin(self, *, source: LoadStoreSpec | None = None, is_layerwise: bool = True) -> None:
        """Begin a step that loads for one request and stores for it and another one."""
        spec = TransferSpec(source or CPULoadStoreSpec([0, 1]), GPULoadStoreSpec(DEVICE_BLOCKS, [2], [0]))
        store = TransferSpec(GPULoadStoreSpec([7], [1], [0]), CPULoadStoreSpec([5]))
        load_jobs = {LOAD: TransferJob("r", spec, is_layerwise), OTHER_LOAD: TransferJob("q", spec)}
        self.metadata = OffloadingConnectorMetadata(load_jobs, {STORE: TransferJob("r", store)})
        self.half.handle_preemptions(self.metadata)
        self.half.start_kv_transfers(self.metadata)

    def compute(self, *layers: str) -> list[bool]:
        """Wait for layers as a forward pass does."""
        return [self.half.wait_for_layer(layer) for layer in layers]

    def end(self, *, is_computed: bool = True) -> tuple[set[str], OffloadingWorkerMetadata | None]:
        """End the step; return the requests whose load ended, and the report."""
        if is_computed:
            self.half.prepare_store_kv(self.metadata)
        _, received = self.half.get_finished(set())
        return received, self.half.build_connector_worker_meta()


def test_each_layer_is_waited_for_and_the_load_ends_with_the_step_unknown_to_the_engine() -> None:
    bench = Bench()
    bench.begin()

    answers = bench.compute(*LAYERS)
    received, report = bench.end()

    assert bench.first_report == OffloadingWorkerMetadata(layerwise_workers=1)
    assert bench.loads.by_ref == [LOAD]
    assert (answers, bench.loads.waits) == ([True] * 3, [({LOAD}, 0), ({LOAD}, 1), ({LOAD}, 2)])
    # The other load is under way: its request waits as ever.
    assert bench.loads.begun == [OTHER_LOAD]
    assert (received, report) == (set(), OffloadingWorkerMetadata({LOAD: 1}))
    assert bench.half.take_failed_loads() == {}


def test_a_step_without_such_a_load_waits_for_nothing() -> None:
    bench = Bench()
    bench.begin(is_layerwise=False)

    assert bench.compute(*LAYERS, "unknown") == [True] * 4
    bench.loads.end(LOAD, OTHER_LOAD)

    assert bench.loads.waits == []
    assert bench.end() == ({"r", "q"}, OffloadingWorkerMetadata({LOAD: 1, OTHER_LOAD: 1}))


def test_a_layer_without_a_ref_waits_for_all_of_them() -> None:
    bench = Bench()
    bench.begin()

    bench.compute("borrows the cache of another")

    assert bench.loads.waits == [({LOAD}, 2)]


@pytest.mark.parametrize("failure", ["a layer", "at the end", "declined", "lost", "a hook"])
def test_nothing_computed_with_a_failed_load_is_stored_and_its_blocks_are_told(failure: str) -> None:
    bench = Bench()
    bench.loads.broken_ref = 1 if failure == "a layer" else None
    bench.loads.is_declining = failure == "declined"
    if failure in ("a layer", "at the end"):
        bench.loads.failing.add(LOAD)
    bench.begin(source=LostLoadStoreSpec() if failure == "lost" else None)

    bench.compute(*(LAYERS if failure != "a hook" else ("a", "c")))
    received, report = bench.end()

    assert "r" not in received
    assert report is not None
    assert report.completed_jobs[LOAD] == report.completed_jobs[STORE] == 1
    assert report.failed_jobs >= {LOAD, STORE}
    assert bench.half.take_failed_loads()["r"] == DEVICE_BLOCKS
    assert report.layerwise_workers == (-1 if failure == "a hook" else 0)
    bench.half.handle_preemptions(OffloadingConnectorMetadata({}, {}))
    assert bench.stores.begun == []


def test_the_step_after_a_failed_one_is_trusted_again() -> None:
    bench = Bench()
    bench.loads.failing.add(LOAD)
    bench.begin()
    bench.compute(*LAYERS)
    bench.end()
    bench.loads.failing.clear()
    bench.loads.begun.clear()

    bench.begin()
    assert bench.compute(*LAYERS) == [True] * 3

    received, report = bench.end()
    assert (received, report) == (set(), OffloadingWorkerMetadata({LOAD: 1}))
    bench.half.handle_preemptions(OffloadingConnectorMetadata({}, {}))
    assert bench.stores.begun == [STORE]


def test_a_step_that_is_given_up_ends_its_load_and_blames_no_hook() -> None:
    bench = Bench()
    bench.begin()
    bench.compute("a")

    received, report = bench.end(is_computed=False)

    assert bench.loads.begun == [OTHER_LOAD]
    assert (received, report) == (set(), OffloadingWorkerMetadata({LOAD: 1}))


def test_without_hooks_loads_are_whole_before_anything_is_computed() -> None:
    bench = Bench()
    bench.begin()
    bench.end()
    bench.loads.begun.clear()

    bench.begin()
    was_whole = LOAD not in bench.loads.begun
    received, report = bench.end()

    assert was_whole
    assert bench.loads.by_ref == [LOAD]
    assert (received, report) == (set(), OffloadingWorkerMetadata({LOAD: 1}))


@pytest.mark.parametrize(
    ("num_refs", "refs", "is_wanted"),
    [
        (3, {"a": 0, "b": 1, "c": 2}, False),
        (1, {"a": 0, "b": 0, "c": 0}, True),
        (3, {"a": 0, "b": 1}, True),
        (3, {}, True),
        (0, {"a": 0, "b": 1}, True),
    ],
)
def test_what_cannot_be_told_by_layer_is_not_offered_and_whoever_asked_for_it_is_told(
    num_refs: int, refs: dict[str, int], caplog: pytest.LogCaptureFixture, *, is_wanted: bool
) -> None:
    bench = Bench(CanonicalKVCaches([], [], refs), num_refs, is_wanted=is_wanted)

    assert bench.first_report is None
    assert ("loads nothing by layer" in caplog.text) == is_wanted


def test_two_layers_in_one_ref_wait_for_the_same_bytes() -> None:
    bench = Bench(CanonicalKVCaches([], [], {"a": 0, "b": 0, "c": 1}), 2)
    bench.begin()

    bench.compute(*LAYERS)

    assert [ref for _, ref in bench.loads.waits] == [0, 0, 1]
    assert bench.end()[1] == OffloadingWorkerMetadata({LOAD: 1})
