"""Goals, shortfalls and bills are what a few lines of arithmetic give."""

import pytest
from tests.sim.media import DISK, HOST, STORE

from kvtier.errors import ConfigError
from kvtier.planning.prices import DAYS_PER_YEAR, GIB, SECONDS_PER_MONTH
from kvtier.planning.tier_mix import Goal, Mix, MixOutcome, Share, make_bill, name_of
from kvtier.sim.results import Spread

MIX = Mix((Share(HOST, 2), Share(DISK, 4)))


def outcome(hit_ratio: float = 0.3, p90_s: float | None = None) -> MixOutcome:
    first = None if p90_s is None else Spread(p90_s, p90_s, p90_s, p90_s, p90_s)
    return MixOutcome(
        hit_ratio, {"host": 10, "disk": 8, "store": 1000}, {"host": 5, "disk": 3, "store": 2000}, first
    )


@pytest.mark.parametrize(
    ("goal", "found", "shortfall"),
    [
        (Goal(hit_ratio=0.3), outcome(0.3), 0.0),
        (Goal(hit_ratio=0.4), outcome(0.3), 0.25),
        (Goal(first_token_p90_s=2.0), outcome(p90_s=2.0), 0.0),
        (Goal(first_token_p90_s=2.0), outcome(p90_s=3.0), 0.5),
        (Goal(0.4, 2.0), outcome(0.3, 3.0), 0.5),
        (Goal(0.4, 2.0), outcome(0.1, 1.0), 0.75),
        (Goal(0.4, 2.0), outcome(0.9, 1.0), 0.0),
    ],
)
def test_a_shortfall_is_the_share_of_the_worst_goal_that_is_missed(
    goal: Goal, found: MixOutcome, shortfall: float
) -> None:
    assert goal.shortfall(found) == pytest.approx(shortfall)
    assert goal.is_reached(found) == (shortfall == 0)


@pytest.mark.parametrize("values", [(0.0, None), (1.1, None), (None, 0.0), (None, float("inf"))])
def test_what_cannot_be_a_goal_is_refused(values: tuple[float | None, float | None]) -> None:
    with pytest.raises(ConfigError):
        Goal(*values)


def test_a_bill_is_capacity_as_sold_and_wear_at_the_rate_of_the_trace() -> None:
    bill = make_bill(MIX, outcome(), block_bytes=GIB, duration_s=8 * 86_400)

    host, disk = bill.media
    assert (host.usd_per_month, host.endurance_years) == (4.0, None)
    assert (disk.used_bytes, disk.sold_bytes) == (4 * GIB, 8 * GIB)
    assert disk.written_bytes_per_day == pytest.approx(GIB)
    # One GiB a day on a disk of 8 GiB that may take 8 GiB a day for 5 years.
    assert disk.endurance_years == pytest.approx(40)
    assert disk.usd_per_month == pytest.approx(8 * 1.0 / 10)
    assert bill.usd_per_month == pytest.approx(4.8)


def test_a_disk_worn_out_in_a_month_is_paid_for_each_month() -> None:
    rated_days = 5 * DAYS_PER_YEAR
    bill = make_bill(
        Mix((Share(DISK, 8),)), outcome(), block_bytes=GIB, duration_s=86_400 / rated_days * 365.25 / 12
    )

    assert bill.media[0].endurance_years == pytest.approx(1 / 12)
    assert bill.usd_per_month == pytest.approx(8.0)


def test_requests_are_paid_for_at_the_rate_of_the_trace() -> None:
    bill = make_bill(Mix((Share(STORE, 1),)), outcome(), block_bytes=GIB, duration_s=SECONDS_PER_MONTH / 3)

    assert bill.usd_per_month == pytest.approx(0.01 + 3 * (5 + 2))


def test_a_trace_of_one_instant_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="give a trace with a duration"):
        make_bill(MIX, outcome(), block_bytes=GIB, duration_s=0)


def test_no_bill_is_below_the_price_of_the_capacity() -> None:
    assert MIX.capacity_usd_per_month(GIB) == pytest.approx(4.8)
    assert MIX.kind == ("host", "disk")
    assert name_of(MIX.kind) == "host + disk"


def test_a_mix_is_simulated_as_a_chain_and_none_as_no_offloading() -> None:
    host = MIX.host_model("arc")

    assert host is not None
    assert (host.num_blocks, host.cache_policy) == (2, "arc")
    assert [(tier.name, tier.num_blocks, tier.speed.latency_s) for tier in host.tiers] == [("disk", 4, 0.001)]
    assert Mix(()).host_model("lru") is None
