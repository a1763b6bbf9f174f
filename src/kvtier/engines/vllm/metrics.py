"""kvtier's numbers on vLLM's ``/metrics`` page and in its log.

Workers report transfers. The scheduler's process reports the counters and gauges of the connector and of every tier.
Both pass through vLLM as plain data: transfers are summed by direction, counters and gauges replaced by name.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.connector.metrics import OffloadingConnectorStats

TRANSFERS = "transfers"
"""Key of the transfers in the payload: for each "SRC_to_DST" the operations."""

COUNTERS = "counters"
"""Key of counters (since the start) and gauges in the payload, by dotted name."""

COUNTERS_INTERVAL_S = 1.0
"""Seconds between two reports of counters and gauges. Longer makes a metrics page lag, shorter costs steps."""


class KVTierStats(KVConnectorStats):
    """Transfers of an interval and the latest counters; vLLM passes its ``data`` between processes."""

    data: dict[str, Any]  # Any: two kinds of payload, distinguished by key

    @classmethod
    def of_transfers(cls, stats: OffloadingConnectorStats) -> "KVTierStats":
        """Return a payload of one worker's transfers."""
        return cls({TRANSFERS: stats.data})

    @classmethod
    def of_counters(cls, counters: Mapping[str, float]) -> "KVTierStats":
        """Return a payload of the scheduler's counters and gauges."""
        return cls({COUNTERS: dict(counters)})

    @property
    def transfers(self) -> OffloadingConnectorStats:
        """The transfers."""
        return OffloadingConnectorStats(self.data.setdefault(TRANSFERS, {}))

    @property
    def counters(self) -> dict[str, float]:
        """Counters and gauges since the start, by dotted name."""
        counters: dict[str, float] = self.data.setdefault(COUNTERS, {})
        return counters

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        """Add the transfers of ``other``, take its counters, and return self."""
        if isinstance(other, KVTierStats):
            self.transfers.aggregate(other.transfers)
            self.counters.update(other.counters)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return, for the log, bytes and seconds of each direction."""
        return self.transfers.reduce()

    def is_empty(self) -> bool:
        """Return whether there is neither a transfer nor a counter."""
        return self.transfers.is_empty() and not self.counters


class StatsClock:
    """Limits how often counters are gathered, which costs some 50 us, more than a step.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()

    def is_due(self) -> bool:
        """Return whether an interval has passed since the last True."""
        if self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + COUNTERS_INTERVAL_S
        return True


class KVTierPromMetrics(KVConnectorPromMetrics):
    """kvtier's metric families in vLLM: transfers by direction, and every counter and gauge by name."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        by_direction = [*labelnames, "direction"]
        self._bytes = metric_types[Counter](
            name="vllm:kvtier_transfer_bytes",
            documentation="Bytes copied between device and host memory.",
            labelnames=by_direction,
        )
        self._seconds = metric_types[Counter](
            name="vllm:kvtier_transfer_seconds",
            documentation="Seconds that those copies took.",
            labelnames=by_direction,
        )
        self._operations = metric_types[Counter](
            name="vllm:kvtier_transfers",
            documentation="Copies between device and host memory.",
            labelnames=by_direction,
        )
        self._counter = metric_types[Gauge](
            name="vllm:kvtier_stat",
            documentation="Counters (since the start) and gauges of connector and tiers, by name.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "name"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one payload to the families of its engine."""
        stats = KVTierStats(transfer_stats_data)
        labels = self.per_engine_labelvalues[engine_idx]
        for direction, operations in stats.transfers.data.items():
            self._operations.labels(*labels, direction).inc(len(operations))
            self._bytes.labels(*labels, direction).inc(sum(operation["op_size"] for operation in operations))
            self._seconds.labels(*labels, direction).inc(
                sum(operation["op_time"] for operation in operations)
            )
        for name, value in stats.counters.items():
            self._counter.labels(*labels, name).set(value)
