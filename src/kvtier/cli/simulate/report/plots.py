"""The plots of a comparison, as values."""

from collections.abc import Callable, Iterable, Sequence

from kvtier.cli.page.charts import BarChart, LineChart, Mark, Panel, PlotLine, Segment
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.verdict import find_sweep_knee
from kvtier.sim.results import DEVICE, HOST, Simulation
from kvtier.sim.sweep import Case, Size

COMPUTED = "computed"
BOUND = "Belady's bound"

TIME_UNITS = ((4 * 3600.0, 3600.0, "h"), (600.0, 60.0, "min"), (0.0, 1.0, "s"))
"""(from how many seconds on, seconds of the unit, the unit's name)."""

BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "bytes"))


def plot_hits(comparison: Comparison) -> LineChart | None:
    """Return the hits against the capacity of the swept place; None without a sweep. Pure."""
    sweep = comparison.sweep
    if sweep is None:
        return None
    sizes = sweep.sizes
    x = tuple(float(size.num_blocks * comparison.engine.block_bytes) for size in sizes)
    lines = [
        PlotLine(policy, series, x, tuple(_found_percent(comparison, policy, size) for size in sizes))
        for series, policy in enumerate(comparison.policies)
    ]
    bounds = [max(one.at_most_ratio or 0.0 for _, one in comparison.pairs(size)) * 100 for size in sizes]
    lines.append(PlotLine(BOUND, 0, x, tuple(bounds), is_bound=True))
    knee = find_sweep_knee(comparison)
    mark = None if knee is None else Mark(x[knee], f"knee, {sizes[knee].label}")
    ends = ", ".join(f"{line.name} {line.y[0]:.1f} to {line.y[-1]:.1f} %" for line in lines)
    return LineChart(
        "hits",
        f"Prompt tokens not computed, by capacity of {comparison.swept_place}",
        f"From {sizes[0].label} to {sizes[-1].label} of {comparison.swept_place}: {ends}.",
        f"capacity of {comparison.swept_place}",
        "% of prompt tokens",
        (Panel("", tuple(lines)),),
        tuple(zip(x, (size.label for size in sizes), strict=True)),
        is_log_x=True,
        mark=mark,
    )


def plot_origins(comparison: Comparison, size: Size | None) -> BarChart:
    """Return where prompt tokens came from, one bar for each policy. Pure."""
    pairs = list(comparison.pairs(size))
    places = [DEVICE, *_tier_names(comparison)]
    segments = [Segment(place, tuple(one.hit_ratio(place) * 100 for _, one in pairs)) for place in places]
    computed = tuple(
        (1 - one.not_computed_ratio) * 100 if one.total.num_requests else 0.0 for _, one in pairs
    )
    shares = ", ".join(f"{case.policy} {one.not_computed_ratio:.1%}" for case, one in pairs)
    return BarChart(
        "origins",
        "Prompt tokens by origin",
        f"Not computed: {shares}. The stroke marks {BOUND}, which no policy exceeds.",
        "% of prompt tokens",
        tuple(case.policy for case, _ in pairs),
        (*segments, Segment(COMPUTED, computed)),
        tuple(None if one.at_most_ratio is None else one.at_most_ratio * 100 for _, one in pairs),
        BOUND,
        is_last_baseline=True,
        x_max=100.0,
    )


def plot_first_token(comparison: Comparison, size: Size | None) -> LineChart:
    """Return the share of requests whose first token came within a time. Pure."""
    pairs = list(comparison.pairs(size))
    lines = []
    for case, one in pairs:
        times_s = one.first_token_quantiles_s
        if times_s:
            shares = tuple(100 * part / len(times_s) for part in range(len(times_s) + 1))
            series = comparison.policies.index(case.policy)
            lines.append(PlotLine(case.policy, series, (times_s[0], *times_s), shares, is_step=True))
    medians = ", ".join(
        f"{case.policy} {one.total.first_token.p50_s:.2f} s and {one.total.first_token.p90_s:.2f} s"
        for case, one in pairs
    )
    return LineChart(
        "first-token",
        "Time to first token",
        f"Half and 90 % of the requests within: {medians}.",
        "seconds from arrival",
        "% of requests",
        (Panel("", tuple(lines)),),
        is_log_x=True,
        y_max=100.0,
    )


