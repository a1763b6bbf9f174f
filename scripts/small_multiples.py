"""Draws panels of curves side by side as one small SVG file, without a library: light and dark, and the text is text.

The colours are those of a style sheet in the file, which follows what the reader prefers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PANEL_WIDTH, PANEL_HEIGHT = 300, 190
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 30, 42
"""Room inside of a panel for numbers, title and legend."""

NUM_COLUMNS = 3

COLOURS = (("#1f6fb4", "#6cb2f0"), ("#c05a10", "#f0a35c"), ("#2e8b57", "#67cf95"), ("#8250c4", "#bd97f2"))
"""Of the first, second ... series: on white and on black."""

STYLE = "".join(
    (
        ".b{fill:#fff}.t{fill:#1f2328}.n{fill:#59636e}.g{stroke:#d1d9e0}",
        *(
            f".s{number}{{stroke:{light}}}.f{number}{{fill:{light}}}"
            for number, (light, _) in enumerate(COLOURS)
        ),
        "@media(prefers-color-scheme:dark){.b{fill:#0d1117}.t{fill:#f0f6fc}.n{fill:#9198a1}.g{stroke:#3d444d}",
        *(
            f".s{number}{{stroke:{dark}}}.f{number}{{fill:{dark}}}"
            for number, (_, dark) in enumerate(COLOURS)
        ),
        "}",
    )
)


@dataclass(frozen=True, slots=True)
class Series:
    """A curve.

    Attributes:
        name: for the legend.
        points: (seconds, value), in order; a value that is no number is left out.
    """

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """A panel.

    Attributes:
        title: what it shows.
        unit: "percentunit", "s", "Bps" or "short", as Grafana names them.
        series: at most as many as there are colours.
        most: the largest value that there can be; None: unknown.
    """

    title: str
    unit: str
    series: Sequence[Series]
    most: float | None = None


def draw(panels: Sequence[Curves], end_s: float) -> str:
    """Return panels as an SVG document. Pure.

    Args:
        panels: in the order of reading.
        end_s: the time on the right edge; the left one is 0.
    """
    num_rows = -(-len(panels) // NUM_COLUMNS)
    width, height = NUM_COLUMNS * PANEL_WIDTH, num_rows * PANEL_HEIGHT
    size = f'viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">',
        f"<style>{STYLE}</style>",
        f'<rect class="b" width="{width}" height="{height}"/>',
    ]
    for number, panel in enumerate(panels):
        row, column = divmod(number, NUM_COLUMNS)
        parts.append(f'<g transform="translate({column * PANEL_WIDTH},{row * PANEL_HEIGHT})">')
        parts += [*draw_panel(panel, end_s), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def draw_panel(panel: Curves, end_s: float) -> list[str]:
    """Return the elements of a panel. Pure."""
    top = panel.most or round_up(max((value for one in panel.series for _, value in one.points), default=0.0))
    width, height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM
    parts = [
        f'<text class="t" x="{LEFT}" y="18" font-size="12" font-weight="bold">{escape(panel.title)}</text>'
    ]
    for share in (0.0, 0.5, 1.0):
        y = TOP + height * (1 - share)
        parts.append(f'<path class="g" d="M{LEFT} {y:.0f}h{width}"/>')
        label = in_unit(share * top, panel.unit)
        parts.append(f'<text class="n" x="{LEFT - 4}" y="{y + 3:.0f}" text-anchor="end">{label}</text>')
    for text, x, anchor in (("0 s", LEFT, "start"), (f"{end_s:.0f} s", LEFT + width, "end")):
        parts.append(f'<text class="n" x="{x}" y="{TOP + height + 13}" text-anchor="{anchor}">{text}</text>')
    x = LEFT
    for number, one in enumerate(panel.series[: len(COLOURS)]):
        places = [
            f"{LEFT + width * at_s / end_s:.1f} {TOP + height * (1 - min(value, top) / top):.1f}"
            for at_s, value in one.points
            if not math.isnan(value)  # a quantile of nothing
        ]
        if places:
            path = "M" + "L".join(places)
            parts.append(f'<path class="s{number}" fill="none" stroke-width="1.6" d="{path}"/>')
        parts.append(f'<circle class="f{number}" cx="{x + 3}" cy="{PANEL_HEIGHT - 13}" r="3"/>')
        parts.append(f'<text class="t" x="{x + 10}" y="{PANEL_HEIGHT - 10}">{escape(one.name)}</text>')
        x += 20 + 6 * len(one.name)
    return parts


def round_up(value: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten; 1 for nothing. Pure."""
    if value <= 0:
        return 1.0
    power = 1e-9
    while power < value:
        for factor in (1, 2, 5):
            if factor * power >= value:
                return factor * power
        power *= 10
    return power


def in_unit(value: float, unit: str) -> str:
    """Return a value as an axis shows it. Pure."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{1000 * value:g} ms" if value < 1 else f"{value:g} s"
    thousands = min(3, max(0, math.floor(math.log(value, 1000) + 1e-9))) if value > 0 else 0
    scaled, prefix = value / 1000**thousands, ("", "k", "M", "G")[thousands]
    return f"{scaled:g} {prefix}B/s" if unit == "Bps" else f"{scaled:g}{prefix}"
