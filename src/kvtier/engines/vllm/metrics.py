"""kvtier's metric families on vLLM's ``/metrics`` page and in its log.

The scheduler's process has every number: workers report their copies to it with the jobs that they belong to. Once in
an interval, and before the engine rests, it reports through vLLM what has changed, as plain data: by how much counters
and histograms have grown, and the latest gauges. Reports can be summed, so it does not matter which of vLLM's processes
gets which. ``kvtier.observe.metrics`` declares the families.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.histogram import HistogramSnapshot
from kvtier.misses import DEVICE_ORIGIN, MISSED_TOKENS
from kvtier.observe.family import Family, Kind, SampleFinder
from kvtier.observe.metrics import DEVICE, FAMILIES

COUNTERS = "counters"
"""Key of the growth of each counter in the payload, by dotted name."""

GAUGES = "gauges"
"""Key of the latest gauges in the payload, by dotted name."""

HISTOGRAMS = "histograms"
"""Key of the growth of each histogram in the payload, by dotted name: counts, then sums, of its buckets."""

COUNTERS_INTERVAL_S = 1.0
"""Seconds between two reports. Longer makes a metrics page lag, shorter costs steps."""

OWN_FAMILIES = tuple(family for family in FAMILIES if family not in DEVICE)
"""Families on vLLM's page; its device pool is vLLM's own, which has metrics of it."""

PROMPT_TOKENS = "connector.prompt_tokens."

IN_LOG = ("connector.load_bytes", "connector.load_time_s", "connector.store_bytes", "connector.store_time_s")
"""What vLLM's log shows of the copies of an interval."""


class KVTierStats(KVConnectorStats):
    """What has changed in an interval; vLLM passes its ``data`` between processes."""

    data: dict[str, Any]  # Any: three kinds of payload, distinguished by key

    @property
    def counters(self) -> dict[str, float]:
        """Growth of the counters, by dotted name."""
        counters: dict[str, float] = self.data.setdefault(COUNTERS, {})
        return counters

    @property
    def gauges(self) -> dict[str, float]:
        """The latest gauges, by dotted name."""
        gauges: dict[str, float] = self.data.setdefault(GAUGES, {})
        return gauges

    @property
    def histograms(self) -> dict[str, Sequence[Sequence[float]]]:
        """Growth of the histograms, by dotted name: counts, then sums, of their buckets."""
        histograms: dict[str, Sequence[Sequence[float]]] = self.data.setdefault(HISTOGRAMS, {})
        return histograms

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        """Add what has grown in ``other``, take its gauges, and return self."""
        if isinstance(other, KVTierStats):
            for name, growth in other.counters.items():
                self.counters[name] = self.counters.get(name, 0.0) + growth
            self.gauges.update(other.gauges)
            for name, grown in other.histograms.items():
                self.histograms[name] = (
                    add_buckets(self.histograms[name], grown) if name in self.histograms else grown
                )
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return, for the log, prompt tokens by origin and the copies of the interval; nothing when there were none.

        ``hit_ratio`` is the share of what kvtier loaded in the prompt tokens that the device did not hold.
        """
        counters = self.counters
        loaded, computed = dict(sum_by_name(counters, PROMPT_TOKENS)), sum_by_name(counters, MISSED_TOKENS)
        device, computed_tokens = loaded.pop(DEVICE_ORIGIN, 0), sum(computed.values())
        tokens: dict[str, int | float] = {f"{name}_tokens": int(number) for name, number in loaded.items()}
        missing = sum(loaded.values()) + computed_tokens
        if missing or device:
            tokens = {"prompt_tokens": int(missing + device), "device_tokens": int(device), **tokens}
            tokens["computed_tokens"] = int(computed_tokens)
        if missing:
            tokens["hit_ratio"] = round(sum(loaded.values()) / missing, 3)
        if not (tokens or any(counters.get(name) for name in IN_LOG)):
            return {}
        return tokens | {name.removeprefix("connector."): digits(counters.get(name, 0)) for name in IN_LOG}

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not (self.counters or self.gauges or self.histograms)


def sum_by_name(counters: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the counters that begin with ``prefix`` and have grown, by the rest of their names. Pure."""
    return {name.removeprefix(prefix): n for name, n in counters.items() if name.startswith(prefix) and n}


def digits(number: float) -> int | float:
    """Return a number as a log shows it: whole, or with three decimals. Pure."""
    return int(number) if float(number).is_integer() else round(number, 3)


def add_buckets(
    left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]
) -> Sequence[Sequence[float]]:
    """Return the counts and sums of two histograms, added by bucket. Pure."""
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(left, right, strict=True)]


