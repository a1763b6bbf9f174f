"""The tables of the page: rows of cells, and their HTML. Text from outside is escaped here."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.cli.simulate.comparison import Comparison
from kvtier.sim.results import DEVICE, HOST, Simulation
from kvtier.sim.sweep import Case, Size

WATCHED = {
    "breaker_openings": "times the tier was overloaded or failing and skipped",
    "declined_cascades": "blocks the tier could not take at the time",
    "lookups_left_out": "searches that skipped the tier",
    "overdue_requests": "requests that waited for the tier longer than their limit",
    "errors": "jobs that ended with an error",
    "refused_by_admission": "blocks evicted from host memory without a write, too unlikely to be reused",
    "not_loaded_tokens": "tokens found in the tier and computed, which was faster",
    "expired_requests": "requests that stopped waiting for a tier",
    "failed_promotions": "promotions that failed",
    "refused": "blocks that the policy did not admit",
    "refused_stores": "stores without room in host memory",
    "flushed_store_jobs": "stores that a prompt had to wait for",
    "lost_load_jobs": "loads whose blocks were gone",
}
"""Counter without its place -> its meaning. Each counts work that was skipped or waited for."""


_NUMBER = ' class="number"'


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        text: what is shown.
        value: the number behind it, exact; None for text.
    """

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        name: unique on a page, of letters, digits and "-".
        caption: what it is.
        headings: of the columns.
        rows: cells, as many as there are headings.
    """

    name: str
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def tabulate_results(comparison: Comparison) -> Table:
    """Return hits, the bound and times, one row per simulation. Pure."""
    sources = (DEVICE, HOST, *(tier.name for tier in comparison.host.tiers))
    place = (f"{comparison.sweep.place} size",) if comparison.sweep else ()
    headings = (
        *place, "policy", *sources, "not computed", "at most", "p50 s", "p90 s", "p99 s", "queue p90 s", "served",
        "rejected",
    )  # fmt: skip
    rows = []
    for case, one in zip(comparison.cases, comparison.found, strict=True):
        size = (_size_cell(case, comparison),) if comparison.sweep else ()
        ratios = [*(one.hit_ratio(source) for source in sources), one.saved_ratio, one.bound_ratio or 0.0]
        first, queue = one.total.first_token, one.total.queue
        times_s = [first.p50_s, first.p90_s, first.p99_s, queue.p90_s]
        measured = [Cell(f"{ratio:.1%}", ratio) for ratio in ratios]
        measured += [Cell(f"{time_s:.2f}", time_s) for time_s in times_s]
        if not one.total.num_requests:
            measured = [Cell("-")] * len(measured)
        counts = [_count(one.total.num_requests), _count(one.num_rejected)]
        rows.append((*size, Cell(case.policy), *measured, *counts))
    return Table("results", "Where prompt tokens came from, and times to first token", headings, tuple(rows))


def tabulate_traffic(comparison: Comparison, size: Size | None, name: str) -> Table:
    """Return the traffic of host memory and each tier. Pure."""
    headings = (
        "policy", "tier", "blocks", "written GB", "writes per unique block", "read GB", "link busy", "most queued",
    )  # fmt: skip
    rows = [
        (
            Cell(case.policy),
            Cell(tier.name),
            _count(tier.capacity_blocks),
            Cell(f"{tier.written_bytes / 1e9:,.1f}", tier.written_bytes / 1e9),
            Cell(f"{tier.writes_per_unique_block:.2f}", tier.writes_per_unique_block),
            Cell(f"{tier.read_bytes / 1e9:,.1f}", tier.read_bytes / 1e9),
            Cell(f"{tier.busy_ratio:.1%}", tier.busy_ratio),
            _count(tier.max_queued_blocks),
        )
        for case, one in comparison.pairs(size)
        for tier in one.tiers
    ]
    return Table(f"traffic-{name}", "Traffic of host memory and each tier", headings, tuple(rows))


def tabulate_watched(comparison: Comparison) -> Table | None:
    """Return the counters of skipped or delayed work; None when all are zero. Pure."""
    rows = [
        (Cell(label), Cell(counter), _count(value), Cell(WATCHED[_name_of(counter)]))
        for label, one in comparison.by_label.items()
        for counter, value in _watched(one)
    ]
    if not rows:
        return None
    headings = ("simulation", "counter", "value", "what it counts")
    return Table("watched", "Counters of the production code that are not zero", headings, tuple(rows))


def render_table(table: Table) -> str:
    """Return a table as HTML. Pure."""
    numeric = [any(cell.value is not None for cell in column) for column in zip(*table.rows, strict=True)]
    head = "".join(
        f'<th scope="col"{_NUMBER if is_number else ""}>{html.escape(heading)}</th>'
        for heading, is_number in zip(table.headings, numeric, strict=True)
    )
    body = "\n".join(f"<tr>{_render_cells(row)}</tr>" for row in table.rows)
    return (
        f'<div class="scroll"><table id="{table.name}"><caption>{html.escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def render_facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and values as a list of definitions. Pure."""
    return (
        "<dl>"
        + "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts)
        + "</dl>"
    )


def _render_cells(row: Sequence[Cell]) -> str:
    return "".join(
        f"<td>{html.escape(cell.text)}</td>"
        if cell.value is None
        else f'<td{_NUMBER} data-value="{cell.value!r}">{html.escape(cell.text)}</td>'
        for cell in row
    )


def _size_cell(case: Case, comparison: Comparison) -> Cell:
    if case.size is None:
        return Cell("-")
    return Cell(case.size.label, float(case.size.num_blocks * comparison.engine.block_bytes))


def _count(value: float) -> Cell:
    return Cell(f"{value:,.0f}", value)


def _watched(one: Simulation) -> list[tuple[str, float]]:
    return [
        (counter, value) for counter, value in one.counters.items() if value and _name_of(counter) in WATCHED
    ]


def _name_of(counter: str) -> str:
    """Return a counter's name without its place: the place comes first, but last in the connector's counters."""
    owner, *names = counter.split(".")
    return names[0 if owner == "connector" else -1]
