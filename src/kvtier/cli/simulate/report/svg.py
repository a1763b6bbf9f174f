"""Draws charts with matplotlib as SVG elements that take the page's colours and fonts.

Matplotlib writes colours as numbers. Each colour of a chart is one of a few numbers that are then replaced by a
variable of the page's style sheet, so that one drawing is legible on a light and a dark background. Equal charts give
equal
output: there is no date, and names follow from the content.
"""

import html
import io
import math
import re
from typing import TYPE_CHECKING, Any

from kvtier.cli.output import require_plot
from kvtier.cli.simulate.report.plots import BarChart, LineChart, PlotLine

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES, PANEL_INCHES, BAR_INCHES, EDGE_INCHES = 7.2, 2.3, 0.34, 1.2
SINGLE_INCHES = 3.4
NUM_COLUMNS = 2

NUM_COLOURS = 8
"""Colours of the style sheet; further series reuse them with other strokes."""

TEXT_COLOUR, GRID_COLOUR, FIRST_COLOUR = "#000000", "#0000fe", 0x000100
"""Stand for the page's text colour, its grid colour and its first series. A drawing has no other colours."""

MAX_MARKERS = 24
"""A line with more points than this has no markers. A sweep has at most 16 sizes; more markers would hide the line."""

MANY_TICKS = 7
"""Labels that fit side by side; more are rotated."""

HEAD_ROOM = 1.03
"""Room above the data: without it a line along the upper end of an axis would be cut in half."""

STROKES = ("-", "--", "-.", ":")
SETTINGS = {"svg.fonttype": "none", "font.size": 10.0, "axes.titlesize": 10.0, "axes.spines.top": False,
            "axes.spines.right": False, "axes.grid": True, "grid.color": GRID_COLOUR, "grid.linewidth": 0.6,
            "figure.facecolor": "none", "axes.facecolor": "none", "legend.framealpha": 0.0,
            "legend.edgecolor": "none", "legend.fontsize": 9.0, "lines.linewidth": 1.7,
            "text.parse_math": False}  # fmt: skip


