"""The page of ``kvtier plan --html``: verdict, plots of what the trace needs and what was tried, assumptions."""

import html
import importlib.metadata
import shlex
from collections.abc import Iterator, Sequence

from kvtier.cli.output import format_change
from kvtier.cli.page.charts import BarChart, LineChart, Mark, Panel, PlotLine, Segment
from kvtier.cli.page.document import Document, render_list
from kvtier.cli.page.tables import Cell, Table, render_facts, render_headline, render_table
from kvtier.cli.plan.run import PlanRun
from kvtier.cli.plan.tables import answer
from kvtier.cost_model import compute_s, load_s
from kvtier.planning.plan import PlanRequest, describe, format_bytes, links_of, prefill_rate_of
from kvtier.planning.tier_mix import name_of

TICK_RATIO = 1.5
"""Ratio of neighbouring labels on a logarithmic axis, at least: those of a doubling fit side by side."""

LENGTHS = tuple(2**power for power in range(8, 18))
"""Prompt lengths of the plot of loading and computing: 256 to 131,072 tokens."""


def make_page(run: PlanRun) -> str:
    """Return the page.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    document = Document(f"kvtier plan: {run.trace_name}")
    verdict = f'<p class="verdict">{html.escape(run.verdict)}</p>'
    document.add("", verdict, render_headline(list_headline(run)))
    if run.plan.shown:
        document.add("Mixes", render_table(tabulate_mixes(run)), document.figure(plot_mixes(run)))
    document.add("Host memory alone", document.figure(plot_curve(run)), render_table(tabulate_curve(run)))
    document.add("Blocks in use", document.figure(plot_working_sets(run)))
    document.add("Load or compute", document.figure(plot_loading(run.request)))
    document.add("What was found", render_list(answer(run.request, run.plan)))
    document.add("What was planned", render_facts(list_facts(run)))
    document.add("What the numbers assume", render_list(run.assumptions))
    return document.render()


def list_headline(run: PlanRun) -> Iterator[tuple[str, str]]:
    """Yield the headline numbers and what they are. Pure."""
    plan, request = run.plan, run.request
    if plan.shown and plan.without is not None:
        best = plan.shown[0]
        yield f"${best.candidate.bill.usd_per_month:,.0f}", "a month for the first mix"
        yield f"{plan.without.hit_ratio:.1%} → {best.timed.hit_ratio:.1%}", "of prompt tokens not computed"
        before, after = plan.without.first_token, best.timed.first_token
        if before is not None and after is not None:
            change = format_change(before.p50_s, after.p50_s)
            yield change.replace("->", "→"), "median time to first token"
        yield f"{best.saved_gpu_hours_per_month:,.0f} h", "of GPU time saved a month"
    elif run.knee is not None:
        yield format_bytes(run.knee.num_blocks * request.engine.block_bytes), "of host memory: the knee"
        yield f"{run.knee.hit_ratio:.1%}", "of blocks found with it"
    yield format_bytes(plan.unique_bytes), "of distinct blocks in the trace"


def list_facts(run: PlanRun) -> Iterator[tuple[str, str]]:
    """Yield names and values of what was planned. Pure."""
    trace, engine = run.request.trace, run.request.engine
    yield "command", shlex.join(run.command)
    yield "kvtier", importlib.metadata.version("kvtier")
    yield "trace", run.trace_name
    yield "requests", f"{len(trace.requests):,} in {trace.duration_s:,.0f} s"
    yield "a token", f"{run.plan.bytes_per_token:,} bytes ({run.request.shape.kv_dtype})"
    yield "device", format_bytes(engine.num_device_blocks * engine.block_bytes)
    yield "prefill", f"{engine.prefill_tokens_per_s:,.0f} prompt tokens per second, all requests together"


def plot_curve(run: PlanRun) -> LineChart:
    """Return the hits of host memory alone by capacity, with the knee. Pure."""
    block_bytes = run.request.engine.block_bytes
    x = tuple(float(point.num_blocks * block_bytes) for point in run.plan.curve)
    hits = tuple(100 * point.hit_ratio for point in run.plan.curve)
    knee = run.knee
    mark = None
    if knee is not None:
        num_bytes = knee.num_blocks * block_bytes
        mark = Mark(float(num_bytes), f"knee, {format_bytes(num_bytes)}")
    return LineChart(
        "curve",
        f"Blocks found by host memory alone, {run.request.cache_policy}",
        f"From {hits[0]:.1f} % with {format_bytes(x[0])} to {hits[-1]:.1f} % with {format_bytes(x[-1])}.",
        "capacity of host memory",
        "% of blocks",
        (Panel("", (PlotLine(run.request.cache_policy, 1, x, hits),)),),
        tuple(list_ticks(x)),
        is_log_x=True,
        mark=mark,
    )


def list_ticks(capacities: Sequence[float]) -> Iterator[tuple[float, str]]:
    """Yield positions and labels, without those that would cover the label before. Pure."""
    last = 0.0
    for num_bytes in capacities:
        if num_bytes >= TICK_RATIO * last:
            last = num_bytes
            yield num_bytes, format_bytes(num_bytes)


def plot_working_sets(run: PlanRun) -> BarChart:
    """Return the mean and the peak of blocks in use within windows, in GiB. Pure."""
    sets, gib = run.plan.working_sets, run.request.engine.block_bytes / 2**30
    peaks = ", ".join(f"{one.window_s / 60:.0f} min {one.peak_blocks * gib:,.0f} GiB" for one in sets)
    return BarChart(
        "working-sets",
        "Distinct blocks in use within a window",
        f"A cache of this size that evicted no wrong block would find what is reused within it. Peaks: {peaks}.",
        "GiB",
        tuple(f"{one.window_s / 60:.0f} min" for one in sets),
        (
            Segment("mean", tuple(one.mean_blocks * gib for one in sets)),
            Segment("up to the peak", tuple((one.peak_blocks - one.mean_blocks) * gib for one in sets)),
        ),
        is_last_baseline=True,
    )


def plot_loading(request: PlanRequest) -> LineChart:
    """Return the seconds to load a prefix from each medium and to compute it, by length. Pure."""
    lengths = tuple(map(float, LENGTHS))
    rate, bytes_per_token = prefill_rate_of(request), max(1, request.shape.attention_bytes_per_token)
    lines = [PlotLine("compute", 0, lengths, tuple(compute_s(0, length, rate) for length in LENGTHS))]
    media = [request.host.medium, *(row.medium for row in request.tiers)]
    for series, medium in enumerate(media, start=1):
        links = links_of(medium, request)
        seconds = tuple(load_s(length * bytes_per_token, links) for length in LENGTHS)
        lines.append(PlotLine(medium.name, series, lengths, seconds))
    return LineChart(
        "loading",
        "Seconds to load a prefix, and to compute it",
        "Where a medium's line is below that of computing, loading from it pays.",
        "tokens",
        "seconds",
        (Panel("", tuple(lines)),),
        tuple((length, f"{length:,.0f}") for length in lengths),
        is_log_x=True,
        is_log_y=True,
    )


def plot_mixes(run: PlanRun) -> BarChart:
    """Return the price of each mix by medium. Pure."""
    shown = run.plan.shown
    names = tuple(dict.fromkeys(part.name for one in shown for part in one.candidate.bill.media))
    prices = [{part.name: part.usd_per_month for part in one.candidate.bill.media} for one in shown]
    listed = ", ".join(
        f"{name_of(one.candidate.mix.kind)} ${one.candidate.bill.usd_per_month:,.0f}" for one in shown
    )
    return BarChart(
        "mixes",
        "Price of each mix, by medium",
        f"A month: {listed}.",
        "$ a month",
        tuple(_describe_shown(run)),
        tuple(Segment(name, tuple(price.get(name, 0.0) for price in prices)) for name in names),
    )


def tabulate_curve(run: PlanRun) -> Table:
    """Return hits, writes and price of host memory alone. Pure."""
    request = run.request
    rows = []
    for point in run.plan.curve:
        num_bytes = point.num_blocks * request.engine.block_bytes
        usd = request.host.medium.capacity_usd_per_month(num_bytes)
        rows.append(
            (
                Cell(format_bytes(num_bytes), float(num_bytes)),
                Cell(f"{point.hit_ratio:.1%}", point.hit_ratio),
                Cell(f"{point.writes_per_unique_block:.2f}", point.writes_per_unique_block),
                Cell(f"{usd:,.0f}", usd),
            )
        )
    headings = ("capacity", "hits", "writes per block", "$ a month")
    return Table("curve-table", "Host memory alone, by capacity", headings, tuple(rows))


def tabulate_mixes(run: PlanRun) -> Table:
    """Return the mixes beside an engine without offloading. Pure."""
    headings = ("mix", "$ a month", "hits", "p50 s", "p90 s", "p99 s", "GPU h saved a month")
    rows: list[tuple[Cell, ...]] = []
    if run.plan.without is not None and run.plan.without.first_token is not None:
        first = run.plan.without.first_token
        times_s = (first.p50_s, first.p90_s, first.p99_s)
        ratio = run.plan.without.hit_ratio
        times = (Cell(f"{time_s:.2f}", time_s) for time_s in times_s)
        rows.append((Cell("without"), Cell("-"), Cell(f"{ratio:.1%}", ratio), *times, Cell("-")))
    for name, one in zip(_describe_shown(run), run.plan.shown, strict=True):
        usd, ratio, found = one.candidate.bill.usd_per_month, one.timed.hit_ratio, one.timed.first_token
        times_s = (found.p50_s, found.p90_s, found.p99_s) if found is not None else (0.0, 0.0, 0.0)
        times = (Cell(f"{time_s:.2f}", time_s) for time_s in times_s)
        hours = one.saved_gpu_hours_per_month
        cells = (Cell(f"{usd:,.0f}", usd), Cell(f"{ratio:.1%}", ratio), *times, Cell(f"{hours:,.0f}", hours))
        rows.append((Cell(name), *cells))
    return Table("mixes-table", "Cost, hits, and seconds to first token", headings, tuple(rows))


def _describe_shown(run: PlanRun) -> Iterator[str]:
    for one in run.plan.shown:
        yield describe(one.candidate.mix, run.request.engine.block_bytes)
