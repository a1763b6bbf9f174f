"""kvtier's numbers on vLLM's metrics page and in its log, moved between processes as vLLM moves them."""

import pickle
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import msgspec
import prometheus_client
from prometheus_client import Counter, Gauge, Histogram
from tests.engines.vllm.configs import with_kvtier
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm, KVConnectorStats

from kvtier.base import TransferType
from kvtier.connector.metrics import OffloadingConnectorStats
from kvtier.engines.vllm import KVTierConnector
from kvtier.engines.vllm.metrics import COUNTERS_INTERVAL_S, KVTierPromMetrics, KVTierStats, StatsClock
from kvtier.testing.clock import ManualClock

STORE, LOAD = TransferType("GPU", "CPU"), TransferType("CPU", "GPU")


def transfers(*operations: tuple[int, float, TransferType]) -> KVTierStats:
    """Return what a worker reports of some copies: bytes, seconds and direction of each."""
    stats = OffloadingConnectorStats()
    for num_bytes, time_s, kind in operations:
        stats.record_transfer(num_bytes, time_s, kind)
    return KVTierStats.of_transfers(stats)


def payload(stats: KVConnectorStats) -> dict[str, Any]:  # Any: what vLLM sends
    """Return what vLLM puts into a message: from 0.30 it asks for it, before it took the field."""
    as_dict = getattr(stats, "to_dict", None)
    data: dict[str, Any] = stats.data if as_dict is None else as_dict()  # Any: what vLLM sends
    return data


@pytest.fixture
def page(vllm_config: VllmConfig) -> Iterator["Page"]:
    """Return a metrics page with kvtier's families, taken off the process's registry afterwards."""
    before = set(prometheus_client.REGISTRY._collector_to_names)
    yield Page(with_kvtier(vllm_config))
    for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
        prometheus_client.REGISTRY.unregister(collector)


class Page:
    """vLLM's metrics page for two engines."""

    def __init__(self, config: VllmConfig) -> None:
        self.model = f"model-{uuid.uuid4()}"
        labels: dict[int, list[object]] = {engine: [self.model, str(engine)] for engine in (0, 1)}
        self.exporter = KVConnectorProm(config, ["model_name", "engine"], labels)

    def value(self, family: str, engine: int = 0, **labels: str) -> float | None:
        """Return one sample."""
        common = {"model_name": self.model, "engine": str(engine)}
        found: float | None = prometheus_client.REGISTRY.get_sample_value(family, common | labels)
        return found


def test_copies_are_counted_by_direction(page: Page) -> None:
    page.exporter.observe(payload(transfers((100, 0.5, STORE), (50, 0.25, STORE), (8, 0.125, LOAD))))
    page.exporter.observe(payload(transfers((1, 0.5, STORE))))

    assert page.value("vllm:kvtier_transfer_bytes_total", direction="GPU_to_CPU") == 151
    assert page.value("vllm:kvtier_transfers_total", direction="GPU_to_CPU") == 3
    assert page.value("vllm:kvtier_transfer_seconds_total", direction="GPU_to_CPU") == 1.25
    assert page.value("vllm:kvtier_transfer_bytes_total", direction="CPU_to_GPU") == 8


def test_levels_are_shown_by_name_with_their_latest_value(page: Page) -> None:
    page.exporter.observe(payload(KVTierStats.of_counters({"connector.load_jobs": 3, "fs.used_bytes": 10})))
    page.exporter.observe(payload(KVTierStats.of_counters({"connector.load_jobs": 5})))

    assert page.value("vllm:kvtier_stat", name="connector.load_jobs") == 5
    assert page.value("vllm:kvtier_stat", name="fs.used_bytes") == 10


def test_engines_are_counted_apart(page: Page) -> None:
    page.exporter.observe(payload(transfers((100, 0.5, STORE))), engine_idx=1)

    assert page.value("vllm:kvtier_transfer_bytes_total", engine=1, direction="GPU_to_CPU") == 100
    assert page.value("vllm:kvtier_transfer_bytes_total", engine=0, direction="GPU_to_CPU") is None


def test_vllm_builds_the_families_itself(page: Page) -> None:
    assert isinstance(page.exporter.prom_metrics, KVTierPromMetrics)


def worker_and_scheduler() -> list[KVTierStats]:
    """Return what two workers and the scheduler report of one step."""
    return [
        transfers((100, 0.5, STORE), (8, 0.25, LOAD)),
        transfers((1, 0.25, STORE)),
        KVTierStats.of_counters({"connector.load_jobs": 3}),
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_reports_of_workers_and_scheduler_add_up_in_any_order(order: tuple[int, ...]) -> None:
    reports = worker_and_scheduler()

    total = reports[order[0]]
    for index in order[1:]:
        total = total.aggregate(reports[index])

    assert total.counters == {"connector.load_jobs": 3}
    assert sorted(operation["op_size"] for operation in total.transfers.data["GPU_to_CPU"]) == [1, 100]
    assert total.reduce()["GPU_to_CPU_total_bytes"] == 101
    assert total.reduce()["CPU_to_GPU_total_time"] == 0.25


def test_adding_up_does_not_change_what_was_added() -> None:
    first, second, _ = worker_and_scheduler()

    first.aggregate(second)
    first.aggregate(second)

    assert second.reduce() == {"GPU_to_CPU_total_bytes": 1, "GPU_to_CPU_total_time": 0.25}


def test_a_report_survives_the_way_to_another_process() -> None:
    first, _, counters = worker_and_scheduler()
    total = first.aggregate(counters)

    pickled = pickle.loads(pickle.dumps(total))  # noqa: S301 - our own, as vLLM moves it between its processes
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(payload(total)))
    rebuilt = KVTierConnector.build_kv_connector_stats(packed)

    for received in (pickled, rebuilt):
        assert received.counters == {"connector.load_jobs": 3}
        assert received.reduce() == total.reduce()
        assert not received.is_empty()


@pytest.mark.parametrize("data", [None, {}, {"transfers": {}, "counters": {}}])
def test_a_report_of_nothing_is_empty(data: Mapping[str, Any] | None) -> None:  # Any: what vLLM sends
    stats = KVTierConnector.build_kv_connector_stats(None if data is None else dict(data))

    assert stats.is_empty()
    assert stats.reduce() == {}


def test_reset_forgets_everything() -> None:
    stats = transfers((100, 0.5, STORE))

    stats.reset()

    assert stats.is_empty()


def test_the_schedulers_counters_are_gathered_once_an_interval() -> None:
    clock = ManualClock()
    due = StatsClock(clock)

    answers = [due.is_due(), due.is_due()]
    clock.advance(COUNTERS_INTERVAL_S)
    answers += [due.is_due(), due.is_due()]

    assert answers == [True, False, True, False]


def test_the_families_can_be_of_any_metric_class(vllm_config: VllmConfig) -> None:
    class Recorder:
        """Takes the place of a metric class, as vLLM's own for Ray do."""

        made: ClassVar[list[str]] = []

        def __init__(
            self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str = ""
        ) -> None:
            self.made.append(name)

    KVTierConnector.build_prom_metrics(
        with_kvtier(vllm_config),
        {Counter: Recorder, Gauge: Recorder, Histogram: Recorder},
        ["engine"],
        {0: ["0"]},
    )

    assert len(Recorder.made) == 4
    assert all(name.startswith("vllm:kvtier_") for name in Recorder.made)
