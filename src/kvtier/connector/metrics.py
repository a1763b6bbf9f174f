"""The connector's measurements: what was decided, what was copied, and how long searches took.

Workers report their copies with the jobs that these belong to, so the scheduler half has all numbers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TypedDict

from kvtier.base import TransferType
from kvtier.connector.common import TransferSample
from kvtier.connector.request_state import SearchState
from kvtier.histogram import LATENCY_BOUNDS_S, SIZE_BOUNDS_BYTES, Histogram, HistogramSnapshot

MAX_RECORDED_OPERATIONS = 4096
"""Operations kept for each direction until the stats are taken. Beyond it the last one absorbs the rest, so that totals
stay right. More give a reader that takes them rarely a finer histogram, at about 200 bytes each."""


class OperationStats(TypedDict):
    """One transfer: its bytes, and the seconds that the copy itself took."""

    op_size: int
    op_time: float


@dataclass(slots=True)
class OffloadingConnectorStats:
    """Transfers since the last reset, for engines that aggregate such stats over workers and steps.

    Attributes:
        data: for each "SRC_to_DST" the transfers, oldest first; plain values, which survive serialisation.
    """

    data: dict[str, list[OperationStats]] = field(default_factory=dict)

    def record_transfer(self, num_bytes: int, time_s: float, transfer_type: TransferType) -> None:
        """Add one transfer."""
        source, destination = transfer_type
        self._append(f"{source}_to_{destination}", num_bytes, time_s)

    def aggregate(self, other: "OffloadingConnectorStats") -> "OffloadingConnectorStats":
        """Add the transfers of ``other`` to this one and return it; ``other`` is not changed."""
        for direction, operations in other.data.items():
            for operation in tuple(operations):
                self._append(direction, operation["op_size"], operation["op_time"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return "SRC_to_DST_total_bytes" and "SRC_to_DST_total_time", in seconds, for each direction. Pure."""
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

    def _append(self, direction: str, num_bytes: int, time_s: float) -> None:
        operations = self.data.setdefault(direction, [])
        if len(operations) < MAX_RECORDED_OPERATIONS:
            operations.append(OperationStats(op_size=num_bytes, op_time=time_s))
            return
        operations[-1]["op_size"] += num_bytes
        operations[-1]["op_time"] += time_s


class TransferMeter:
    """Size and duration of the copies between device and host memory, all workers together."""

    def __init__(self) -> None:
        self._sizes = {True: Histogram(SIZE_BOUNDS_BYTES), False: Histogram(SIZE_BOUNDS_BYTES)}
        self._times = {True: Histogram(LATENCY_BOUNDS_S), False: Histogram(LATENCY_BOUNDS_S)}

    def add(self, transfers: Iterable[TransferSample]) -> None:
        """Count copies that have ended."""
        for is_load, num_bytes, time_s in transfers:
            self._sizes[is_load].observe(num_bytes)
            self._times[is_load].observe(time_s)

    def stats(self) -> dict[str, float]:
        """Return the bytes and seconds of all loads and all stores, by dotted name."""
        return {
            "connector.load_bytes": self._sizes[True].snapshot().sum,
            "connector.load_time_s": self._times[True].snapshot().sum,
            "connector.store_bytes": self._sizes[False].snapshot().sum,
            "connector.store_time_s": self._times[False].snapshot().sum,
        }

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return the sizes in bytes and the durations in seconds, by dotted name."""
        return {
            "connector.load_size_bytes": self._sizes[True].snapshot(),
            "connector.load_duration_s": self._times[True].snapshot(),
            "connector.store_size_bytes": self._sizes[False].snapshot(),
            "connector.store_duration_s": self._times[False].snapshot(),
        }


class SearchMeter:
    """How long searches take, and how long requests wait for one that is final."""

    def __init__(self) -> None:
        self._search = Histogram(LATENCY_BOUNDS_S)
        self._wait = Histogram(LATENCY_BOUNDS_S)

    def on_search(self, search: SearchState, began_s: float, ended_s: float, *, is_final: bool) -> None:
        """Count a search; the request waits from the first that is not final until one is."""
        self._search.observe(ended_s - began_s)
        if not is_final:
            if search.waits_since_s is None:
                search.waits_since_s = began_s
        elif search.waits_since_s is not None:
            self.on_wait_ended(search, ended_s)

    def on_wait_ended(self, search: SearchState, ended_s: float) -> None:
        """Count the wait of a request that waits no longer, because its search is final or it has ended."""
        if search.waits_since_s is not None:
            self._wait.observe(ended_s - search.waits_since_s)
            search.waits_since_s = None

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return the seconds of searches and of waits, by dotted name."""
        return {"connector.search_s": self._search.snapshot(), "connector.wait_s": self._wait.snapshot()}


@dataclass(slots=True)
class SchedulerCounters:
    """The counts of the scheduler half since its construction.

    Attributes:
        load_jobs: loads begun, lost ones included.
        failed_load_jobs: loads that failed on a worker or became void.
        lost_load_jobs: loads whose blocks were gone when the load was to pin them.
        store_jobs: stores begun.
        failed_store_jobs: stores that failed on a worker or became void.
        refused_stores: offers for which the manager had no room.
        flushed_store_jobs: stores that had to end before a device block was written again.
        unknown_tenant_requests: requests that name no tenant that the engine serves.
        loaded_tokens: tokens of loads that ended well, by the tier they came from.
    """

    load_jobs: int = 0
    failed_load_jobs: int = 0
    lost_load_jobs: int = 0
    store_jobs: int = 0
    failed_store_jobs: int = 0
    refused_stores: int = 0
    flushed_store_jobs: int = 0
    unknown_tenant_requests: int = 0
    loaded_tokens: dict[str, int] = field(default_factory=dict)

    def stats(self) -> dict[str, float]:
        """Return the counts by dotted name."""
        jobs = [item.name for item in fields(self) if item.name != "loaded_tokens"]
        counts = {f"connector.{name}": float(getattr(self, name)) for name in jobs}
        tokens = dict(self.loaded_tokens)  # another thread may read while this one counts
        return counts | {f"connector.loaded_tokens.{tier}": float(num) for tier, num in tokens.items()}


def add_tokens(totals: dict[str, int], tokens: Mapping[str, int]) -> None:
    """Add ``tokens`` to the totals of the same names."""
    for name, num_tokens in tokens.items():
        totals[name] = totals.get(name, 0) + num_tokens