def draw(chart: LineChart | BarChart) -> str:
    """Return an ``svg`` element with the chart's title and description in it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_plot()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = SETTINGS | {"svg.hashsalt": chart.name}  # Any: its keys are a closed type of matplotlib's
    with rc_context(settings):
        figure = Figure(layout="constrained")
        if isinstance(chart, BarChart):
            _draw_bars(figure, chart)
        else:
            _draw_panels(figure, chart)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return embed(buffer.getvalue(), chart)


def embed(drawing: str, chart: LineChart | BarChart) -> str:
    """Return matplotlib's SVG as an element of a page. Pure.

    Args:
        drawing: a whole SVG file.
        chart: what it shows; its name makes the ids in the drawing unique on the page.
    """
    view_box = re.search(r'viewBox="([-0-9. ]+)"', drawing)
    assert view_box is not None, "matplotlib writes a view box"
    inner = drawing[drawing.index(">", view_box.end()) + 1 :]
    inner = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", inner, flags=re.DOTALL)
    # Only tags are rewritten: the text between tags is labels, shown as they are.
    inner = re.sub(r"<[^>]*>", lambda tag: _rewrite_tag(tag[0], chart.name), inner)
    inner = re.sub(r"\n\s*", "\n", inner)
    label, words = f"{chart.name}-title", f"{chart.name}-description"
    return (
        f'<svg class="chart" role="img" aria-labelledby="{label} {words}" viewBox="{view_box[1]}">'
        f'<title id="{label}">{html.escape(chart.title)}</title>'
        f'<desc id="{words}">{html.escape(chart.description)}</desc>{inner}'
    )


def _rewrite_tag(tag: str, chart_name: str) -> str:
    tag = re.sub(r'^<g id="series_([0-9]+)[^"]*">', r'<g class="series series-\1">', tag)
    tag = re.sub(r'^<g id="[^"]*">', "<g>", tag)  # nothing refers to a group
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{chart_name}-\1"', tag)
    tag = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{chart_name}-\1"', tag)
    tag = re.sub(r"url\(#([^)]+)\)", rf"url(#{chart_name}-\1)", tag)
    tag = re.sub(r" ?font-family: [^;\"]+;?", "", tag)
    tag = re.sub(r"#([0-9a-f]{6})\b", _name_colour, tag)
    return re.sub(r"(\.[0-9]{2})[0-9]+", r"\1", tag)  # hundredths of a point suffice, at half the bytes


def _name_colour(found: re.Match[str]) -> str:
    number = int(found[1], 16)
    if found[0] == TEXT_COLOUR:
        return "currentColor"
    if found[0] == GRID_COLOUR:
        return "var(--grid)"
    if FIRST_COLOUR <= number <= FIRST_COLOUR + NUM_COLOURS:
        return f"var(--series-{number - FIRST_COLOUR})"
    return found[0]


def _colour(series: int) -> str:
    """Return the colour number of a series: 0 for the baseline, then the colours in turn."""
    around = (series - 1) % NUM_COLOURS + 1 if series else 0
    return f"#{FIRST_COLOUR + around:06x}"


def _draw_panels(figure: "Figure", chart: LineChart) -> None:
    num_panels = len(chart.panels)
    num_columns = min(NUM_COLUMNS, num_panels)
    num_rows = math.ceil(num_panels / num_columns)
    height = SINGLE_INCHES if num_panels == 1 else EDGE_INCHES + PANEL_INCHES * num_rows
    figure.set_size_inches(WIDTH_INCHES, height)
    grid = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    drawn: dict[str, Artist] = {}
    for axes, panel in zip(grid, chart.panels, strict=False):
        axes.set_title(panel.title)
        for number, line in enumerate(panel.lines):
            drawn.setdefault(line.name, _draw_line(axes, line, number))
        if chart.is_log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if chart.x_ticks:
            _set_ticks(axes, chart)
        axes.set_ylim(0.0, chart.y_max and chart.y_max * HEAD_ROOM)
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    for axes in grid[num_panels:]:
        axes.set_visible(False)
    _draw_legend(figure, drawn, num_columns=5)


def _draw_legend(figure: "Figure", drawn: "dict[str, Artist]", *, num_columns: int) -> None:
    legend = figure.legend(
        list(drawn.values()), [""] * len(drawn), loc="outside lower center", ncols=num_columns
    )
    # Matplotlib omits a legend entry whose label begins with "_".
    for text, name in zip(legend.get_texts(), drawn, strict=True):
        text.set_text(name)


def _draw_line(axes: "Axes", line: PlotLine, number: int) -> "Artist":
    stroke = (0, (1, 1)) if line.is_bound else STROKES[line.series % len(STROKES)]
    colour = TEXT_COLOUR if line.is_bound else _colour(line.series)
    style = "steps-post" if line.is_step else "default"
    marker = "o" if len(line.x) <= MAX_MARKERS and not line.is_step else ""
    (drawn,) = axes.plot(
        line.x, line.y, color=colour, linestyle=stroke, drawstyle=style, marker=marker, markersize=3.5
    )
    if not line.is_bound:
        drawn.set_gid(f"series_{line.series}_{number}")
    return drawn


def _set_ticks(axes: "Axes", chart: LineChart) -> None:
    positions = [position for position, _ in chart.x_ticks]
    axes.set_xticks(
        positions, [label for _, label in chart.x_ticks], rotation=45 if len(positions) > MANY_TICKS else 0
    )
    axes.set_xticks([], minor=True)


def _draw_bars(figure: "Figure", chart: BarChart) -> None:
    figure.set_size_inches(WIDTH_INCHES, EDGE_INCHES + BAR_INCHES * len(chart.bars))
    axes = figure.add_subplot()
    positions = range(len(chart.bars))
    left = [0.0] * len(chart.bars)
    last = len(chart.segments) - 1
    drawn: dict[str, Artist] = {}
    for number, segment in enumerate(chart.segments):
        # Computed tokens are the remainder and take the baseline's colour. Places take colours from the other end
        # than policies do.
        colour = _colour(0 if number == last else NUM_COLOURS - number)
        bars = axes.barh(positions, segment.widths, left=left, height=0.7, color=colour)
        drawn[segment.name] = bars[0]
        left = [begin + width for begin, width in zip(left, segment.widths, strict=True)]
    for position, mark in enumerate(chart.marks):
        if mark is not None:
            axes.plot([mark, mark], [position - 0.45, position + 0.45], color=TEXT_COLOUR, linewidth=1.5)
    axes.set_yticks(list(positions), chart.bars)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.set(xlabel=chart.x_label, xlim=(0, 100))
    _draw_legend(figure, drawn, num_columns=6)
