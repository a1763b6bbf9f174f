"""Draws a suite's measurements: lines over a number if the suite has one, otherwise bars of the ratios.

Without a contestant to compare with, the bars are of the values.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.measurement import FLOOR, OURS, Measurement, spread_of
from benchmarks.harness.table import format_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {OURS: "#1f6fb4", FLOOR: "#b0b0b0"}
BAR_COLOUR = "#c03030"
WIDTH_INCHES, BASE_INCHES, INCHES_PER_BAR = 8.0, 1.4, 0.22
LINES_INCHES = 4.5


def write_picture(title: str, measurements: Sequence[Measurement], x_label: str | None, path: Path) -> None:
    """Write the picture, of the measurements with the unit of the first; the suffix of ``path`` selects its format.

    Raises:
        ImportError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written, or its suffix is unknown.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A second table of the suite has another unit, which does not fit the same axes.
    measurements = [measurement for measurement in measurements if measurement.unit == measurements[0].unit]
    num_ratios = sum(len(measurement.values) - 1 for measurement in measurements)
    num_bars = num_ratios or len(measurements)
    height = LINES_INCHES if x_label else BASE_INCHES + INCHES_PER_BAR * num_bars
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    if x_label:
        _draw_lines(axes, measurements, x_label)
    elif num_ratios:
        _draw_ratios(axes, measurements)
    else:
        _draw_values(axes, measurements)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_ratios(axes: "Axes", measurements: Sequence[Measurement]) -> None:
    position, ticks = 0.0, []
    for measurement in reversed(measurements):
        for other in (name for name in (FLOOR, *measurement.peers) if name in measurement.values):
            ratio = measurement.ratio(other)
            if ratio is None:
                continue
            whiskers = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            axes.barh(position, ratio.median, xerr=whiskers, color=COLOURS.get(other, "#e0993c"))
            if measurement.bar is not None and measurement.bar.against == other:
                axes.plot([measurement.bar.value] * 2, [position - 0.45, position + 0.45], color=BAR_COLOUR)
            ticks.append((position, f"{_name(measurement, None)}, of {other}"))
            position += 1
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("ours / other, better is larger; red: the bar")


def _draw_values(axes: "Axes", measurements: Sequence[Measurement]) -> None:
    for position, measurement in enumerate(reversed(measurements)):
        spread = spread_of(list(measurement.values[OURS]))
        whiskers = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.barh(position, spread.median, xerr=whiskers, color=COLOURS[OURS])
        if measurement.bar is not None:
            axes.plot([measurement.bar.value] * 2, [position - 0.45, position + 0.45], color=BAR_COLOUR)
    names = [_name(measurement, None) for measurement in reversed(measurements)]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel(f"{measurements[0].unit}, {measurements[0].better.value} is better; red: the bar")


def _draw_lines(axes: "Axes", measurements: Sequence[Measurement], x_label: str) -> None:
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for measurement in measurements:
        for contestant in measurement.values:
            value = measurement.median(contestant)
            if value is not None:
                line = (_name(measurement, x_label), contestant)
                series.setdefault(line, []).append((float(measurement.labels[x_label]), value))
    for (name, contestant), points in series.items():
        style = "-" if contestant == OURS else "--" if contestant == FLOOR else ":"
        axes.plot(
            *zip(*sorted(points), strict=True), style, marker="o", markersize=3, label=f"{name}, {contestant}"
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=x_label, ylabel=measurements[0].unit)
    axes.legend(fontsize=7)


def _name(measurement: Measurement, without: str | None) -> str:
    return " ".join(format_label(label) for name, label in measurement.labels.items() if name != without)