def plot_occupancy(comparison: Comparison, size: Size | None) -> LineChart:
    """Return how full device, host memory and tiers were over time, one panel each. Pure."""
    pairs = list(comparison.pairs(size))

    def percent(case: Case, one: Simulation, place: str) -> tuple[float, ...] | None:
        held = one.history.held_blocks.get(place)
        return None if held is None else tuple(100 * num / _capacity_of(case, place) for num in held)

    return _over_time(
        comparison,
        pairs,
        (DEVICE, *_tier_names(comparison)),
        percent,
        name="occupancy",
        title="Blocks held over time",
        description="Share of each place's blocks that hold data, or that a request or a transfer uses.",
        y_label="% of capacity",
        y_max=100.0,
    )


def plot_writes(comparison: Comparison, size: Size | None) -> LineChart:
    """Return what had been written to host memory and tiers over time, one panel each. Pure."""
    pairs = [(case, one) for case, one in comparison.pairs(size) if one.tiers]
    most_bytes = max((tier.written_bytes for _, one in pairs for tier in one.tiers), default=0)
    unit_bytes, unit = next((found for found in BYTE_UNITS if most_bytes >= found[0]), BYTE_UNITS[-1])
    block_bytes = comparison.engine.block_bytes

    def written(_: Case, one: Simulation, place: str) -> tuple[float, ...] | None:
        num_written = one.history.written_blocks.get(place)
        return None if num_written is None else tuple(num * block_bytes / unit_bytes for num in num_written)

    totals = "; ".join(
        f"{case.policy}: "
        + ", ".join(f"{tier.name} {tier.written_bytes / unit_bytes:.2f} {unit}" for tier in one.tiers)
        for case, one in pairs
    )
    return _over_time(
        comparison,
        pairs,
        _tier_names(comparison),
        written,
        name="writes",
        title="Written since the start",
        description=f"In all: {totals}.",
        y_label=unit,
    )


def _over_time(
    comparison: Comparison,
    pairs: Sequence[tuple[Case, Simulation]],
    places: Iterable[str],
    read: Callable[[Case, Simulation, str], tuple[float, ...] | None],
    *,
    name: str,
    title: str,
    description: str,
    y_label: str,
    y_max: float | None = None,
) -> LineChart:
    begin_s = min((one.history.at_s[0] for _, one in pairs if one.history.at_s), default=0.0)
    longest_s = max((one.history.at_s[-1] - begin_s for _, one in pairs if one.history.at_s), default=0.0)
    unit_s, unit = next((each[1], each[2]) for each in TIME_UNITS if longest_s >= each[0])
    panels = []
    for place in places:
        lines = []
        for case, one in pairs:
            values = read(case, one, place)
            if values is not None:
                x = tuple((at_s - begin_s) / unit_s for at_s in one.history.at_s)
                lines.append(PlotLine(case.policy, comparison.policies.index(case.policy), x, values))
        panels.append(Panel(place, tuple(lines)))
    return LineChart(
        name, title, description, f"{unit} from the first request", y_label, tuple(panels), y_max=y_max
    )


def _found_percent(comparison: Comparison, policy: str, size: Size) -> float:
    return next(100 * one.not_computed_ratio for case, one in comparison.pairs(size) if case.policy == policy)


def _capacity_of(case: Case, place: str) -> int:
    if place == DEVICE or case.host is None:
        return case.engine.num_device_blocks
    return next((tier.num_blocks for tier in case.host.tiers if tier.name == place), case.host.num_blocks)


def _tier_names(comparison: Comparison) -> list[str]:
    return [HOST, *(tier.name for tier in comparison.host.tiers)]
