"""Prices are read as they stand, arithmetic on them is that of a bill, and a wrong file is refused in words."""

import math
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tests.sim import media

from kvtier.errors import ConfigError, KVTierError, UnknownNameError
from kvtier.planning.prices import DAYS_PER_YEAR, GIB, parse_prices, read_prices

DISK = replace(media.DISK, usd_per_gib=0.36, amortise_months=36, sold_in_gib=1000)
STORE = replace(
    media.STORE,
    usd_per_gib_month=0.02,
    usd_per_month=7,
    usd_per_1000_writes=0.005,
    usd_per_1000_reads=0.0004,
    usd_per_gib_written=0.5,
    usd_per_gib_read=0.25,
)

Table = dict[str, Any]  # Any: TOML


def tables() -> Table:
    """Return the smallest price file that is whole."""
    host = {"name": "host", "tier": "memory", "date": "2026", "source": "made up", "usd_per_gib_month": 1.0}
    speed = {"read_gb_s": 25.0, "write_gb_s": 25.0, "latency_ms": 0, "streams": 1}
    return {"gpu": {"usd_per_hour": 3, "date": "2026", "source": "made up"}, "media": [{**host, **speed}]}


def test_capacity_is_paid_for_in_whole_pieces() -> None:
    assert DISK.sold_bytes(1) == 1000 * GIB
    assert DISK.sold_bytes(1000 * GIB + 1) == 2000 * GIB
    assert STORE.sold_bytes(0) == 0
    assert DISK.capacity_usd_per_month(500 * GIB) == pytest.approx(1000 * 0.36 / 36)
    assert STORE.capacity_usd_per_month(500 * GIB) == pytest.approx(500 * 0.02 + 7)


def test_a_disk_lasts_its_rated_bytes_over_the_bytes_written() -> None:
    rated = 1000 * GIB * 1 * 5 * DAYS_PER_YEAR
    a_drive_a_day = 1000 * GIB / 86_400

    assert DISK.rated_write_bytes(500 * GIB) == rated
    assert DISK.endurance_years(500 * GIB, a_drive_a_day) == pytest.approx(5)
    assert DISK.endurance_years(500 * GIB, 10 * a_drive_a_day) == pytest.approx(0.5)
    assert DISK.endurance_years(1500 * GIB, a_drive_a_day) == pytest.approx(10)
    assert DISK.endurance_years(500 * GIB, 0) == math.inf
    assert STORE.endurance_years(500 * GIB, a_drive_a_day) is None


def test_a_disk_that_wears_out_before_it_is_paid_off_costs_more_a_month() -> None:
    paid_off = DISK.capacity_usd_per_month(GIB)

    assert DISK.capacity_usd_per_month(GIB, endurance_years=10) == paid_off
    assert DISK.capacity_usd_per_month(GIB, endurance_years=1.5) == pytest.approx(2 * paid_off)


def test_blocks_cost_by_the_request_and_by_the_byte() -> None:
    usd = STORE.traffic_usd(written_blocks=2000, read_blocks=5000, block_bytes=GIB // 2)

    assert usd == pytest.approx(2 * 0.005 + 5 * 0.0004 + 1000 * 0.5 + 2500 * 0.25)


def test_the_prices_that_come_with_kvtier_are_whole_and_say_their_source() -> None:
    prices = read_prices()

    assert {"host", "nvme", "block", "object", "valkey", "remote"} <= prices.media.keys()
    assert prices.gpu_usd_per_hour > 0
    for medium in prices.media.values():
        assert len(medium.source) > 60
        assert medium.date[:2] == "20"


def test_media_are_chosen_by_name_and_host_memory_is_always_there() -> None:
    prices = read_prices()

    assert [medium.name for medium in prices.choose(["object", "host", "nvme"])] == ["object", "nvme"]
    assert "host" not in [medium.name for medium in prices.choose(None)]
    with pytest.raises(UnknownNameError, match="did you mean 'nvme'"):
        prices.choose(["nvmee"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": " "}, "source='': each price needs"),
        ({"date": 2026}, r"medium 'host'.date=2026: must be text"),
        ({"read_gb_s": 0}, r"host.read_gb_s=0: must be a finite number above zero"),
        ({"read_gb_s": "fast"}, r"host.read_gb_s='fast'"),
        ({"latency_ms": -1}, r"host.latency_ms=-1: must be a finite number from zero"),
        ({"usd_per_gib_month": math.inf}, r"host.usd_per_gib_month=inf"),
        ({"usd_per_gib": 3.0}, "either usd_per_gib_month, a rent, or usd_per_gib"),
        ({"usd_per_gib_month": 0.0}, "either usd_per_gib_month"),
        ({"drive_writes_per_day": 1.0}, "endurance needs both"),
        ({"usd_per_gb": 1.0}, "unknown field of medium 'host' 'usd_per_gb': did you mean 'usd_per_gib'"),
        ({"name": "disk"}, "host memory is missing"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(change: Table, message: str) -> None:
    found = tables()
    found["media"][0] |= change

    with pytest.raises(KVTierError, match=message):
        parse_prices(found)


def test_a_missing_field_and_a_name_given_twice_are_refused() -> None:
    found = tables()
    del found["media"][0]["streams"]
    with pytest.raises(ConfigError, match=r"medium 'host'.streams=None: is missing"):
        parse_prices(found)
    with pytest.raises(ConfigError, match="is listed twice"):
        parse_prices({**tables(), "media": tables()["media"] * 2})
    with pytest.raises(ConfigError, match=r"price list.gpu=None: is missing"):
        parse_prices({"media": []})


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    with pytest.raises(ConfigError, match=r"--prices=.*cannot be read"):
        read_prices(path)
    path.write_text("[gpu")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_prices(path)
    path.write_text(resources.files("kvtier.planning").joinpath("prices.toml").read_text())
    assert read_prices(path) == read_prices() == parse_prices(tomllib.loads(path.read_text()))
