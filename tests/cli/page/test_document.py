"""A document keeps its figures as data that no text in them can end."""

import json
import re

import pytest

pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")

from kvtier.cli.page.charts import LineChart, Panel, PlotLine
from kvtier.cli.page.document import Document

EVIL = "</script><script>alert(1)</script>"


def chart_of(*values: float) -> LineChart:
    """Return a chart of one line whose every text is markup."""
    line = PlotLine(EVIL, 1, (1.0, 2.0), values)
    return LineChart("hits", EVIL, EVIL, EVIL, EVIL, (Panel(EVIL, (line,)),), ((1.0, EVIL), (2.0, "end")))


def test_markup_in_a_chart_stays_text() -> None:
    document = Document("title")
    document.add("Heading", document.figure(chart_of(1.0, 2.0)))

    page = document.render()

    assert EVIL not in page
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["hits-0"]["data"][0]["name"] == EVIL


def test_a_chart_in_which_nothing_changes_adds_no_section() -> None:
    document = Document("title")

    document.add("Heading", document.figure(chart_of(2.0, 2.0)))

    assert (document.sections, document.figures) == ([], {})
