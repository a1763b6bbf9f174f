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

from kvtier.engines.vllm import KVTierConnector
from kvtier.engines.vllm.metrics import (
    COUNTERS_INTERVAL_S,
    OWN_FAMILIES,
    GrowthMeter,
    KVTierPromMetrics,
    KVTierStats,
    StatsClock,
)
from kvtier.histogram import SIZE_BOUNDS_BYTES
from kvtier.histogram import Histogram as Observed
from kvtier.testing.clock import ManualClock


def sizes(*values: float) -> Observed:
    """Return a histogram of sizes that has observed ``values``."""
    histogram = Observed(SIZE_BOUNDS_BYTES)
    for value in values:
        histogram.observe(value)
    return histogram


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


def test_counters_grow_by_what_the_engine_has_counted_since_the_last_report(page: Page) -> None:
    meter = GrowthMeter()
    for number in (3, 5, 5):
        page.exporter.observe(payload(meter.report({"connector.load_jobs": number}, {})))

    assert page.value("kvtier_load_jobs_total") == 5


def test_a_counter_is_on_the_page_before_it_has_counted_anything(page: Page) -> None:
    page.exporter.observe(payload(GrowthMeter().report({"tier.0.fs.errors": 0}, {})))

    assert page.value("kvtier_tier_errors_total", tier="fs", tier_index="0") == 0


def test_a_counter_that_begins_anew_is_added(page: Page) -> None:
    meter = GrowthMeter()
    for number in (5, 2):
        page.exporter.observe(payload(meter.report({"connector.load_jobs": number}, {})))

    assert page.value("kvtier_load_jobs_total") == 7


def test_gauges_have_their_latest_value(page: Page) -> None:
    meter = GrowthMeter()
    for number in (10, 4):
        page.exporter.observe(payload(meter.report({"primary.held_blocks": number}, {})))

    assert page.value("kvtier_host_held_blocks") == 4


def test_families_that_mean_what_vllms_own_mean_have_its_names(page: Page) -> None:
    numbers = {"connector.load_bytes": 100, "tier.1.fs.loaded_bytes": 7, "primary.pinned_ratio": 0.5}
    page.exporter.observe(payload(GrowthMeter().report(numbers, {})))

    assert page.value("vllm:kv_offload_load_bytes_total") == 100
    assert page.value("vllm:kv_offload_tiering_read_bytes_total", tier="fs", tier_index="1") == 7
    assert page.value("vllm:kv_offload_cpu_cache_usage_perc") == 0.5


def test_a_histogram_has_the_counts_of_the_engines_buckets_and_its_sum(page: Page) -> None:
    meter, histogram = GrowthMeter(), sizes(5e5, 6e5, 3e6)
    for value in (9.5e6, 2e9):
        page.exporter.observe(payload(meter.report({}, {"connector.load_size_bytes": histogram.snapshot()})))
        histogram.observe(value)
    page.exporter.observe(payload(meter.report({}, {"connector.load_size_bytes": histogram.snapshot()})))

    name = "vllm:kv_offload_load_size"
    assert page.value(f"{name}_count") == 5
    assert page.value(f"{name}_sum") == pytest.approx(5e5 + 6e5 + 3e6 + 9.5e6 + 2e9)
    counts = {end: page.value(f"{name}_bucket", le=end) for end in ("1e+06", "5e+06", "1e+07", "+Inf")}
    assert counts == {"1e+06": 2, "5e+06": 3, "1e+07": 4, "+Inf": 5}


def test_engines_are_counted_apart(page: Page) -> None:
    report = GrowthMeter().report({"connector.load_jobs": 100}, {})
    page.exporter.observe(payload(report), engine_idx=1)

    assert page.value("kvtier_load_jobs_total", engine=1) == 100
    assert page.value("kvtier_load_jobs_total", engine=0) is None


def test_vllm_builds_the_families_itself(page: Page) -> None:
    assert isinstance(page.exporter.prom_metrics, KVTierPromMetrics)


def test_a_second_engine_of_a_process_takes_the_place_of_the_first(
    page: Page, vllm_config: VllmConfig
) -> None:
    page.exporter.observe(payload(GrowthMeter().report({"connector.load_jobs": 1}, {})))
    second = Page(with_kvtier(vllm_config))
    second.exporter.observe(payload(GrowthMeter().report({"connector.load_jobs": 2}, {})))

    assert second.value("kvtier_load_jobs_total") == 2
    assert page.value("kvtier_load_jobs_total") is None


