"""What a plot shows, as values: lines on panels, or bars. It draws nothing, so that a test can read what is plotted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes:
        name: what the legend calls it.
        series: number of its colour, equal for equal policies on each plot; 0 is the engine without offloading.
        x: positions, ascending.
        y: values, one for each position.
        is_step: whether a value holds until the next one.
        is_bound: whether it bounds the others: drawn in the colour of the text.
    """

    name: str
    series: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    is_step: bool = False
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines on one pair of axes.

    Attributes:
        title: what they are about; "" where the chart's title says it.
        lines: the lines.
    """

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of each bar.

    Attributes:
        name: what the legend calls it.
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
        description: what can be seen in words, for who cannot see it.
        x_label: with the unit.
        y_label: with the unit.
        panels: at least one.
        x_ticks: positions with labels; none leaves them to the axis.
        is_log_x: whether equal distances are equal ratios.
        y_max: upper end of the axis; None leaves it to the values.
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


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars side by side, each put together from the same segments.

    Attributes:
        name: unique on a page, of letters, digits and "-".
        title: what it is.
        description: what can be seen in words.
        x_label: with the unit.
        bars: their names, the first on top.
        segments: from left to right.
        marks: where a bar could end at most; None leaves the mark out.
    """

    name: str
    title: str
    description: str
    x_label: str
    bars: tuple[str, ...]
    segments: tuple[Segment, ...]
    marks: tuple[float | None, ...]
