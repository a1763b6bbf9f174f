"""The page is one whole file that refers to nothing outside of it."""

import base64
import dataclasses
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")

from tests.cli.simulate.compared import SIZES, compare

from kvtier.cli.page.figures import read_library
from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.report.page import make_page
from kvtier.cli.simulate.verdict import make_verdict
from kvtier.sim.model import HostModel
from kvtier.sim.sweep import Sweep

VOID = {"meta", "br", "input", "link", "img"}
REFERRING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"}


class Page(HTMLParser):
    """Collects what a test asks about, and that each element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.names: list[str] = []
        self.policy = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.references += [value or "" for name, value in attrs if name in REFERRING]
        self.names += [value or "" for name, value in attrs if name == "id"]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found.get("content") or ""


def sweep_host() -> Comparison:
    """Simulate host memory of two sizes with nothing behind it, so that hits depend on the size."""
    return compare(host=HostModel(4), sweep=Sweep("host", SIZES))


@pytest.fixture(scope="module")
def swept() -> str:
    """Return the page of a sweep."""
    return make_page(sweep_host())


@pytest.fixture(scope="module")
def plain() -> str:
    """Return the page of one size, with a trace and a command that look like markup."""
    comparison = compare(trace_name="</title><script>alert(1)</script>")
    return make_page(dataclasses.replace(comparison, command=("kvtier", "simulate", "<script>")))


def own_parts(page: str) -> str:
    """Return the page without plotly's script."""
    return page.replace(read_library(), "")


def test_the_page_refers_to_nothing_outside(swept: str) -> None:
    page = Page(swept)

    assert page.open == []
    assert all(reference.startswith("#") for reference in page.references)
    assert "http" not in own_parts(swept).replace("http-equiv", "")
    assert "@import" not in own_parts(swept)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert page.policy.startswith(
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src"
    )


def test_the_policy_names_the_digest_of_each_script(swept: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", swept, re.DOTALL)

    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]

    assert len(digests) == 2
    assert all(f"'sha256-{digest}'" in Page(swept).policy for digest in digests)


def test_the_verdict_and_its_numbers_stand_first(swept: str) -> None:
    comparison = sweep_host()
    text = html.escape(make_verdict(comparison).text)

    main = swept.partition("<main>")[2]

    assert main.index(text) < main.index("<h2>")
    assert main.index('<dl class="headline">') < main.index("<h2>")


def test_a_sweep_has_the_plot_of_hits_and_those_of_one_size(swept: str) -> None:
    figures = figures_of(swept)

    assert list(figures)[:3] == ["hits-0", "origins", "first-token-0"]
    assert all(f'id="{name}"' in swept for name in figures)
    assert len(Page(swept).names) == len(set(Page(swept).names))


def test_without_a_sweep_there_is_no_plot_of_capacities(plain: str) -> None:
    assert "hits-0" not in figures_of(plain)
    assert "origins" in figures_of(plain)


def figures_of(page: str) -> dict[str, Any]:  # Any: JSON
    """Return the figures of a page by name."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def test_equal_results_make_equal_pages(swept: str) -> None:
    assert make_page(sweep_host()) == swept


def test_a_name_from_outside_is_text(plain: str) -> None:
    page = Page(plain)

    assert page.tags.count("script") == 3
    assert "&lt;script&gt;alert(1)" in plain


def test_a_page_of_nothing_served_is_made_and_says_so() -> None:
    engine = dataclasses.replace(compare().engine, num_device_blocks=2)

    text = make_page(compare(engine=engine))

    assert "30 requests need more device blocks than there are and were skipped (all)." in text
