"""Write deploy/grafana/kvtier.json, the dashboard, from the declared metric families and the panels below.

    python -m scripts.dashboard           exit status 1 when the file was not as it should be; it is then rewritten

A query names a family in double braces and gets its name on kvtier's own page and the one on vLLM's page, so that the
same dashboard serves both: ``{{kvtier_load_bytes}}`` finds ``vllm:kv_offload_load_bytes_total`` too.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.observe.family import Family, Kind
from kvtier.observe.metrics import FAMILIES

FILE = Path("deploy/grafana/kvtier.json")

SCHEMA_VERSION = 39
"""Of Grafana 11 and later, which read older ones too."""

GRID_COLUMNS = 24
PANEL_COLUMNS, PANEL_ROWS = 8, 8
"""Three panels side by side: fewer need scrolling, more are too narrow for their legends."""

_FAMILY = re.compile(r"\{\{(\w+)\}\}")

_BY_NAME = {family.name: family for family in FAMILIES}

INTERVAL = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Attributes:
        text: PromQL with families in double braces.
        legend: names its series, with labels in double braces.
    """

    text: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel.

    Attributes:
        title: what it shows.
        meaning: what to make of it.
        unit: Grafana's name of the unit.
        queries: its queries.
        most: the largest value that there can be; None: unknown.
        is_stacked: whether its series are parts of a whole.
    """

    title: str
    meaning: str
    unit: str
    queries: tuple[Query, ...]
    most: float | None = None
    is_stacked: bool = False


def rate_of(family: str, *by: str) -> str:
    """Return the growth of a counter per second, summed by labels."""
    return f"sum by ({', '.join(by)}) (rate({{{{{family}}}}}[{INTERVAL}]))"


def quantile_of(quantile: float, family: str, *by: str) -> str:
    """Return a quantile of a histogram, by labels."""
    labels = ", ".join((*by, "le"))
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({{{{{family}}}}}[{INTERVAL}])))"


PROMPT_RATE = (
    "(sum(rate({{kvtier_prompt_tokens}}[" + INTERVAL + "])) or vector(0)) + "
    "(sum(rate({{kvtier_missed_tokens}}[" + INTERVAL + "])) or vector(0))"
)
"""Prompt tokens per second."""

TIERS = "{{tier}} {{tier_index}}"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Prompt tokens": (
        Panel(
            "Hit share by origin",
            "Share of prompt tokens that were not computed. It falls when prompts change, or memory or a tier is lost.",
            "percentunit",
            (Query(f"{rate_of('kvtier_prompt_tokens', 'origin')} / scalar({PROMPT_RATE})", "{{origin}}"),),
            most=1,
            is_stacked=True,
        ),
        Panel(
            "Computed tokens by cause",
            "Why prompt tokens were computed. `kvtier why` says what to do about each cause.",
            "short",
            (Query(rate_of("kvtier_missed_tokens", "cause"), "{{cause}}"),),
            is_stacked=True,
        ),
        Panel(
            "Loaded tokens by tier",
            "Prompt tokens per second that loads brought to the device.",
            "short",
            (Query(rate_of("kvtier_loaded_tokens", "tier"), "{{tier}}"),),
            is_stacked=True,
        ),
    ),
    "Requests": (
        Panel(
            "Requests under way",
            "Requests in the engine, those that wait for a tier, and those per second that waited in vain.",
            "short",
            (
                Query("sum({{kvtier_requests}})", "in the engine"),
                Query("sum({{kvtier_waiting_requests}})", "waiting for a tier"),
                Query(rate_of("kvtier_expired_requests"), "expired per second"),
            ),
        ),
        Panel(
            "Time a request waited",
            "Of requests that waited at all. It adds to their time to first token.",
            "s",
            (
                Query(quantile_of(0.5, "kvtier_request_wait_seconds"), "median"),
                Query(quantile_of(0.99, "kvtier_request_wait_seconds"), "99 %"),
            ),
        ),
        Panel(
            "Time of a search",
            "What each request costs the scheduler.",
            "s",
            (
                Query(quantile_of(0.5, "kvtier_search_seconds"), "median"),
                Query(quantile_of(0.99, "kvtier_search_seconds"), "99 %"),
            ),
        ),
    ),
    "Device and host memory": (
        Panel(
            "Loads and stores",
            "Bytes between device and host memory.",
            "Bps",
            (
                Query(rate_of("kvtier_load_bytes"), "loads"),
                Query(rate_of("kvtier_store_bytes"), "stores"),
            ),
        ),
        Panel(
            "Time of a copy",
            "Longer than usual: the memory bandwidth is shared with something new.",
            "s",
            (
                Query(quantile_of(0.99, "kvtier_load_duration_seconds"), "loads, 99 %"),
                Query(quantile_of(0.99, "kvtier_store_duration_seconds"), "stores, 99 %"),
            ),
        ),
        Panel(
            "Host memory",
            "Full is normal. Pinned near 1 is not: nothing can be stored then.",
            "percentunit",
            (
                Query("sum({{kvtier_host_held_blocks}}) / sum({{kvtier_host_capacity_blocks}})", "held"),
                Query("max({{kvtier_host_pinned_ratio}})", "pinned"),
            ),
            most=1,
        ),
        Panel(
            "Evictions",
            "Blocks per second that left host memory and the tiers.",
            "short",
            (
                Query(rate_of("kvtier_host_evicted_blocks"), "host"),
                Query(rate_of("kvtier_tier_evicted_blocks", "tier", "tier_index"), TIERS),
            ),
        ),
        Panel(
            "Failures",
            "Jobs per second that failed; their requests are computed.",
            "short",
            (
                Query(rate_of("kvtier_failed_load_jobs"), "loads"),
                Query(rate_of("kvtier_failed_store_jobs"), "stores"),
                Query(rate_of("kvtier_refused_stores"), "no room for a store"),
            ),
        ),
    ),
    "Secondary tiers": (
        Panel(
            "Reads",
            "Bytes from a tier to host memory.",
            "Bps",
            (Query(rate_of("kvtier_tier_read_bytes", "tier", "tier_index"), TIERS),),
        ),
        Panel(
            "Writes",
            "Bytes from host memory to a tier.",
            "Bps",
            (Query(rate_of("kvtier_tier_write_bytes", "tier", "tier_index"), TIERS),),
        ),
        Panel(
            "Promotion latency",
            "From the submission of a load to its end. Beyond `lookup_deadline_s` requests compute instead.",
            "s",
            (
                Query(
                    quantile_of(0.5, "kvtier_tier_promotion_seconds", "tier", "tier_index"),
                    f"{TIERS}, median",
                ),
                Query(
                    quantile_of(0.99, "kvtier_tier_promotion_seconds", "tier", "tier_index"), f"{TIERS}, 99 %"
                ),
            ),
        ),
        Panel(
            "Lookup latency",
            "Until a backend has answered. Tiers that know what they hold ask none.",
            "s",
            (Query(quantile_of(0.99, "kvtier_tier_lookup_seconds", "tier", "tier_index"), f"{TIERS}, 99 %"),),
        ),
        Panel(
            "Queue",
            "Blocks that wait for a thread of the tier, and blocks that it is still to get.",
            "short",
            (
                Query("sum by (tier, tier_index) ({{kvtier_tier_queued_blocks}})", f"{TIERS}, queued"),
                Query("sum by (tier, tier_index) ({{kvtier_tier_pending_blocks}})", f"{TIERS}, pending"),
            ),
        ),
        Panel(
            "Fill",
            "Blocks of this engine's namespace, as a share of what the tier can hold.",
            "percentunit",
            (
                Query(
                    "sum by (tier, tier_index) ({{kvtier_tier_indexed_blocks}}) / "
                    "sum by (tier, tier_index) ({{kvtier_tier_capacity_blocks}})",
                    TIERS,
                ),
            ),
            most=1,
        ),
        Panel(
            "Breaker",
            "1: the tier is left out after failures, and probed.",
            "bool",
            (
                Query("max by (tier, tier_index) ({{kvtier_tier_breaker_open}})", f"{TIERS}, breaker"),
                Query(
                    "max by (tier, tier_index) ({{kvtier_tier_out_of_service}})", f"{TIERS}, out of service"
                ),
            ),
            most=1,
        ),
        Panel(
            "Blocks that were not stored",
            "Per second. Declined: no room. Too slow: they left host memory before the tier got them.",
            "short",
            (
                Query(rate_of("kvtier_tier_declined_blocks", "tier", "tier_index"), f"{TIERS}, declined"),
                Query(
                    rate_of("kvtier_tier_declined_cascade_blocks", "tier", "tier_index"), f"{TIERS}, too slow"
                ),
                Query(rate_of("kvtier_tier_store_errors", "tier", "tier_index"), f"{TIERS}, errors"),
            ),
        ),
        Panel(
            "Blocks that were not loaded",
            "Per second, by cause. Damage is never normal.",
            "short",
            (Query(rate_of("kvtier_tier_failed_blocks", "tier", "cause"), "{{tier}}, {{cause}}"),),
        ),
        Panel(
            "Late and left out",
            "Requests per second that waited for a tier in vain, and lookups that were not made.",
            "short",
            (
                Query(
                    rate_of("kvtier_tier_overdue_requests", "tier", "tier_index"), f"{TIERS}, late requests"
                ),
                Query(rate_of("kvtier_tier_left_out_lookups", "tier", "tier_index"), f"{TIERS}, left out"),
            ),
        ),
    ),
}
"""The panels, in rows under a heading."""


def main() -> int:
    """Rewrite the file; return 1 when that changed it."""
    before = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    after = json.dumps(make_dashboard(), indent=1) + "\n"
    FILE.write_text(after, encoding="utf-8")
    print(f"{FILE}: {'as the code says' if after == before else 'rewritten'}")
    return int(after != before)


def make_dashboard() -> dict[str, Any]:  # Any: JSON
    """Return the dashboard. Pure."""
    return {
        "title": "kvtier",
        "uid": "kvtier",
        "description": "Where prompts come from, what the tiers do, and what fails.",
        "tags": ["kvtier", "kv-cache"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [data_source(), engines()]},
        "panels": list(place(ROWS)),
    }


def data_source() -> dict[str, Any]:  # Any: JSON
    """Return the variable that chooses the Prometheus."""
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def engines() -> dict[str, Any]:  # Any: JSON
    """Return the variable that chooses the engines."""
    query = f"label_values({_BY_NAME['kvtier_host_capacity_blocks'].sample_name}, instance)"
    return {
        "name": "instance",
        "label": "Engine",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": "instances"},
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def place(rows: dict[str, tuple[Panel, ...]]) -> Iterable[dict[str, Any]]:  # Any: JSON
    """Yield each heading and its panels, with their places on the grid."""
    number, y = 1, 0
    for heading, panels in rows.items():
        yield {
            "id": number,
            "type": "row",
            "title": heading,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1},
        }
        number, y = number + 1, y + 1
        for position, panel in enumerate(panels):
            column, row = position % 3, position // 3
            grid = {
                "x": column * PANEL_COLUMNS,
                "y": y + row * PANEL_ROWS,
                "w": PANEL_COLUMNS,
                "h": PANEL_ROWS,
            }
            yield {"id": number, "gridPos": grid, **describe(panel)}
            number += 1
        y += -(-len(panels) // 3) * PANEL_ROWS


def describe(panel: Panel) -> dict[str, Any]:  # Any: JSON
    """Return a panel without its place. Pure."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.is_stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 50}
    limits = {"min": 0} if panel.most is None else {"min": 0, "max": panel.most}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom, **limits}, "overrides": []},
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + position), "datasource": source, "expr": expression_of(query.text),
             "legendFormat": query.legend}
            for position, query in enumerate(panel.queries)
        ],
    }  # fmt: skip


def expression_of(text: str, matcher: str = 'instance=~"$instance"') -> str:
    """Return a query as Prometheus reads it. Pure.

    Args:
        text: PromQL with families in double braces.
        matcher: what else the series of each family must match.

    Raises:
        KeyError: a family is not declared.
    """

    def selector(found: re.Match[str]) -> str:
        family = _BY_NAME[found[1]]
        ending = "_bucket" if family.kind is Kind.HISTOGRAM else ""
        names = names_of(family)
        if len(names) == 1:
            return f"{names[0]}{ending}{{{matcher}}}"
        either = "|".join(name + ending for name in names)
        return f'{{__name__=~"{either}",{matcher}}}'

    return _FAMILY.sub(selector, text)


def names_of(family: Family) -> Sequence[str]:
    """Return the names under which a family may be scraped, each once. Pure."""
    return list(dict.fromkeys((family.sample_name, family.vllm_sample_name)))


if __name__ == "__main__":
    sys.exit(main())
