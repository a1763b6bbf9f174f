"""Mixes of host memory and tiers, their results on a trace, and their cost per month.

Costs are those of ``Medium``: capacity as it is sold, requests and bytes at the rate of the trace, wear of disks at the
trace's rate of writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.planning.prices import SECONDS_PER_DAY, SECONDS_PER_MONTH, Medium
from kvtier.sim.model import HostModel
from kvtier.sim.results import Spread
from kvtier.sim.tier import TierModel


@dataclass(frozen=True, slots=True)
class Share:
    """Blocks on one medium.

    Attributes:
        medium: the medium.
        num_blocks: number of blocks.
    """

    medium: Medium
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Host memory and the tiers behind it, fastest first; without shares, an engine without offloading."""

    shares: tuple[Share, ...]

    @property
    def kind(self) -> tuple[str, ...]:
        """The names of its media, in the order of lookups."""
        return tuple(share.medium.name for share in self.shares)

    def host_model(self, cache_policy: str) -> HostModel | None:
        """Return the model to simulate; None without offloading."""
        if not self.shares:
            return None
        host, *tiers = self.shares
        models = tuple(TierModel(one.medium.name, one.num_blocks, one.medium.speed) for one in tiers)
        return HostModel(host.num_blocks, cache_policy, speed=host.medium.speed, tiers=models)

    def capacity_usd_per_month(self, block_bytes: int) -> float:
        """Return the cost without traffic and wear, a lower bound of the bill. Pure."""
        return sum(one.medium.capacity_usd_per_month(one.num_blocks * block_bytes) for one in self.shares)


@dataclass(frozen=True, slots=True)
class MixOutcome:
    """The results of a mix on a trace.

    Attributes:
        hit_ratio: share of the prompts that need not be computed, from 0 to 1.
        written_blocks: blocks written to each medium, by its name.
        read_blocks: blocks read from each medium, by its name.
        first_token: time to first token; None where time was not simulated.
        num_saved_tokens: tokens loaded instead of computed; None where time was not simulated.
        num_overloads: how often a tier was overloaded and skipped for some seconds.
    """

    hit_ratio: float
    written_blocks: Mapping[str, int]
    read_blocks: Mapping[str, int]
    first_token: Spread | None = None
    num_saved_tokens: int | None = None
    num_overloads: int = 0


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a plan.

    Attributes:
        hit_ratio: at least this share of the prompts need not be computed; None: no such goal.
        first_token_p90_s: 90th percentile of the time to first token, at most; None: no such goal.

    Raises:
        ConfigError: a value is not valid.
    """

    hit_ratio: float | None = None
    first_token_p90_s: float | None = None

    def __post_init__(self) -> None:
        if self.hit_ratio is not None and not 0 < self.hit_ratio <= 1:
            raise ConfigError("--hit-ratio", self.hit_ratio, "must be above 0 and at most 1")
        if self.first_token_p90_s is not None and not 0 < self.first_token_p90_s < float("inf"):
            raise ConfigError("--ttft-p90", self.first_token_p90_s, "must be a time above zero")

    def shortfall(self, outcome: MixOutcome) -> float:
        """Return by which share ``outcome`` misses the goal, the worst of several; 0 when it reaches it. Pure."""
        missed = [0.0]
        if self.hit_ratio is not None:
            missed.append((self.hit_ratio - outcome.hit_ratio) / self.hit_ratio)
        if self.first_token_p90_s is not None and outcome.first_token is not None:
            missed.append((outcome.first_token.p90_s - self.first_token_p90_s) / self.first_token_p90_s)
        return max(missed)

    def is_reached(self, outcome: MixOutcome) -> bool:
        """Return whether ``outcome`` reaches it. Pure."""
        return self.shortfall(outcome) == 0


@dataclass(frozen=True, slots=True)
class MediumBill:
    """One medium's part of a bill.

    Attributes:
        name: the medium.
        used_bytes: capacity that holds blocks.
        sold_bytes: capacity that is paid for.
        usd_per_month: its cost.
        written_bytes_per_day: bytes written to it at the rate of the trace.
        endurance_years: years until it is worn out; None if it does not wear.
    """

    name: str
    used_bytes: int
    sold_bytes: int
    usd_per_month: float
    written_bytes_per_day: float
    endurance_years: float | None


@dataclass(frozen=True, slots=True)
class Bill:
    """The cost of a mix per month if the traffic of the trace continues around the clock.

    Attributes:
        media: its parts, in the order of lookups.
    """

    media: tuple[MediumBill, ...]

    @property
    def usd_per_month(self) -> float:
        """The sum."""
        return sum(part.usd_per_month for part in self.media)


def make_bill(mix: Mix, outcome: MixOutcome, *, block_bytes: int, duration_s: float) -> Bill:
    """Return the cost of ``mix``. Pure.

    Args:
        mix: the mix.
        outcome: its results on the trace.
        block_bytes: bytes of a block.
        duration_s: duration of the trace, from its first arrival to its last.

    Raises:
        ConfigError: the trace has no duration, so it has no rate.
    """
    if not duration_s > 0:
        raise ConfigError(
            "trace", duration_s, "all requests arrive at the same time: give a trace with a duration"
        )
    return Bill(tuple(_bill_share(share, outcome, block_bytes, duration_s) for share in mix.shares))


def name_of(kind: tuple[str, ...]) -> str:
    """Return a kind of mix in words. Pure."""
    return " + ".join(kind) if kind else "without"


def _bill_share(share: Share, outcome: MixOutcome, block_bytes: int, duration_s: float) -> MediumBill:
    medium, used_bytes = share.medium, share.num_blocks * block_bytes
    written = outcome.written_blocks[medium.name]
    written_bytes_per_s = written * block_bytes / duration_s
    endurance_years = medium.endurance_years(used_bytes, written_bytes_per_s)
    traffic_usd = medium.traffic_usd(
        written_blocks=written, read_blocks=outcome.read_blocks[medium.name], block_bytes=block_bytes
    )
    return MediumBill(
        medium.name,
        used_bytes,
        medium.sold_bytes(used_bytes),
        medium.capacity_usd_per_month(used_bytes, endurance_years)
        + traffic_usd * SECONDS_PER_MONTH / duration_s,
        written_bytes_per_s * SECONDS_PER_DAY,
        endurance_years,
    )
