"""Panels of curves become one small SVG file that any browser reads."""

import math
from xml.etree import ElementTree as ET

import pytest

from scripts.small_multiples import PANEL_WIDTH, Curves, Series, draw, in_unit, round_up

PANELS = [
    Curves("A & B", "percentunit", [Series("one", [(0.0, 0.0), (10.0, 1.0)])], most=1.0),
    Curves("rates", "Bps", [Series("x", [(0.0, math.nan), (5.0, 700.0)]), Series("y", [])]),
    Curves("nothing", "short", []),
    Curves("below", "s", [Series("z", [(0.0, 0.002)])]),
]


def test_the_document_has_each_title_and_series_and_no_number_that_is_none() -> None:
    text = draw(PANELS, 10.0)
    root = ET.fromstring(text)  # noqa: S314 - our own
    shown = [element.text for element in root.iter() if element.text]
    assert {"A & B", "rates", "nothing", "below", "one", "x", "y", "z", "10 s"} <= set(shown)
    assert "nan" not in text
    assert "prefers-color-scheme:dark" in text
    assert root.get("viewBox") == f"0 0 {3 * PANEL_WIDTH} 380"


def test_a_curve_runs_from_the_lower_left_to_the_upper_right() -> None:
    (path,) = [line for line in draw(PANELS[:1], 10.0).splitlines() if 'class="s0"' in line]
    assert 'd="M56.0 148.0L292.0 30.0"' in path


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.5, "percentunit", "50 %"),
        (0.002, "s", "2 ms"),
        (2.0, "s", "2 s"),
        (1500.0, "Bps", "1.5 kB/s"),
        (20.0, "short", "20"),
    ],
)
def test_axes_have_units(value: float, unit: str, shown: str) -> None:
    assert in_unit(value, unit) == shown


def test_an_axis_ends_at_a_round_number() -> None:
    assert [round_up(value) for value in (0.0, 0.9, 1.1, 3.0, 70.0)] == pytest.approx([1, 1, 2, 5, 100])
