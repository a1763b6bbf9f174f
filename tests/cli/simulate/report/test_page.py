"""The page is one whole file that refers to nothing outside of it."""

import dataclasses
from html.parser import HTMLParser

import pytest
from tests.cli.simulate.compared import compare, compare_host_sizes

from kvtier.cli.simulate.report.page import make_page

VOID = {"meta", "br", "input", "link", "img"}
REFERRING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"}
COMMAND = ("kvtier", "simulate", "trace.jsonl")


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


@pytest.fixture(scope="module")
def swept() -> str:
    """Return the page of a sweep."""
    return make_page(compare_host_sizes(), COMMAND)


@pytest.fixture(scope="module")
def plain() -> str:
    """Return the page of one size, with a trace and a command that look like markup."""
    comparison = compare(trace_name="</title><script>alert(1)</script>")
    return make_page(comparison, ("kvtier", "simulate", "<script>"))


def test_the_page_refers_to_nothing_outside(swept: str) -> None:
    page = Page(swept)

    assert page.open == []
    assert all(reference.startswith("#") for reference in page.references)
    assert "http" not in swept.replace("http-equiv", "")
    assert "@import" not in swept
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert page.policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")


def test_a_sweep_has_the_plot_of_hits_and_four_plots_for_each_size(swept: str) -> None:
    page = Page(swept)

    assert page.tags.count("svg") == 1 + 2 * 4
    assert page.tags.count("details") == 2
    assert len(page.names) == len(set(page.names))


def test_without_a_sweep_there_are_four_plots_and_nothing_is_folded(plain: str) -> None:
    page = Page(plain)

    assert (page.tags.count("svg"), page.tags.count("details")) == (4, 0)


def test_equal_results_make_equal_pages(swept: str) -> None:
    assert make_page(compare_host_sizes(), COMMAND) == swept


def test_a_name_from_outside_is_text(plain: str) -> None:
    page = Page(plain)

    assert page.tags.count("script") == 1
    assert "&lt;script&gt;alert(1)" in plain


def test_a_page_of_nothing_served_is_made_and_says_so() -> None:
    engine = dataclasses.replace(compare().engine, num_device_blocks=2)

    text = make_page(compare(engine=engine), COMMAND)

    assert "30 requests need more device blocks than there are and were skipped (all)." in text
