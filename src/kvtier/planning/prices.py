"""Prices, speeds and lifetimes of media, read from a price file and validated.

`kvtier plan` uses ``prices.toml`` beside this module by default. Every entry has the source and the date of its
numbers; an entry without them is refused.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from kvtier.cost_model import LinkRate, make_link_rate
from kvtier.errors import ConfigError, UnknownNameError
from kvtier.input_files import read_text_file
from kvtier.redaction import shorten
from kvtier.sim.link import LinkSpeed

GIB = 2**30
GB = 10**9
HOURS_PER_MONTH = 730.0
SECONDS_PER_MONTH = HOURS_PER_MONTH * 3600
DAYS_PER_YEAR = 365.25
SECONDS_PER_DAY = 86_400
MONTHS_PER_YEAR = 12

HOST = "host"
"""The name of the medium that is host memory; every mix has some of it."""

_AMOUNTS = (
    "latency_ms",
    "usd_per_gib_month",
    "usd_per_gib",
    "usd_per_month",
    "usd_per_1000_writes",
    "usd_per_1000_reads",
    "usd_per_gib_written",
    "usd_per_gib_read",
)


@dataclass(frozen=True, slots=True)
class Medium:
    """A medium that stores blocks.

    Attributes:
        name: its name in tables and in ``--media``; "host" is host memory.
        tier: description, with the kvtier tier that uses it.
        date: when the numbers were published.
        source: where they were read, and which of them are assumptions.
        read_gb_s: bandwidth of reads, 10^9 bytes a second.
        write_gb_s: bandwidth of writes, 10^9 bytes a second.
        latency_ms: milliseconds until the first byte of a block.
        streams: concurrent transfers of blocks.
        usd_per_gib_month: rent; 0 if it is bought.
        usd_per_gib: purchase, spread over ``amortise_months`` or the time until it is worn out, if that is shorter.
        amortise_months: months that a purchase is spread over.
        usd_per_month: fixed cost, independent of capacity.
        usd_per_1000_writes: cost of 1000 written blocks.
        usd_per_1000_reads: cost of 1000 read blocks.
        usd_per_gib_written: cost of the bytes of written blocks.
        usd_per_gib_read: cost of the bytes of read blocks.
        sold_in_gib: capacity is sold in multiples of it.
        max_gib: largest capacity; None: no limit.
        drive_writes_per_day: rated overwrites per day during ``warranty_years``; None if it does not wear.
        warranty_years: years of the rating.

    Raises:
        ConfigError: a value is not valid.
    """

    name: str
    tier: str
    date: str
    source: str
    read_gb_s: float
    write_gb_s: float
    latency_ms: float
    streams: int
    usd_per_gib_month: float = 0.0
    usd_per_gib: float = 0.0
    amortise_months: float = 36.0
    usd_per_month: float = 0.0
    usd_per_1000_writes: float = 0.0
    usd_per_1000_reads: float = 0.0
    usd_per_gib_written: float = 0.0
    usd_per_gib_read: float = 0.0
    sold_in_gib: float = 1.0
    max_gib: float | None = None
    drive_writes_per_day: float | None = None
    warranty_years: float | None = None

    def __post_init__(self) -> None:
        for name in ("name", "tier", "date", "source"):
            if not getattr(self, name).strip():
                raise ConfigError(name, "", "each price needs a description, a source and a date: add them")
        for name in ("read_gb_s", "write_gb_s", "streams", "amortise_months", "sold_in_gib"):
            _check(f"{self.name}.{name}", getattr(self, name), is_zero_allowed=False)
        for name in _AMOUNTS:
            _check(f"{self.name}.{name}", getattr(self, name), is_zero_allowed=True)
        for name in ("max_gib", "drive_writes_per_day", "warranty_years"):
            if getattr(self, name) is not None:
                _check(f"{self.name}.{name}", getattr(self, name), is_zero_allowed=False)
        if (self.drive_writes_per_day is None) != (self.warranty_years is None):
            remedy = "endurance needs both drive_writes_per_day and warranty_years"
            raise ConfigError(f"{self.name}.warranty_years", self.warranty_years, remedy)
        if bool(self.usd_per_gib_month) == bool(self.usd_per_gib):
            remedy = "give either usd_per_gib_month, a rent, or usd_per_gib, a purchase"
            raise ConfigError(f"{self.name}.usd_per_gib", self.usd_per_gib, remedy)

    @property
    def speed(self) -> LinkSpeed:
        """The link to it, for a simulation."""
        return LinkSpeed(self.read_gb_s * GB, self.write_gb_s * GB, self.latency_ms / 1000, self.streams)

    def read_rate(self, block_bytes: int) -> LinkRate:
        """Return the rate of reading blocks from it, for the cost model. Pure."""
        return make_link_rate(
            self.read_gb_s * GB, self.latency_ms / 1000, block_bytes=block_bytes, num_streams=self.streams
        )

    def sold_bytes(self, num_bytes: int) -> int:
        """Return the sold capacity that holds ``num_bytes``; 0 for 0. Pure."""
        steps = math.ceil(num_bytes / (self.sold_in_gib * GIB))
        return math.ceil(steps * self.sold_in_gib * GIB)

    def largest_sold_bytes(self, max_bytes: float) -> int:
        """Return the largest sold capacity within ``max_bytes``; 0 when there is none. Pure."""
        return math.floor(math.floor(max_bytes / (self.sold_in_gib * GIB)) * self.sold_in_gib * GIB)

    def rated_write_bytes(self, num_bytes: int) -> float | None:
        """Return the rated writes in bytes of what is sold for ``num_bytes``; None when it does not wear. Pure."""
        if self.drive_writes_per_day is None or self.warranty_years is None:
            return None
        return self.sold_bytes(num_bytes) * self.drive_writes_per_day * self.warranty_years * DAYS_PER_YEAR

    def endurance_years(self, num_bytes: int, written_bytes_per_s: float) -> float | None:
        """Return the years until it is worn out: rated bytes over bytes written in a year.

        None when it does not wear, infinity when nothing is written. Pure.
        """
        rated = self.rated_write_bytes(num_bytes)
        if rated is None:
            return None
        written = written_bytes_per_s * SECONDS_PER_DAY * DAYS_PER_YEAR
        return rated / written if written else math.inf

    def capacity_usd_per_month(self, num_bytes: int, endurance_years: float | None = None) -> float:
        """Return the cost of a capacity per month, without traffic.

        A purchase that is worn out before it is paid off is spread over the shorter time. Pure.
        """
        gib = self.sold_bytes(num_bytes) / GIB
        months = self.amortise_months
        if endurance_years is not None:
            months = min(months, endurance_years * MONTHS_PER_YEAR)
        purchase = gib * self.usd_per_gib / months if self.usd_per_gib else 0.0
        return gib * self.usd_per_gib_month + purchase + self.usd_per_month

    def traffic_usd(self, *, written_blocks: float, read_blocks: float, block_bytes: int) -> float:
        """Return the cost of written and read blocks. Pure."""
        requests = written_blocks * self.usd_per_1000_writes + read_blocks * self.usd_per_1000_reads
        moved = written_blocks * self.usd_per_gib_written + read_blocks * self.usd_per_gib_read
        return requests / 1000 + moved * block_bytes / GIB


@dataclass(frozen=True, slots=True)
class PriceList:
    """The prices of one file.

    Attributes:
        media: by name.
        gpu_usd_per_hour: price of one GPU.
        gpu_source: source and date of that price.
    """

    media: Mapping[str, Medium]
    gpu_usd_per_hour: float
    gpu_source: str

    def choose(self, names: Sequence[str] | None) -> tuple[Medium, ...]:
        """Return the media with these names, or all for None, without host memory.

        Raises:
            UnknownNameError: a medium does not exist.
        """
        for name in names or ():
            if name not in self.media:
                raise UnknownNameError("medium for --media", name, self.media)
        chosen = self.media if names is None else dict.fromkeys(names)
        return tuple(self.media[name] for name in chosen if name != HOST)


def read_prices(path: Path | None = None) -> PriceList:
    """Return the prices of a file; None: of kvtier's own.

    Raises:
        ConfigError: the file cannot be read, or an entry is incomplete or not valid.
        UnknownNameError: an entry has an unknown field.
    """
    shown = "prices.toml" if path is None else str(path)
    try:
        if path is None:
            text = resources.files("kvtier.planning").joinpath("prices.toml").read_text(encoding="utf-8")
        else:
            text = read_text_file("--prices", path)
        return parse_prices(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigError("--prices", shown, f"is not TOML ({reason})") from error


def parse_prices(found: Mapping[str, Any]) -> PriceList:
    """Return the prices of a file with this content. Pure.

    Raises:
        ConfigError: see ``read_prices``.
        UnknownNameError: see ``read_prices``.
    """
    _check_fields("price list", found, {"gpu", "media"}, {"gpu", "media"})
    gpu, entries = found["gpu"], found["media"]
    if not isinstance(gpu, dict):
        raise ConfigError("gpu", gpu, "must be a table [gpu]")
    _check_fields("gpu", gpu, {"usd_per_hour", "date", "source"}, {"usd_per_hour", "date", "source"})
    _check("gpu.usd_per_hour", gpu["usd_per_hour"], is_zero_allowed=True)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("media", entries, "must be tables [[media]]")
    media: dict[str, Medium] = {}
    for entry in entries:
        medium = _parse_medium(entry)
        if medium.name in media:
            raise ConfigError("media", medium.name, "is listed twice: give each medium its own name")
        media[medium.name] = medium
    if HOST not in media:
        raise ConfigError(
            "media", list(media), f"host memory is missing: add a [[media]] with name = {HOST!r}"
        )
    return PriceList(media, float(gpu["usd_per_hour"]), f"{gpu['source']} ({gpu['date']})")


def _parse_medium(entry: Mapping[str, Any]) -> Medium:
    needed = {field.name for field in fields(Medium) if field.default is MISSING}
    name = entry.get("name")
    label = f"medium {shorten(name)}" if isinstance(name, str) else "medium"
    _check_fields(label, entry, needed, {field.name for field in fields(Medium)})
    for field in fields(Medium):
        value = entry.get(field.name)
        if field.type is str and not isinstance(value, str):
            raise ConfigError(f"{label}.{field.name}", value, "must be text; write a date in quotes")
    return Medium(**entry)


def _check_fields(what: str, entry: Mapping[str, Any], needed: set[str], known: set[str]) -> None:
    for name in entry:
        if name not in known:
            raise UnknownNameError(f"field of {what}", name, known)
    for name in sorted(needed - entry.keys()):
        raise ConfigError(f"{what}.{name}", None, "is missing: add it to the price file")


def _check(name: str, value: object, *, is_zero_allowed: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not is_zero_allowed):  # type: ignore[operator]  # a number, see left
        least = "from zero" if is_zero_allowed else "above zero"
        raise ConfigError(name, value, f"must be a finite number {least}")
