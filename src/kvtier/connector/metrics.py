"""The connector's measurements: the transfers of a worker, and the counts of the scheduler half.

Stats of several workers and steps can be summed and serialised, so they are plain lists of operations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypedDict

from kvtier.base import TransferType

MAX_RECORDED_OPERATIONS = 4096
"""Operations kept for each direction until the stats are drained. Beyond it the last one absorbs the rest:
totals stay right. More gives an exporter that reads rarely a finer histogram, at about 200 bytes each."""


class OperationStats(TypedDict):
    """One transfer: its bytes, and the seconds that the copy itself took."""

    op_size: int
    op_time: float


@dataclass(slots=True)
class OffloadingConnectorStats:
    """Transfers since the last reset.

    Attributes:
        data: for each "SRC_to_DST" the operations, oldest first.
    """

    data: dict[str, list[OperationStats]] = field(default_factory=dict)

    def record_transfer(self, num_bytes: int, time_s: float, transfer_type: TransferType) -> None:
        """Add one transfer."""
        source, destination = transfer_type
        self._append(f"{source}_to_{destination}", OperationStats(op_size=num_bytes, op_time=time_s))

    def aggregate(self, other: "OffloadingConnectorStats") -> "OffloadingConnectorStats":
        """Add the transfers of ``other`` to this one and return it; ``other`` is not changed."""
        for direction, operations in other.data.items():
            for operation in operations:
                self._append(direction, operation)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return "<direction>_total_bytes" and "<direction>_total_time", in seconds, for each direction."""
        totals: dict[str, int | float] = {}
        for direction, operations in self.data.items():
            totals[f"{direction}_total_bytes"] = sum(operation["op_size"] for operation in operations)
            totals[f"{direction}_total_time"] = sum(operation["op_time"] for operation in operations)
        return totals

    def reset(self) -> None:
        """Forget every transfer."""
        self.data = {}

    def is_empty(self) -> bool:
        """Return whether there was no transfer."""
        return not self.data

    def _append(self, direction: str, operation: OperationStats) -> None:
        operations = self.data.setdefault(direction, [])
        if len(operations) < MAX_RECORDED_OPERATIONS:
            operations.append(OperationStats(op_size=operation["op_size"], op_time=operation["op_time"]))
            return
        operations[-1]["op_size"] += operation["op_size"]
        operations[-1]["op_time"] += operation["op_time"]


@dataclass(slots=True)
class SchedulerCounters:
    """The counts of the scheduler half since its construction.

    Attributes:
        load_jobs: loads begun, lost ones included.
        failed_load_jobs: loads that failed on a worker or became void.
        layerwise_load_jobs: loads that their request computed with while they ran.
        lost_load_jobs: loads whose blocks were gone when the load was to pin them.
        store_jobs: stores begun.
        failed_store_jobs: stores that failed on a worker or became void.
        refused_stores: offers for which the manager had no room.
        flushed_store_jobs: stores that had to end before a device block was written again.
        loaded_tokens: tokens of loads that ended well, by the tier they came from.
        not_loaded_tokens: tokens that were found and computed because that is faster, by the tier that has them.
    """

    load_jobs: int = 0
    failed_load_jobs: int = 0
    layerwise_load_jobs: int = 0
    lost_load_jobs: int = 0
    store_jobs: int = 0
    failed_store_jobs: int = 0
    refused_stores: int = 0
    flushed_store_jobs: int = 0
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    not_loaded_tokens: dict[str, int] = field(default_factory=dict)

    def count_not_loaded(self, tokens_by_tier: Mapping[str, int]) -> None:
        """Add the tokens that a request found and does not load."""
        for tier, num_tokens in tokens_by_tier.items():
            self.not_loaded_tokens[tier] = self.not_loaded_tokens.get(tier, 0) + num_tokens

    def snapshot(self) -> Mapping[str, float]:
        """Return the counts by dotted name."""
        by_tier = ("loaded_tokens", "not_loaded_tokens")
        jobs = [item.name for item in fields(self) if item.name not in by_tier]
        counts = {f"connector.{name}": float(getattr(self, name)) for name in jobs}
        for name in by_tier:
            tokens: Mapping[str, int] = getattr(self, name)
            counts |= {f"connector.{name}.{tier}": float(count) for tier, count in tokens.items()}
        return counts
