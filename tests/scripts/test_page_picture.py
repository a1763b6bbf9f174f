"""A plot of a page becomes a file that has its colours with it."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.cli.simulate.compared import compare

from kvtier.cli.simulate.report.page import make_page
from scripts.page_picture import main

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Return a page."""
    path = tmp_path / "page.html"
    path.write_text(make_page(compare(["lru"]), ["kvtier"]))
    return path


def test_a_plot_becomes_a_file_with_the_colours_of_both_grounds(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"

    assert main([str(page), "origins-0", str(picture)]) == 0

    root = ET.fromstring(picture.read_text())  # noqa: S314 - our own
    style = root.findtext(f"{SVG}style") or ""
    assert root.findtext(f"{SVG}title") == "Prompt tokens by origin"
    assert style.count("--series-8") == 2
    assert "prefers-color-scheme: dark" in style
    assert "body" not in style


def test_a_plot_that_is_not_there_is_told(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(page), "hits", str(tmp_path / "picture.svg")]) == 1
    assert "has no plot 'hits'" in capsys.readouterr().err
