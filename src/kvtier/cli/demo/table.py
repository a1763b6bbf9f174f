"""Shows the demo's report: a table in the terminal, and a picture of the time to first token per turn."""

from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.cli.demo.report import COMPUTED, DEVICE, HOST, Report, RunComparison, Total
from kvtier.cli.output import require_plot
from kvtier.errors import ConfigError

BAR_WIDTH = 0.42
MIN_WIDTH_INCHES, WIDTH_INCHES_PER_TURN, HEIGHT_INCHES = 6.0, 0.35, 4.0

BUSY_RATIO = 1.25
"""How much the two runs may differ where they do the same work. Beyond it another program used the processor during one
of them and the speed-up means little; on a quiet machine they differ by at most a tenth."""


def write_plot(report: Report, path: Path) -> None:
    """Write the picture; the suffix of ``path`` selects its format.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: the file cannot be written, or its suffix is unknown.
    """
    require_plot()
    from matplotlib.figure import Figure

    positions = range(len(report.turns))
    labels = [compared.turn.label for compared in report.turns]
    width_inches = max(MIN_WIDTH_INCHES, WIDTH_INCHES_PER_TURN * len(labels))
    figure = Figure(figsize=(width_inches, HEIGHT_INCHES), layout="constrained")
    axes = figure.add_subplot()
    without_s = [compared.without.first_token_s for compared in report.turns]
    with_s = [compared.with_tiers.first_token_s for compared in report.turns]
    axes.bar([at - BAR_WIDTH / 2 for at in positions], without_s, BAR_WIDTH, label="without", color="#b0b0b0")
    axes.bar(
        [at + BAR_WIDTH / 2 for at in positions], with_s, BAR_WIDTH, label="with kvtier", color="#1f6fb4"
    )
    axes.set_xticks(list(positions), labels, rotation=90)
    axes.set(xlabel="turn, in order of service", ylabel="time to first token (s)", title=report.model)
    figure.legend(loc="outside lower center", ncols=2)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError("--plot", str(path), f"cannot be written: {error}") from error


def print_report(report: Report, console: Console) -> None:
    """Print the table and the summary."""
    console.print(make_table(report))
    for line in summarize(report):
        console.print(line, highlight=False, soft_wrap=True)


def make_table(report: Report) -> Table:
    """Return one row per turn, one per total. Pure."""
    title = f"Prompt tokens by origin, seconds to first token: {report.model}"
    table = Table(title=title, box=box.SIMPLE, padding=0)
    origins = [DEVICE, HOST, report.tier, COMPUTED]
    for heading in ("turn", "prompt", *origins, "with", "without", "speed-up", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for compared in report.turns:
        table.add_row(*_turn_cells(compared, origins))
    table.add_section()
    for name, total in _totals(report):
        table.add_row(*_total_cells(name, total, origins))
    if report.restarted:
        table.add_section()
        for compared in report.restarted:
            table.add_row(*_turn_cells(compared, origins))
        table.add_row(*_total_cells("restart", report.after_restart, origins))
    return table


def summarize(report: Report) -> Iterator[str]:
    """Yield a summary of the table in sentences. Pure."""
    later = report.later_turns
    if later.num_turns:
        yield (
            f"turns after the first: {later.with_s:.2f} s to first token with kvtier, "
            f"{later.without_s:.2f} s without: {later.speed_up:.1f}x"
        )
    total = report.all_turns
    hits = ", ".join(f"{name} {_share(total, name)}" for name in (DEVICE, HOST, report.tier, COMPUTED))
    yield f"prompt tokens of all turns: {hits}"
    if report.restarted:
        yield (
            f"after a restart in a new process: {report.restart_ratio:.0%} of prompt tokens from {report.tier}, "
            f"{report.after_restart.speed_up:.1f}x"
        )
    yield "without: the same engine and device pool with its own prefix cache, no tier behind it"
    cold = report.cold_turns
    if not 1 / BUSY_RATIO < cold.speed_up < BUSY_RATIO:
        yield (
            f"warning: turns that are the same work in both runs took {cold.with_s:.2f} s and {cold.without_s:.2f} s; "
            "another program used this machine: measure again"
        )
    yield f"tokens identical: {'yes' if report.is_identical else 'no'}"
    yield f"took {report.wall_s:.0f} s"


def _totals(report: Report) -> Iterator[tuple[str, Total]]:
    if report.cold_turns.num_turns:
        yield "cold", report.cold_turns
    if report.later_turns.num_turns:
        yield "later", report.later_turns
    yield "all", report.all_turns


def _turn_cells(compared: RunComparison, origins: list[str]) -> list[str]:
    sources = compared.with_tiers.sources
    with_s, without_s = compared.with_tiers.first_token_s, compared.without.first_token_s
    return [
        compared.turn.label,
        str(len(compared.with_tiers.prompt)),
        *(str(sources.get(origin, 0) or "·") for origin in origins),
        *_time_cells(with_s, without_s),
        "yes" if compared.is_identical else "NO",
    ]


def _total_cells(name: str, total: Total, origins: list[str]) -> list[str]:
    counts = [str(total.sources.get(origin, 0) or "·") for origin in origins]
    return [name, str(total.num_prompt_tokens), *counts, *_time_cells(total.with_s, total.without_s), ""]


def _time_cells(with_s: float, without_s: float) -> tuple[str, str, str]:
    speed_up = f"{without_s / with_s:.1f}x" if with_s else "·"
    return f"{with_s:.3f}", f"{without_s:.3f}", speed_up


def _share(total: Total, origin: str) -> str:
    return f"{total.sources.get(origin, 0) / max(1, total.num_prompt_tokens):.0%}"
