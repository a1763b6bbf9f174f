"""What plotly is given has every value of a chart, tells coinciding lines apart and draws nothing flat."""

import dataclasses
from math import log10

import pytest

from kvtier.cli.page.charts import BarChart, LineChart, Mark, Panel, PlotLine, Segment
from kvtier.cli.page.figures import COLOURS, draw, find_hidden, read_library, require_plotly
from kvtier.errors import MissingExtraError

LRU = PlotLine("lru", 1, (1.0, 10.0), (0.1, 5.0))
ARC = PlotLine("arc", 2, (1.0, 10.0), (1.0, 2.0))
FLAT = PlotLine("without", 0, (1.0, 10.0), (3.0, 3.0))
LINES = LineChart(
    "hits",
    "Hits",
    "From here to there.",
    "capacity",
    "%",
    (Panel("one", (LRU, ARC)), Panel("two", (FLAT,))),
    ((1.0, "1GiB"), (10.0, "10GiB")),
    is_log_x=True,
    mark=Mark(10.0, "knee"),
)
BARS = BarChart(
    "origins",
    "Origins",
    "Where from.",
    "%",
    ("lru", "arc"),
    (Segment("host", (40.0, 30.0)), Segment("computed", (60.0, 70.0))),
    (70.0, None),
    "the bound",
    is_last_baseline=True,
)


@pytest.fixture
def plotly() -> None:
    """Skip without plotly."""
    pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(MissingExtraError, match=r"\.\[plot\]"):
        require_plotly()
    with pytest.raises(MissingExtraError):
        list(draw(LINES))


@pytest.mark.usefixtures("plotly")
def test_each_panel_that_changes_is_a_figure_with_its_lines() -> None:
    ((name, title, figure),) = draw(LINES)

    assert (name, title) == ("hits-0", "one")
    assert [line.name for line in figure.data] == ["lru", "arc"]
    assert [list(line.y) for line in figure.data] == [[0.1, 5.0], [1.0, 2.0]]
    assert list(figure.layout.xaxis.ticktext) == ["1GiB", "10GiB"]
    assert figure.layout.xaxis.type == "log"


@pytest.mark.usefixtures("plotly")
def test_the_mark_and_its_text_are_at_one_place_of_a_logarithmic_axis() -> None:
    ((_, _, figure),) = draw(LINES)
    ((_, _, linear),) = draw(dataclasses.replace(LINES, is_log_x=False))

    assert figure.layout.shapes[0].x0 == 10.0
    assert (figure.layout.annotations[0].text, figure.layout.annotations[0].x) == ("knee", log10(10.0))
    assert linear.layout.annotations[0].x == 10.0


def test_a_panel_without_a_change_is_not_drawn() -> None:
    assert Panel("", (FLAT,)).is_flat
    assert Panel("", (dataclasses.replace(FLAT, y=(3.0, 3.01)),)).is_flat
    assert not Panel("", (FLAT, LRU)).is_flat
    assert Panel("", ()).is_flat


def test_lines_that_coincide_are_found() -> None:
    assert find_hidden([LRU, ARC]) == set()
    assert find_hidden([LRU, ARC, dataclasses.replace(LRU, name="again")]) == {0}
    assert find_hidden([LRU, dataclasses.replace(LRU, x=(2.0, 10.0))]) == set()


@pytest.mark.usefixtures("plotly")
def test_a_line_under_another_is_wider_and_has_another_stroke() -> None:
    again = dataclasses.replace(LRU, name="arc", series=2)

    ((_, _, figure),) = draw(dataclasses.replace(LINES, panels=(Panel("", (LRU, again)),)))

    below, above = (line.line for line in figure.data)
    assert below.width > above.width
    assert below.dash != above.dash
    assert below.color != above.color


@pytest.mark.usefixtures("plotly")
@pytest.mark.parametrize(("lowest", "mode"), [(0.1, "tozero"), (3.0, "normal")])
def test_the_axis_begins_at_zero_unless_lines_would_lie_flat(lowest: float, mode: str) -> None:
    line = dataclasses.replace(LRU, y=(lowest, 5.0))

    ((_, _, figure),) = draw(dataclasses.replace(LINES, panels=(Panel("", (line,)),)))

    assert figure.layout.yaxis.rangemode == mode


@pytest.mark.usefixtures("plotly")
def test_bars_are_stacked_and_the_rest_has_the_colour_of_the_baseline() -> None:
    ((name, _, figure),) = draw(BARS)

    host, computed, bound = figure.data
    assert name == "origins"
    assert figure.layout.barmode == "stack"
    assert list(host.y) == ["lru", "arc"]
    assert (list(host.x), list(computed.x)) == ([40.0, 30.0], [60.0, 70.0])
    assert computed.marker.color == COLOURS[0] != host.marker.color
    assert (bound.name, list(bound.x)) == ("the bound", [70.0, None])


def test_every_colour_is_legible_on_both_grounds() -> None:
    def brightness(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for ground in ("#ffffff", "#14181d"):
        for colour in COLOURS:
            low, high = sorted((brightness(ground), brightness(colour)))
            assert (high + 0.05) / (low + 0.05) >= 3, (ground, colour)


@pytest.mark.usefixtures("plotly")
def test_the_library_can_stand_in_one_script() -> None:
    assert "</script" not in read_library().lower()
