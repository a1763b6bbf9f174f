"""Draws time to first token per turn, with kvtier and without."""

import importlib.util
from pathlib import Path

from kvtier.cli.demo.report import Report
from kvtier.errors import ConfigError, MissingExtraError

PLOT_MODULE = "matplotlib"
BAR_WIDTH = 0.42
MIN_WIDTH_INCHES, WIDTH_INCHES_PER_TURN, HEIGHT_INCHES = 6.0, 0.35, 4.0


def require_plot() -> None:
    """Refuse to begin a demo whose picture could not be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec(PLOT_MODULE) is None:
        raise MissingExtraError(PLOT_MODULE, "plot")


def write_plot(report: Report, path: Path) -> None:
    """Write the picture; the suffix of ``path`` chooses its format.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: the file cannot be written, or nobody knows its suffix.
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
