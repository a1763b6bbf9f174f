"""What kvtier measures, on vLLM's own ``/metrics`` page and in its log.

It measures nothing itself. Workers report transfers, the scheduler's process reports the counters and gauges of the
connector and of every tier; both travel through vLLM as plain data and are summed by direction, or replaced by name.
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

LEVELS = "levels"
"""Key of counters and gauges in the payload: their value since the start, by dotted name."""

LEVELS_INTERVAL_S = 1.0
"""Seconds between two reports of counters and gauges. Longer makes a metrics page lag, shorter costs steps."""


class KVTierStats(KVConnectorStats):
    """Transfers of an interval and the latest counters; vLLM moves it between processes as its ``data``."""

    data: dict[str, Any]  # Any: two kinds of payload, told apart by key

    @classmethod
    def of_transfers(cls, stats: OffloadingConnectorStats) -> "KVTierStats":
        """Return a payload of one worker's transfers."""
        return cls({TRANSFERS: stats.data})

    @classmethod
    def of_levels(cls, levels: Mapping[str, float]) -> "KVTierStats":
        """Return a payload of the scheduler's counters and gauges."""
        return cls({LEVELS: dict(levels)})

    @property
    def transfers(self) -> OffloadingConnectorStats:
        """The transfers, as kvtier counts them."""
        return OffloadingConnectorStats(self.data.setdefault(TRANSFERS, {}))

    @property
    def levels(self) -> dict[str, float]:
        """Counters and gauges since the start, by dotted name."""
        levels: dict[str, float] = self.data.setdefault(LEVELS, {})
        return levels

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        """Add the transfers of ``other``, take its levels, and return self."""
        if isinstance(other, KVTierStats):
            self.transfers.aggregate(other.transfers)
            self.levels.update(other.levels)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return, for the log, bytes and seconds of each direction."""
        return self.transfers.reduce()

    def is_empty(self) -> bool:
        """Return True when nothing was measured."""
        return self.transfers.is_empty() and not self.levels


class StatsClock:
    """Lets the scheduler's counters through once in a while: gathering them costs some 50 us, a step is shorter.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()

    def is_due(self) -> bool:
        """Return True when an interval has passed since it last did."""
        if self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + LEVELS_INTERVAL_S
        return True


class KVTierPromMetrics(KVConnectorPromMetrics):
    """kvtier's families on vLLM's page: bytes and seconds copied by direction, and every level by name."""

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
        self._level = metric_types[Gauge](
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
        for name, value in stats.levels.items():
            self._level.labels(*labels, name).set(value)