class StatsClock:
    """Limits how often numbers are gathered, which costs some 100 us, more than a step.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()
        self._was_resting = True

    def is_due(self, *, is_resting: bool = False) -> bool:
        """Return whether an interval has passed since the last True, or the engine has just come to rest.

        Args:
            is_resting: whether the engine has nothing to do; no step follows then that could report what this one did.
        """
        has_come_to_rest = is_resting and not self._was_resting
        self._was_resting = is_resting
        if self._clock() < self._next_s and not has_come_to_rest:
            return False
        self._next_s = self._clock() + COUNTERS_INTERVAL_S
        return True


class GrowthMeter:
    """Turns numbers since the start into what has changed since the last report.

    Args:
        families: those that are reported.
    """

    def __init__(self, families: Iterable[Family] = OWN_FAMILIES) -> None:
        self._finder = SampleFinder(families)
        self._counted: dict[str, float] = {}
        self._snapshots: dict[str, HistogramSnapshot] = {}

    def report(self, numbers: Mapping[str, float], snapshots: Mapping[str, HistogramSnapshot]) -> KVTierStats:
        """Return what has changed; a number that appears for the first time is in it even if it is 0.

        Args:
            numbers: counters since the start and gauges, by dotted name; those that no family reads are left out.
            snapshots: histograms since the start, by dotted name.
        """
        counters: dict[str, float] = {}
        gauges: dict[str, float] = {}
        for name, value in numbers.items():
            sample = self._finder.find(name)
            if sample is None:
                continue
            if sample.family.kind is Kind.GAUGE:
                gauges[name] = value
            elif self._counted.get(name) != value:
                # One that has shrunk began anew, with a tier that was built again for example.
                growth = value - self._counted.get(name, 0.0)
                counters[name] = growth if growth >= 0 else value
                self._counted[name] = value
        histograms: dict[str, Sequence[Sequence[float]]] = {}
        for name, snapshot in snapshots.items():
            earlier = self._snapshots.get(name)
            if earlier != snapshot and self._finder.find(name) is not None:
                grown = snapshot if earlier is None else snapshot.since(earlier)
                histograms[name] = (list(grown.counts), list(grown.sums))
                self._snapshots[name] = snapshot
        return KVTierStats({COUNTERS: counters, GAUGES: gauges, HISTOGRAMS: histograms})


class PrometheusMetric(Protocol):
    """A metric class of prometheus-client, or one of vLLM's for Ray that has the same methods."""

    def labels(self, *values: object) -> Any:  # noqa: ANN401 - a counter, gauge or histogram
        """Return the sample with these values of the labels."""


class KVTierPromMetrics(KVConnectorPromMetrics):
    """kvtier's metric families in vLLM, each with vLLM's own labels before those of the family."""

    _registered: ClassVar[list[PrometheusMetric]] = []

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._unregister_earlier()
        self._finder = SampleFinder(OWN_FAMILIES)
        self._metrics = {
            family: make_metric(family, metric_types, [*labelnames, *family.labels])
            for family in OWN_FAMILIES
        }
        self._registered.extend(self._metrics.values())

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one payload to the families of its engine."""
        stats = KVTierStats(transfer_stats_data)
        for name, growth in stats.counters.items():
            self._sample(name, engine_idx).inc(growth)
        for name, value in stats.gauges.items():
            self._sample(name, engine_idx).set(value)
        for name, (counts, sums) in stats.histograms.items():
            sample = self._sample(name, engine_idx)
            for value in HistogramSnapshot((), tuple(map(int, counts)), tuple(sums)).observations():
                sample.observe(value)

    def _sample(self, name: str, engine_idx: int) -> Any:  # noqa: ANN401 - as prometheus-client's labels returns
        found = self._finder.find(name)
        assert found is not None, f"{name} was reported and no family reads it"
        labels = [*self.per_engine_labelvalues[engine_idx], *found.label_values]
        return self._metrics[found.family].labels(*labels)

    @classmethod
    def _unregister_earlier(cls) -> None:
        """Unregister the families of an engine that this process had before; vLLM does so with its own."""
        for metric in cls._registered:
            with suppress(KeyError):  # it is of another class of metrics, or vLLM has unregistered it
                REGISTRY.unregister(metric)
        cls._registered.clear()


def make_metric(
    family: Family, metric_types: Mapping[type, type], labelnames: Sequence[str]
) -> PrometheusMetric:
    """Return the metric of a family, under the name that it has on vLLM's page."""
    common = {"name": family.vllm_name or family.name, "documentation": family.help, "labelnames": labelnames}
    if family.kind is Kind.COUNTER:
        metric: PrometheusMetric = metric_types[Counter](**common)
    elif family.kind is Kind.GAUGE:
        metric = metric_types[Gauge](**common, multiprocess_mode="mostrecent")
    else:
        metric = metric_types[Histogram](**common, buckets=family.bounds)
    return metric
