"""The tables of a comparison, as values."""

from kvtier.cli.page.tables import Cell, Table
from kvtier.cli.simulate.comparison import Comparison
from kvtier.misses import MISSED_TOKENS
from kvtier.sim.results import DEVICE, HOST, Simulation
from kvtier.sim.sweep import Case

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


def tabulate_results(comparison: Comparison) -> Table:
    """Return hits, the bound and times, one row per simulation. Pure."""
    sources = (DEVICE, HOST, *(tier.name for tier in comparison.host.tiers))
    place = (f"{comparison.sweep.place} size",) if comparison.sweep else ()
    headings = (
        *place, "policy", *sources, "not computed", "at most",
        *(("p50 s", "p90 s", "p99 s", "queue p90 s") if comparison.has_times else ()), "served", "rejected",
    )  # fmt: skip
    rows = []
    for case, one in zip(comparison.cases, comparison.found, strict=True):
        size = (_size_cell(case, comparison),) if comparison.sweep else ()
        ratios = [
            *(one.hit_ratio(source) for source in sources),
            one.not_computed_ratio,
            one.at_most_ratio or 0.0,
        ]
        first, queue = one.total.first_token, one.total.queue
        times_s = [first.p50_s, first.p90_s, first.p99_s, queue.p90_s] if comparison.has_times else []
        measured = [Cell(f"{ratio:.1%}", ratio) for ratio in ratios]
        measured += [Cell(f"{time_s:.2f}", time_s) for time_s in times_s]
        if not one.total.num_requests:
            measured = [Cell("-")] * len(measured)
        counts = [_count(one.total.num_requests), _count(one.num_rejected)]
        rows.append((*size, Cell(case.policy), *measured, *counts))
    return Table(
        "results",
        f"Where prompt tokens came from{', and times to first token' if comparison.has_times else ''}",
        headings,
        tuple(rows),
    )


def tabulate_traffic(comparison: Comparison) -> Table:
    """Return the traffic of host memory and each tier, one row for each simulation and place. Pure."""
    headings = (
        "simulation", "tier", "blocks", "written GB", "writes per unique block", "read GB", "link busy", "most queued",
    )  # fmt: skip
    rows = [
        (
            Cell(label),
            Cell(tier.name),
            _count(tier.capacity_blocks),
            Cell(f"{tier.written_bytes / 1e9:,.1f}", tier.written_bytes / 1e9),
            Cell(f"{tier.writes_per_unique_block:.2f}", tier.writes_per_unique_block),
            Cell(f"{tier.read_bytes / 1e9:,.1f}", tier.read_bytes / 1e9),
            Cell(f"{tier.busy_ratio:.1%}", tier.busy_ratio),
            _count(tier.max_queued_blocks),
        )
        for label, one in comparison.by_label.items()
        for tier in one.tiers
    ]
    return Table("traffic", "Traffic of host memory and each tier", headings, tuple(rows))


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


def tabulate_misses(comparison: Comparison) -> Table | None:
    """Return why prompt tokens were computed, one row for each cause; None where no cause was counted. Pure."""
    missed = {
        label: {
            name.removeprefix(MISSED_TOKENS): value
            for name, value in one.counters.items()
            if name.startswith(MISSED_TOKENS)
        }
        for label, one in comparison.by_label.items()
    }
    labels = [label for label, causes in missed.items() if causes]
    causes = sorted(
        {cause for label in labels for cause in missed[label]},
        key=lambda cause: -max(missed[label].get(cause, 0.0) for label in labels),
    )
    if not causes:
        return None
    totals = {label: comparison.by_label[label].total.num_prompt_tokens for label in labels}
    rows = []
    for cause in causes:
        ratios = [missed[label].get(cause, 0.0) / max(1, totals[label]) for label in labels]
        rows.append((Cell(cause.replace(".", " ")), *(Cell(f"{ratio:.1%}", ratio) for ratio in ratios)))
    return Table("misses", "Share of prompt tokens computed, by cause", ("cause", *labels), tuple(rows))


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
