"""The output of ``kvtier plan``: what the trace needs, what media can do, what to buy, what was assumed."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from kvtier.cli.output import make_table, print_line
from kvtier.cli.plan.run import PlanRun
from kvtier.planning.plan import EXAMPLE_TOKENS, Plan, PlanRequest, ShownMix, describe, format_bytes
from kvtier.planning.planner import KEEP_RATIO
from kvtier.planning.prices import DAYS_PER_YEAR, HOST
from kvtier.planning.tier_mix import MixOutcome, name_of

NOTHING = "-"
"""Stands for a missing number."""

LONG_YEARS = 100
"""Longer lifetimes are not printed."""


def print_plan(run: PlanRun, console: Console) -> None:
    """Print the verdict, the tables, the answer and the assumptions."""
    request, plan = run.request, run.plan
    print_line(console, run.verdict)
    console.print(make_working_set_table(request, plan))
    console.print(make_curve_table(request, plan))
    console.print(make_break_even_table(plan))
    if plan.without is not None:
        console.print(make_mix_table(request, plan, plan.without))
        console.print(make_wear_table(plan))
    for line in answer(request, plan):
        print_line(console, line)
    print_line(console, "\nAssumed:")
    for line in run.assumptions:
        print_line(console, f"- {line}")


def make_working_set_table(request: PlanRequest, plan: Plan) -> Table:
    """Return how much is in use within each window. Pure."""
    block_bytes = request.engine.block_bytes
    table = make_table("Blocks in use", ("window",), ("mean", "peak", "peak at"))
    for one in plan.working_sets:
        peak = format_bytes(one.peak_blocks * block_bytes)
        table.add_row(
            f"{one.window_s / 60:.0f} min",
            format_bytes(one.mean_blocks * block_bytes),
            f">= {peak}" if one.is_cut else peak,
            f"{one.peak_s:,.0f} s",
        )
    return table


def make_curve_table(request: PlanRequest, plan: Plan) -> Table:
    """Return the hits of host memory alone, by capacity. Pure."""
    title = f"Host memory alone, {request.cache_policy}"
    table = make_table(title, ("capacity",), ("hits", "writes per block", "$/month"))
    for point in plan.curve:
        num_bytes = point.num_blocks * request.engine.block_bytes
        table.add_row(
            format_bytes(num_bytes),
            f"{point.hit_ratio:.1%}",
            f"{point.writes_per_unique_block:.2f}",
            f"{request.host.medium.capacity_usd_per_month(num_bytes):,.0f}",
        )
    return table


def make_break_even_table(plan: Plan) -> Table:
    """Return the prefix length from which loading is faster than computing. Pure."""
    headings = ("loading pays beyond", f"load {EXAMPLE_TOKENS:,} tokens", "compute them")
    table = make_table("Load or compute", ("medium",), headings)
    for one in plan.break_evens:
        beyond = "never" if one.tokens is None else f"{one.tokens:,} tokens"
        table.add_row(one.medium, beyond, f"{one.example_s:.3f} s", f"{one.example_compute_s:.3f} s")
    return table


def make_mix_table(request: PlanRequest, plan: Plan, without: MixOutcome) -> Table:
    """Return the mixes to show, beside an engine without offloading. Pure."""
    headings = ("$ a\nmonth", "hits", "p50 s", "p90 s", "p99 s", "GPU hours\nsaved", "$\nsaved")
    table = make_table("Mixes: cost, seconds to first token, and what a month saves", ("mix",), headings)
    table.add_row("without", NOTHING, *_times(without), NOTHING, NOTHING)
    for one in plan.shown:
        table.add_row(
            _one_a_line(describe(one.candidate.mix, request.engine.block_bytes)),
            f"{one.candidate.bill.usd_per_month:,.0f}",
            *_times(one.timed),
            f"{one.saved_gpu_hours_per_month:,.0f}",
            f"{one.saved_usd_per_month:,.0f}",
        )
    return table


def make_wear_table(plan: Plan) -> Table:
    """Return the bytes written to each medium of the mixes, and its lifetime. Pure."""
    headings = ("used", "sold", "$ a\nmonth", "written\na day", "worn out\nafter")
    table = make_table("Media of each mix", ("medium",), headings)
    for one in plan.shown:
        for part in one.candidate.bill.media:
            is_host = part.name == HOST  # memory does not wear, and the replay does not count its writes
            written = NOTHING if is_host else f"{part.written_bytes_per_day / 1e12:.2f} TB"
            table.add_row(
                part.name if is_host else f"+ {part.name}",
                format_bytes(part.used_bytes),
                format_bytes(part.sold_bytes),
                f"{part.usd_per_month:,.0f}",
                written,
                _years(part.endurance_years),
            )
        table.add_section()
    return table


def answer(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Yield the result in sentences. Pure."""
    trace = request.trace
    yield (
        f"{plan.bytes_per_token:,} bytes a token; {len(trace.requests):,} requests in {trace.duration_s:,.0f} s name "
        f"{format_bytes(plan.unique_bytes)} of distinct blocks"
    )
    if plan.reuse_gaps.num_reuses:
        gaps = ", ".join(
            f"p{percent} {gap_s:,.0f} s" for percent, gap_s in plan.reuse_gaps.percentiles_s.items()
        )
        yield f"blocks that are used again are used after {gaps}"
    if request.goal is not None:
        yield from _answer_goal(request, plan)


