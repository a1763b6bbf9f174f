"""Made-up media that are easy to reckon with: memory that is rented, a disk that wears, a store that counts."""

import dataclasses

from kvtier.planning.prices import Medium

HOST = Medium(
    name="host",
    tier="memory",
    date="2026",
    source="made up",
    read_gb_s=25,
    write_gb_s=25,
    latency_ms=0,
    streams=1,
    usd_per_gib_month=2.0,
)
DISK = dataclasses.replace(
    HOST,
    name="disk",
    usd_per_gib_month=0.0,
    usd_per_gib=1.0,
    amortise_months=10,
    sold_in_gib=8,
    drive_writes_per_day=1,
    warranty_years=5,
    latency_ms=1,
)
STORE = dataclasses.replace(
    HOST, name="store", usd_per_gib_month=0.01, usd_per_1000_writes=5, usd_per_1000_reads=1
)
