"""The content of a plot as values: lines on panels, or bars. ``figures`` draws them; tests read the values."""

from dataclasses import dataclass, field

FLAT = 0.01
"""A line that changes by less than this share of the plot's height looks like a ruler."""


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One line.

    Attributes:
        name: its name in the legend.
        series: number of its colour, the same for one subject on each plot; 0 is the baseline.
        x: positions, ascending.
        y: values, one for each position.
        is_step: whether a value holds until the next one.
        is_bound: whether it is an upper bound, which is dotted and grey.
    """

    name: str
    series: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    is_step: bool = False
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the x axis that is named, such as the knee of a curve.

    Attributes:
        x: the position.
        text: its name.
    """

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines on one pair of axes.

    Attributes:
        title: its title; "" when the chart's title says it.
        lines: the lines.
    """

    title: str
    lines: tuple[PlotLine, ...]

    @property
    def is_flat(self) -> bool:
        """Whether no line changes by what the eye could see, so that a sentence says as much as a plot."""
        top = max((value for line in self.lines for value in line.y), default=0.0)
        return all(max(line.y, default=0.0) - min(line.y, default=0.0) <= FLAT * top for line in self.lines)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of each bar.

    Attributes:
        name: its name in the legend.
        widths: its width on each bar.
    """

    name: str
    widths: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Panels with common axes.

    Attributes:
        name: unique on a page, of letters, digits and "-".
        title: what it is.
        description: what the chart shows in words, also for screen readers.
        x_label: with the unit.
        y_label: with the unit.
        panels: at least one.
        x_ticks: positions with labels; empty: chosen by the axis.
        is_log_x: whether equal distances on the x axis are equal ratios.
        y_max: upper end of the axis; None: chosen by the values.
        mark: a place on the x axis; None: none.
    """

    name: str
    title: str
    description: str
    x_label: str
    y_label: str
    panels: tuple[Panel, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    is_log_x: bool = False
    y_max: float | None = None
    mark: Mark | None = None

    @property
    def drawn_panels(self) -> tuple[Panel, ...]:
        """The panels that show more than a sentence would."""
        return tuple(panel for panel in self.panels if not panel.is_flat)


@dataclass(frozen=True, slots=True)
class BarChart:
    """Horizontal bars, each made of the same segments.

    Attributes:
        name: unique on a page, of letters, digits and "-".
        title: what it is.
        description: what the chart shows in words.
        x_label: with the unit.
        bars: their names, the first on top.
        segments: from left to right.
        marks: an upper bound of each bar; None: no mark.
        marks_name: what the marks are, for the legend.
        is_last_baseline: whether the last segment is the remainder, in the baseline's colour.
        x_max: upper end of the axis; None: chosen by the values.
    """

    name: str
    title: str
    description: str
    x_label: str
    bars: tuple[str, ...]
    segments: tuple[Segment, ...]
    marks: tuple[float | None, ...] = field(default=())
    marks_name: str = ""
    is_last_baseline: bool = False
    x_max: float | None = None
