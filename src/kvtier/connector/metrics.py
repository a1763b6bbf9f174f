"""What the connector measures: the transfers of a worker, and the counts of the scheduler half.

It exports nothing; engines and exporters read it. Stats of several workers and steps can be summed, so they are
kept as plain lists of operations that survive serialisation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypedDict

from kvtier.base import OffloadKey, TransferType
from kvtier.connector.groups import GroupLayout
from kvtier.connector.request_state import RequestState
from kvtier.cpu.common import CPULoadStoreSpec

MAX_RECORDED_OPERATIONS = 4096
"""Operations kept for each direction until someone takes the stats. Beyond it the last one absorbs the rest:
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
        """Return True when there was no transfer."""
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
    """What the scheduler half has counted since it was built.

    Attributes:
        load_jobs: loads begun, lost ones included.
        failed_load_jobs: loads that failed on a worker or became void.
        layerwise_load_jobs: loads that their request computed with while they ran.
        lost_load_jobs: loads whose blocks were gone when they were to be pinned.
        store_jobs: stores begun.
        failed_store_jobs: stores that failed on a worker or became void.
        refused_stores: offers for which the manager had no room.
        flushed_store_jobs: stores that had to end before a device block was written again.
        loaded_tokens: tokens of loads that ended well, by the tier they came from.
        not_loaded_tokens: tokens that were found and computed all the same, which is faster, by the tier they are in.
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

    def count_loaded(self, tokens_by_source: Mapping[str, int]) -> None:
        """Add the tokens of a load."""
        for source, num_tokens in tokens_by_source.items():
            self.loaded_tokens[source] = self.loaded_tokens.get(source, 0) + num_tokens

    def count_not_loaded(self, tokens_by_source: Mapping[str, int]) -> None:
        """Add the tokens that a request found and does not load."""
        for source, num_tokens in tokens_by_source.items():
            self.not_loaded_tokens[source] = self.not_loaded_tokens.get(source, 0) + num_tokens

    def snapshot(self) -> Mapping[str, float]:
        """Return the counts by dotted name."""
        by_source = ("loaded_tokens", "not_loaded_tokens")
        jobs = [item.name for item in fields(self) if item.name not in by_source]
        counts = {f"connector.{name}": float(getattr(self, name)) for name in jobs}
        for name in by_source:
            tokens: Mapping[str, int] = getattr(self, name)
            counts |= {f"connector.{name}.{source}": float(count) for source, count in tokens.items()}
        return counts


def count_hit_sources(
    layouts: Sequence[GroupLayout],
    state: RequestState,
    promoted: Mapping[OffloadKey, str],
    num_external_tokens: int,
) -> dict[str, int]:
    """Return how many tokens of the load that begins come from each tier, none of them zero. Pure.

    Args:
        layouts: the KV groups.
        state: the request.
        promoted: blocks that came up while it waited for them, by their tier's type.
        num_external_tokens: tokens of the load; what is returned sums to it.
    """
    layout = next((layout for layout in layouts if layout.num_tail_tokens is None), layouts[0])
    first_token = state.num_local_tokens or 0
    end_token = first_token + num_external_tokens
    span = layout.span(first_token, end_token)
    sources: dict[str, int] = {}
    keys, block_tokens = state.keys[layout.idx], layout.block_tokens
    for block in range(span.first_block, span.end_block) if promoted else ():
        tier = promoted.get(keys[block])
        if tier is not None:
            begin = max(first_token, block * block_tokens)
            end = min(end_token, (block + 1) * block_tokens)
            sources[tier] = sources.get(tier, 0) + end - begin
    num_held_tokens = num_external_tokens - sum(sources.values())
    return {CPULoadStoreSpec.medium(): num_held_tokens, **sources} if num_held_tokens else sources