def _answer_goal(request: PlanRequest, plan: Plan) -> Iterator[str]:
    goal = _goal_in_words(request)
    if plan.search is None:
        yield f"{goal}: the device cache alone reaches it, nothing to buy"
        return
    found = plan.search
    if found.best:
        best = found.best[0]
        name = describe(best.mix, request.engine.block_bytes)
        yield f"{goal}: cheapest is {name} at ${best.bill.usd_per_month:,.0f} a month"
    elif plan.shown:
        yield f"{goal}: no mix reaches it; closest is {_miss(request, plan.shown[0])}"
    if found.insufficient:
        kinds = ", ".join(name_of(kind) for kind in found.insufficient)
        yield f"not enough at its largest, or with less host memory than would do alone: {kinds}"
    if found.too_expensive:
        kinds = ", ".join(name_of(kind) for kind in found.too_expensive)
        yield f"skipped, at more than {KEEP_RATIO:.0f} times the price: {kinds}"
    for one in plan.shown:
        if one.timed.num_overloads:
            name = name_of(one.candidate.mix.kind)
            yield f"{name}: a tier was overloaded {one.timed.num_overloads} times and skipped for some seconds each"
    yield f"tried {found.num_tried} of {found.num_mixes} mixes"


def _goal_in_words(request: PlanRequest) -> str:
    goal, parts = request.goal, []
    if goal is not None and goal.hit_ratio is not None:
        parts.append(f"{goal.hit_ratio:.1%} hits")
    if goal is not None and goal.first_token_p90_s is not None:
        parts.append(f"first token within {goal.first_token_p90_s:g} s for nine requests in ten")
    return " and ".join(parts)


def _miss(request: PlanRequest, closest: ShownMix) -> str:
    goal, outcome = request.goal, closest.timed
    missed = []
    if goal is not None and goal.hit_ratio is not None and outcome.hit_ratio < goal.hit_ratio:
        missed.append(
            f"{outcome.hit_ratio:.1%} hits, {100 * (goal.hit_ratio - outcome.hit_ratio):.1f} points short"
        )
    if goal is not None and goal.first_token_p90_s is not None and outcome.first_token is not None:
        late_s = outcome.first_token.p90_s - goal.first_token_p90_s
        if late_s > 0:
            missed.append(f"first token after {outcome.first_token.p90_s:.2f} s, {late_s:.2f} s late")
    return f"{describe(closest.candidate.mix, request.engine.block_bytes)}: {' and '.join(missed)}"


def _one_a_line(mix: str) -> str:
    """Return a mix with each medium on a line of its own, for tables that fit a terminal. Pure."""
    return mix.replace(" + ", "\n+ ")


def _times(outcome: MixOutcome) -> Sequence[str]:
    first = outcome.first_token
    times = (
        [NOTHING] * 3
        if first is None
        else [f"{time_s:.2f}" for time_s in (first.p50_s, first.p90_s, first.p99_s)]
    )
    return [f"{outcome.hit_ratio:.1%}", *times]


def _years(endurance_years: float | None) -> str:
    if endurance_years is None:
        return NOTHING
    if endurance_years > LONG_YEARS:
        return f"> {LONG_YEARS} years"
    return (
        f"{endurance_years:.1f} years"
        if endurance_years >= 1
        else f"{endurance_years * DAYS_PER_YEAR:.0f} days"
    )
