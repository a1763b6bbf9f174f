"""What each tenant of requests keeps in host memory and the tiers that count, beside what it may keep.

The bytes are gauges of the engine, the quotas stand in what it says of itself. An engine without tenants has neither,
and nothing is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvtier.quantities import size_in_words

HOST = "host"
HOST_BYTES = "primary.tenant_bytes."
TIER_BYTES = "tenant_bytes"


@dataclass(frozen=True, slots=True)
class TenantState:
    """One tenant, or those together that share a label.

    Attributes:
        name: its label: a listed name, ``(others)`` or ``(none)``.
        held_bytes: what it keeps, by place: "host", or the type of a tier that counts by tenant.
        quota_bytes: what it may keep where room is short, by place; a place without a quota is left out.
    """

    name: str
    held_bytes: Mapping[str, int]
    quota_bytes: Mapping[str, int]


def list_tenants(
    numbers: Mapping[str, float],
    description: Mapping[str, Any],  # Any: JSON
) -> list[TenantState]:
    """Return the tenants of an engine, none where it has none. Pure.

    Args:
        numbers: its counters and gauges by dotted name.
        description: what it says of itself.
    """
    quotas = description.get("tenants") or {}
    if not quotas:
        return []
    parts = (name.split(".", 4) for name in numbers if name.startswith("tier."))
    tiers = sorted({(int(part[1]), part[2]) for part in parts if part[3:4] == [TIER_BYTES]})
    prefixes = [(HOST, HOST_BYTES), *((name, f"tier.{idx}.{name}.{TIER_BYTES}.") for idx, name in tiers)]
    found = []
    for label, quota_bytes in quotas.items():
        held: dict[str, int] = {}
        for place, prefix in prefixes:
            num_bytes = numbers.get(prefix + label)
            if num_bytes is not None:
                held[place] = held.get(place, 0) + int(num_bytes)
        found.append(TenantState(label, held, quota_bytes))
    return found


def draw_tenants(tenants: list[TenantState]) -> Table:
    """Return the table of tenants: a column for each place."""
    places = list(dict.fromkeys(place for tenant in tenants for place in tenant.held_bytes))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("tenant", no_wrap=True)
    for place in places:
        table.add_column(place, justify="right", no_wrap=True)
    for tenant in tenants:
        table.add_row(Text(tenant.name), *(format_held(tenant, place) for place in places))
    return table


def format_held(tenant: TenantState, place: str) -> Text:
    """Return what a tenant keeps in a place, and its quota there if it has one; bold where it is beyond it. Pure."""
    held_bytes = tenant.held_bytes.get(place)
    if held_bytes is None:
        return Text("-")
    quota_bytes = tenant.quota_bytes.get(place)
    if quota_bytes is None:
        return Text(size_in_words(held_bytes))
    style = "bold" if held_bytes > quota_bytes else ""
    return Text(f"{size_in_words(held_bytes)} of {size_in_words(quota_bytes)}", style=style)
