"""The results of a simulation: hits by origin, times, traffic of each tier, history.

Each token counts once: for the device cache, for the tier it was loaded from, or as computed. All values are plain, so
that ``to_json`` loses nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from kvtier.misses import MISSED_TOKENS
from kvtier.sim.history import History
from kvtier.sim.request import SimulatedRequest

V = TypeVar("V")

MAX_PERIODS = 10_000
"""A week of minutes. A timestamp in a wrong unit would make millions of periods, nearly all empty; fewer periods would
blur the bursts of a long trace."""

MAX_QUANTILES = 200
"""Steps of half a percent, which still show the last percentile. More would only make files longer."""

DEVICE = "device"
"""The origin of tokens that the device cache held."""

HOST = "host"
"""The origin of tokens that host memory held, and its name as a place."""

MEDIUM_OF_HOST = "CPU"
"""What the connector calls host memory, as vLLM does; results say ``HOST``."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a time over requests, in seconds; zeros when there were none.

    Attributes:
        mean_s: the mean.
        p50_s: the median.
        p90_s: the 90th percentile.
        p99_s: the 99th percentile.
        max_s: the longest.
    """

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Traffic of one tier.

    Attributes:
        name: ``HOST`` for host memory, else the tier's own.
        capacity_blocks: blocks it can hold.
        num_written_blocks: blocks written to it, from any side.
        written_bytes: the same in bytes.
        num_read_blocks: blocks read from it: loads to the device for host memory, promotions for the others.
        read_bytes: the same in bytes.
        writes_per_unique_block: blocks written over distinct full blocks of the trace.
        busy_ratio: share of the time in which its link moved bytes; of host memory's two links the busier.
        max_queued_blocks: the most blocks that waited for its link at once; transfers for host memory.
    """

    name: str
    capacity_blocks: int
    num_written_blocks: int
    written_bytes: int
    num_read_blocks: int
    read_bytes: int
    writes_per_unique_block: float
    busy_ratio: float
    max_queued_blocks: int


