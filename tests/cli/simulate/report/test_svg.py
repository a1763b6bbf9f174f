"""A drawing takes the page's colours, names itself, and is equal for equal charts."""

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest

from kvtier.cli.simulate.report.plots import BarChart, LineChart, Panel, PlotLine, Segment
from kvtier.cli.simulate.report.svg import NUM_COLOURS, draw

LINES = LineChart(
    "hits",
    "Hits & misses",
    "From <here> to there.",
    "capacity",
    "%",
    (
        Panel(
            "one",
            (PlotLine("lru", 1, (1.0, 10.0), (0.123456, 5.0)), PlotLine("arc", 2, (1.0, 10.0), (1.0, 2.0))),
        ),
        Panel("two", (PlotLine("lru", 1, (1.0, 10.0), (3.0, 4.0)),)),
        Panel("three", (PlotLine("bound", 0, (1.0, 10.0), (9.0, 9.0), is_bound=True),)),
    ),
    ((1.0, "1GiB"), (10.0, "10GiB")),
    is_log_x=True,
)
BARS = BarChart(
    "origins", "Origins", "Where from.", "%", ("lru",), (Segment("CPU", (40.0,)), Segment("computed", (60.0,))), (70.0,)
)  # fmt: skip


def test_equal_charts_give_equal_drawings() -> None:
    assert draw(LINES) == draw(LINES)
    assert draw(BARS) == draw(BARS)


def test_a_drawing_is_named_and_described_for_who_cannot_see_it() -> None:
    root = ET.fromstring(draw(LINES))  # noqa: S314 - our own

    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"] == "hits-title hits-description"
    assert [(child.tag, child.text) for child in list(root)[:2]] == [
        ("title", "Hits & misses"),
        ("desc", "From <here> to there."),
    ]


def test_each_colour_is_one_of_the_page() -> None:
    for chart in (LINES, BARS):
        drawing = draw(chart)
        assert re.findall(r"#[0-9a-f]{6}\b", drawing) == []
        assert "currentColor" in drawing
        assert "var(--grid)" in drawing
    assert {"var(--series-1)", "var(--series-2)"} <= set(re.findall(r"var\([^)]*\)", draw(LINES)))


def test_policies_beyond_the_colours_begin_again_with_another_stroke() -> None:
    def of(series: int) -> str:
        line = PlotLine("policy", series, (1.0, 2.0), (1.0, 2.0), is_step=True)
        drawing = draw(dataclasses.replace(LINES, panels=(Panel("", (line,)),)))
        found = re.search(rf'<g class="series series-{series}">\n<path[^>]*style="([^"]*)"', drawing)
        assert found is not None
        return found[1]

    first, again = of(1), of(1 + NUM_COLOURS)
    assert "var(--series-1)" in first
    assert "var(--series-1)" in again
    assert of(NUM_COLOURS) != again


def test_names_in_a_drawing_are_its_own_and_what_they_point_at_is_there() -> None:
    drawing = draw(LINES)

    names = re.findall(r'\bid="([^"]+)"', drawing)
    targets = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', drawing)

    assert len(names) == len(set(names))
    assert all(name.startswith("hits-") for name in names)
    assert targets
    assert {one or other for one, other in targets} <= set(names)


def test_a_drawing_loads_nothing_and_says_nothing_of_who_drew_it() -> None:
    for chart in (LINES, BARS):
        assert "http" not in draw(chart)
        assert "font-family" not in draw(chart)
        assert "atplotlib.org" not in draw(chart)


def test_each_line_can_be_found_by_its_policy_and_the_bound_by_none() -> None:
    drawing = draw(LINES)

    assert drawing.count('class="series series-1"') == 2
    assert drawing.count('class="series series-2"') == 1
    assert drawing.count('class="series series-0"') == 0


def test_a_chart_without_lines_is_drawn() -> None:
    assert "<svg" in draw(dataclasses.replace(LINES, panels=(Panel("", ()),)))


@pytest.mark.parametrize(
    "label",
    ["1.587TiB", "0.123456", "a$b$c", r"$\frac$", "#000000", "_hidden", '<g id="series_1_0">', "url(#a)"],
)
def test_labels_are_shown_as_they_are(label: str) -> None:
    line = PlotLine(label, 1, (1.0, 10.0), (1.0, 2.0))
    lines = dataclasses.replace(LINES, panels=(Panel(label, (line,)),), x_ticks=((1.0, label), (10.0, "end")))
    bars = dataclasses.replace(BARS, bars=(label,), segments=(Segment(label, (40.0,)), *BARS.segments[1:]))

    assert shown_texts(lines).count(label) == 3  # above the panel, on the axis, in the legend
    assert shown_texts(bars).count(label) == 2


def test_small_numbers_on_an_axis_keep_their_digits() -> None:
    line = PlotLine("lru", 1, (0.0004, 0.003, 0.02), (1.0, 2.0, 3.0))

    assert {"0.001", "0.01"} <= set(
        shown_texts(dataclasses.replace(LINES, panels=(Panel("", (line,)),), x_ticks=()))
    )


def shown_texts(chart: LineChart | BarChart) -> list[str | None]:
    return [element.text for element in ET.fromstring(draw(chart)).iter("text")]  # noqa: S314 - our own
