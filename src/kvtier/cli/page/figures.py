"""Draws charts with plotly: values under the pointer, lines that can be hidden, one library in the page's own file.

Plotly, because one script of five megabytes draws everything offline, and its package brings one small library. Bokeh's
brings pandas and a server; Altair's needs a renderer of thirty megabytes to put its script into a file.

A figure has no ground of its own, and its text and grid take their colours from the page's style sheet, so that it is
legible on a light and on a dark one; lines have a contrast of at least 3 with both.

Lines that coincide stay distinct: a line that lies on a later one is drawn wider, and each has its own stroke, so that
the wider one shows beneath the other.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from math import log10
from typing import Any

from kvtier.cli.page.charts import BarChart, LineChart, Mark, Panel, PlotLine
from kvtier.errors import MissingExtraError

MODULE = "plotly"

COLOURS = (
    "#808890", "#2f81d8", "#d9601a", "#1a9a6c", "#b452c0", "#a67c00", "#1a93a6", "#e0486c", "#7a73e6",
)  # fmt: skip
"""The baseline's colour, then those of the series in turn."""

PLACES = (8, 6, 5, 7, 4, 3, 2, 1)
"""Colours of the segments of bars: another order than that of lines, which stand for other things."""

STROKES = ("solid", "dash", "dashdot", "longdash")
LINE_WIDTH, WIDER = 2, 3
"""Pixels of a line, and by how many a line that lies on a later one is wider."""

SAME = 0.02
"""Lines whose values differ by less than this share of the plot's height coincide for the eye."""

HIGH = 0.5
"""The axis does not begin at zero when each value is above this share of the largest: the lines would lie flat."""

MAX_MARKERS = 24
"""A line with more points than this has no markers: they would hide it."""

PANEL_PIXELS, BAR_PIXELS, EDGE_PIXELS, LEGEND_PIXELS = 360, 30, 130, 90

Figure = Any  # Any: plotly ships no types

CONFIG = {"responsive": True, "displayModeBar": False}


def require_plotly() -> None:
    """Check that plots can be drawn, before there are results.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    if importlib.util.find_spec(MODULE) is None:
        raise MissingExtraError(MODULE, "plot")


def read_library() -> str:
    """Return plotly's script, for one inline script of a page.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


def draw(chart: LineChart | BarChart) -> Iterator[tuple[str, str, Figure]]:
    """Yield a name, a title and a figure for each panel that is drawn; a chart of bars is one panel.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    require_plotly()
    if isinstance(chart, BarChart):
        yield chart.name, "", _draw_bars(chart)
        return
    for number, panel in enumerate(chart.drawn_panels):
        yield f"{chart.name}-{number}", panel.title, _draw_panel(chart, panel)


def find_hidden(lines: Sequence[PlotLine]) -> set[int]:
    """Return the indices of lines that lie on a later one. Pure."""
    values = [value for line in lines for value in line.y]
    height = max(values, default=0.0) - min(values, default=0.0)
    return {
        number
        for number, line in enumerate(lines)
        if any(_coincide(line, other, SAME * height) for other in lines[number + 1 :])
    }


def _coincide(line: PlotLine, other: PlotLine, tolerance: float) -> bool:
    return line.x == other.x and all(
        abs(one - another) <= tolerance for one, another in zip(line.y, other.y, strict=True)
    )


def _draw_panel(chart: LineChart, panel: Panel) -> Figure:
    from plotly import graph_objects as go

    hidden = find_hidden(panel.lines)
    figure = go.Figure(layout=_layout(chart.x_label, chart.y_label, PANEL_PIXELS))
    labels = dict(chart.x_ticks)
    for number, line in enumerate(panel.lines):
        has_markers = len(line.x) <= MAX_MARKERS and not line.is_step
        figure.add_trace(
            go.Scatter(
                x=line.x,
                y=line.y,
                name=line.name,
                mode="lines+markers" if has_markers else "lines",
                customdata=[labels.get(x, f"{x:.4g}") for x in line.x],
                hovertemplate="%{y:.4~g} at %{customdata}",
                line=_stroke(line, LINE_WIDTH + WIDER * (number in hidden)),
            )
        )
    values = [value for line in panel.lines for value in line.y]
    is_high = min(values) > HIGH * max(values)
    figure.update_yaxes(rangemode="normal" if is_high else "tozero")
    if chart.y_max is not None:
        figure.update_yaxes(range=[0, chart.y_max * 1.02])
    if chart.is_log_x:
        figure.update_xaxes(type="log", dtick="D2")
    if chart.x_ticks:
        positions, texts = zip(*chart.x_ticks, strict=True)
        figure.update_xaxes(tickvals=positions, ticktext=texts)
    if chart.mark is not None:
        _mark(figure, chart.mark, is_log_x=chart.is_log_x)
    return figure


def _stroke(line: PlotLine, width: int) -> dict[str, object]:
    return {
        "color": COLOURS[0] if line.is_bound else _colour(line.series),
        "dash": "dot" if line.is_bound else STROKES[max(0, line.series - 1) % len(STROKES)],
        "shape": "hv" if line.is_step else "linear",
        "width": width,
    }


def _mark(figure: Figure, mark: Mark, *, is_log_x: bool) -> None:
    figure.add_vline(x=mark.x, line={"color": COLOURS[0], "width": 1, "dash": "dash"})
    # On a logarithmic axis plotly places a line by its value, and a text by the value's logarithm.
    figure.add_annotation(
        x=log10(mark.x) if is_log_x else mark.x,
        y=0.35,
        xshift=3,
        yref="paper",
        text=mark.text,
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
    )


def _draw_bars(chart: BarChart) -> Figure:
    from plotly import graph_objects as go

    height = EDGE_PIXELS + BAR_PIXELS * len(chart.bars)
    figure = go.Figure(layout=_layout(chart.x_label, "", height))
    last = len(chart.segments) - 1
    for number, segment in enumerate(chart.segments):
        colour = 0 if chart.is_last_baseline and number == last else PLACES[number % len(PLACES)]
        figure.add_trace(
            go.Bar(
                x=segment.widths,
                y=chart.bars,
                name=segment.name,
                orientation="h",
                hovertemplate="%{x:.4~g}",
                marker={"color": COLOURS[colour]},
            )
        )
    if any(mark is not None for mark in chart.marks):
        figure.add_trace(
            go.Scatter(
                x=chart.marks,
                y=chart.bars,
                name=chart.marks_name,
                mode="markers",
                hovertemplate="%{x:.4~g}",
                marker={
                    "symbol": "line-ns",
                    "size": BAR_PIXELS * 0.8,
                    "line": {"width": 3, "color": COLOURS[2]},
                },
            )
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    if chart.x_max is not None:
        figure.update_xaxes(range=[0, chart.x_max])
    return figure


def _layout(x_label: str, y_label: str, height: int) -> dict[str, Any]:  # Any: plotly's own
    # Text and grid: the style sheet replaces these colours on a dark ground.
    axis = {"gridcolor": "#d8dee4", "zeroline": False, "automargin": True}
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 10, "r": 10, "t": 10, "b": LEGEND_PIXELS},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1b1f24"},
        "hovermode": "closest" if not y_label else "x unified",
        "hoverlabel": {"bgcolor": "#ffffff", "font": {"color": "#1b1f24"}},
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "xaxis": axis | {"title": {"text": x_label}},
        "yaxis": axis | {"title": {"text": y_label}},
    }


def _colour(series: int) -> str:
    """Return the colour of a series: the baseline's, then the others in turn."""
    return COLOURS[(series - 1) % (len(COLOURS) - 1) + 1 if series else 0]