def three_reports() -> list[KVTierStats]:
    """Return three reports of one engine, in their order."""
    meter, histogram = GrowthMeter(), sizes()
    reports = []
    for number in (1, 4, 6):
        histogram.observe(number)
        numbers = {"connector.load_bytes": 100 * number, "primary.held_blocks": number}
        reports.append(meter.report(numbers, {"connector.load_size_bytes": histogram.snapshot()}))
    return reports


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_reports_add_up_in_any_order(order: tuple[int, ...]) -> None:
    reports = three_reports()

    total = reports[order[0]]
    for index in order[1:]:
        total = total.aggregate(reports[index])

    assert total.counters == {"connector.load_bytes": 600}
    assert total.gauges == {"primary.held_blocks": (1, 4, 6)[order[-1]]}
    counts, sums = total.histograms["connector.load_size_bytes"]
    assert (sum(counts), sum(sums)) == (3, 11)
    assert total.reduce()["load_bytes"] == 600


def test_adding_up_does_not_change_what_was_added() -> None:
    first, second, _ = three_reports()

    first.aggregate(second)
    first.aggregate(second)

    assert second.counters == {"connector.load_bytes": 300}
    counts, _ = second.histograms["connector.load_size_bytes"]
    assert sum(counts) == 1


def test_a_report_survives_the_way_to_another_process() -> None:
    first, second, _ = three_reports()
    total = first.aggregate(second)

    pickled = pickle.loads(pickle.dumps(total))  # noqa: S301 - our own, as vLLM moves it between its processes
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(payload(total)))
    rebuilt = KVTierConnector.build_kv_connector_stats(packed)

    for received in (pickled, rebuilt):
        assert received.counters == {"connector.load_bytes": 400}
        assert received.reduce() == total.reduce()
        assert list(map(list, received.histograms["connector.load_size_bytes"])) == list(
            map(list, total.histograms["connector.load_size_bytes"])
        )
        assert not received.is_empty()


@pytest.mark.parametrize("data", [None, {}, {"counters": {}, "gauges": {}, "histograms": {}}])
def test_a_report_of_nothing_is_empty(data: Mapping[str, Any] | None) -> None:  # Any: what vLLM sends
    stats = KVTierConnector.build_kv_connector_stats(None if data is None else dict(data))

    assert stats.is_empty()
    assert stats.reduce() == {}


def test_the_log_of_an_interval_has_prompt_tokens_by_origin_and_the_hit_ratio() -> None:
    numbers = {
        "connector.prompt_tokens.device": 1000,
        "connector.prompt_tokens.host": 500,
        "connector.prompt_tokens.fs": 250,
        "connector.missed_tokens.never_seen": 200,
        "connector.missed_tokens.last_token": 50,
        "connector.load_bytes": 4096,
        "connector.load_time_s": 0.25049,
    }
    assert GrowthMeter().report(numbers, {}).reduce() == {
        "prompt_tokens": 2000,
        "device_tokens": 1000,
        "fs_tokens": 250,
        "host_tokens": 500,
        "computed_tokens": 250,
        "hit_ratio": 0.75,
        "load_bytes": 4096,
        "load_time_s": 0.25,
        "store_bytes": 0,
        "store_time_s": 0,
    }


def test_without_a_token_that_the_device_lacked_there_is_no_hit_ratio() -> None:
    logged = GrowthMeter().report({"connector.prompt_tokens.device": 10}, {}).reduce()
    assert (logged["prompt_tokens"], "hit_ratio" in logged) == (10, False)


def test_reset_forgets_everything() -> None:
    stats, *_ = three_reports()

    stats.reset()

    assert stats.is_empty()


def test_numbers_are_gathered_once_an_interval() -> None:
    clock = ManualClock()
    due = StatsClock(clock)

    answers = [due.is_due(), due.is_due()]
    clock.advance(COUNTERS_INTERVAL_S)
    answers += [due.is_due(), due.is_due()]

    assert answers == [True, False, True, False]


def test_an_engine_that_comes_to_rest_reports_once_more() -> None:
    due = StatsClock(ManualClock())
    resting = (False, False, True, True, False, True)

    assert [due.is_due(is_resting=is_resting) for is_resting in resting] == [
        True,
        False,
        True,
        False,
        False,
        True,
    ]


def test_the_families_can_be_of_any_metric_class(vllm_config: VllmConfig) -> None:
    class Recorder:
        """Takes the place of a metric class, as vLLM's own for Ray do."""

        made: ClassVar[list[str]] = []

        def __init__(
            self,
            name: str,
            documentation: str,
            labelnames: list[str],
            multiprocess_mode: str = "",
            buckets: tuple[float, ...] = (),
        ) -> None:
            assert labelnames[0] == "engine"
            self.made.append(name)

    KVTierConnector.build_prom_metrics(
        with_kvtier(vllm_config),
        {Counter: Recorder, Gauge: Recorder, Histogram: Recorder},
        ["engine"],
        {0: ["0"]},
    )

    assert sorted(Recorder.made) == sorted(family.vllm_name or family.name for family in OWN_FAMILIES)