@dataclass(frozen=True, slots=True)
class Period:
    """The requests that arrived in one stretch of time.

    Attributes:
        begin_s: its start.
        num_requests: requests.
        num_prompt_tokens: tokens of their prompts.
        hit_tokens: tokens that were not computed, by origin.
        first_token: time from arrival to first token.
        queue: time from arrival to device blocks.
    """

    begin_s: float
    num_requests: int
    num_prompt_tokens: int
    hit_tokens: Mapping[str, int]
    first_token: Spread
    queue: Spread


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        total: all served requests, as one period.
        periods: the same, split by arrival into stretches of equal length.
        period_s: that length: the requested one, or longer where there would be over MAX_PERIODS.
        num_rejected: requests that need more device blocks than there are; they are in no period.
        duration_s: from the first arrival until the last transfer ended.
        tiers: host memory, then the secondary tiers in the order of lookups.
        counters: counters of the production connector and managers, by name, with ``HOST`` for its medium.
        first_token_quantiles_s: number i of n is the time within which a share of (i + 1) / n of the served requests
            had their first token; one for each request, at most MAX_QUANTILES.
        history: how full device, host memory and tiers were, and what had been written to them.
        num_bound_tokens: the most tokens that need not have been computed, with a known future and all memory in one
            (``kvtier.sim.bound``); None: not computed.
    """

    total: Period
    periods: tuple[Period, ...]
    period_s: float
    num_rejected: int
    duration_s: float
    tiers: tuple[TierTraffic, ...]
    counters: Mapping[str, float]
    first_token_quantiles_s: tuple[float, ...] = ()
    history: History = field(default_factory=History)
    num_bound_tokens: int | None = None

    @property
    def not_computed_ratio(self) -> float:
        """Share of the prompt tokens that were not computed, from any origin, from 0 to 1."""
        return sum(self.hit_ratio(source) for source in self.total.hit_tokens)

    @property
    def at_most_ratio(self) -> float | None:
        """The upper bound of ``not_computed_ratio``; None: not computed."""
        if self.num_bound_tokens is None:
            return None
        total = self.total
        return self.num_bound_tokens / total.num_prompt_tokens if total.num_prompt_tokens else 0.0

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens that were loaded instead of computed, without those of the device cache."""
        return sum(number for source, number in self.total.hit_tokens.items() if source != DEVICE)

    @property
    def missed_tokens(self) -> dict[str, int]:
        """Prompt tokens that were computed, by cause and tier, most first; empty without offloading.

        They and the hits sum to the prompts.
        """
        found = {
            counter.removeprefix(MISSED_TOKENS): int(value)
            for counter, value in self.counters.items()
            if counter.startswith(MISSED_TOKENS)
        }
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def hit_ratio(self, source: str) -> float:
        """Return the share of prompt tokens from ``source``, from 0 to 1."""
        total = self.total
        return total.hit_tokens.get(source, 0) / total.num_prompt_tokens if total.num_prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the values as JSON objects."""
        sums = {
            "num_loaded_tokens": self.num_loaded_tokens,
            "missed_tokens": self.missed_tokens,
            "not_computed_ratio": self.not_computed_ratio,
            "at_most_ratio": self.at_most_ratio,
        }
        return {**asdict(self), **sums}


def name_places(by_medium: Mapping[str, V]) -> dict[str, V]:
    """Return values by place, from values by medium, or by counters whose names end in one. Pure."""

    def name_place(name: str) -> str:
        counter, dot, last = name.rpartition(".")
        return f"{counter}{dot}{HOST}" if last == MEDIUM_OF_HOST else name

    return {name_place(name): value for name, value in by_medium.items()}


def spread_of(times_s: Iterable[float]) -> Spread:
    """Return the distribution of ``times_s``; percentiles by the nearest rank. Pure."""
    ordered = sorted(times_s)
    if not ordered:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)

    def rank(percent: int) -> float:
        return ordered[-(-percent * len(ordered) // 100) - 1]

    return Spread(sum(ordered) / len(ordered), rank(50), rank(90), rank(99), ordered[-1])


def quantiles_of(times_s: Iterable[float]) -> tuple[float, ...]:
    """Return ``times_s`` in order, or MAX_QUANTILES of them by the nearest rank when there are more. Pure."""
    ordered = sorted(times_s)
    num = min(len(ordered), MAX_QUANTILES)
    return tuple(ordered[-(-part * len(ordered) // num) - 1] for part in range(1, num + 1))


def summarise(requests: Sequence[SimulatedRequest], begin_s: float = 0.0) -> Period:
    """Return ``requests``, each served, as one period. Pure."""
    hit_tokens: dict[str, int] = {}
    for request in requests:
        for source, number in {DEVICE: request.num_device_tokens, **request.loaded_tokens}.items():
            hit_tokens[source] = hit_tokens.get(source, 0) + number
    return Period(
        begin_s,
        len(requests),
        sum(request.num_prompt_tokens for request in requests),
        hit_tokens,
        spread_of(request.first_token_s - request.arrival_s for request in requests),
        spread_of(request.admitted_s - request.arrival_s for request in requests),
    )


def choose_period(requests: Sequence[SimulatedRequest], period_s: float) -> float:
    """Return ``period_s``, or the length that splits the arrivals into MAX_PERIODS if that is longer. Pure."""
    arrivals_s = [request.arrival_s for request in requests]
    span_s = max(arrivals_s, default=0.0) - min(arrivals_s, default=0.0)
    # The first and the last period may be partly filled.
    return max(period_s, span_s / (MAX_PERIODS - 2))


def split_into_periods(requests: Iterable[SimulatedRequest], period_s: float) -> tuple[Period, ...]:
    """Return ``requests`` by arrival, with the empty periods between the first arrival and the last. Pure."""
    by_period: dict[int, list[SimulatedRequest]] = {}
    for request in requests:
        by_period.setdefault(int(request.arrival_s // period_s), []).append(request)
    return tuple(
        summarise(by_period.get(number, ()), number * period_s)
        for number in range(min(by_period, default=0), max(by_period, default=-1) + 1)
    )
