"""The page of ``kvtier simulate --html`` in a real browser, without a network: drawn, legible, and right."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs plotly: pip install 'kvtier[plot]'")

from tests.browser import Browser, find_browser, open_browser

from kvtier.cli.main import main

pytestmark = pytest.mark.servers

MAX_PAGE_BYTES = 6_000_000
"""Plotly's script has five megabytes."""

TRACE_NAME = "<img src=x onerror=alert(1)>.jsonl"


def write_trace(path: Path) -> None:
    """Write 120 turns of ten chats that share a beginning."""
    draw = random.Random(7)
    chats = [[1, 2, 100 * number, 100 * number + 1] for number in range(1, 11)]
    with path.open("w") as file:
        for turn in range(120):
            chat = draw.choice(chats)
            chat.append(10_000 + turn)
            request = {
                "timestamp": 9_000 * turn,
                "input_length": 512 * len(chat) - 30,
                "output_length": 40,
                "hash_ids": chat,
            }
            file.write(json.dumps(request) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a page of a sweep and the same numbers as JSON."""
    folder = tmp_path_factory.mktemp("page")
    trace = folder / TRACE_NAME
    write_trace(trace)
    status = main(
        [
            "simulate",
            str(trace),
            *("--kv-bytes-per-token", "1KiB", "--device", "16MiB", "--tier", "fs:6MiB:1GB/s"),
            *(
                "--tier-setting",
                "fs.cascade=on_evict",
                "--policy",
                "lru,arc",
                "--sweep",
                "host=4MiB,8MiB,16MiB,64MiB",
            ),
            *("--html", str(folder / "page.html"), "--json", str(folder / "numbers.json")),
        ]
    )
    assert status == 0
    return folder


@pytest.fixture
def browser(folder: Path, tmp_path: Path) -> Iterator[Browser]:
    """Return a browser with the page open."""
    program = find_browser()
    if program is None:
        pytest.skip("no browser: apt-get install chromium-headless-shell")
    with open_browser(program, tmp_path / "profile") as browser:
        browser.open(folder / "page.html")
        yield browser


@pytest.fixture
def runs(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Return the runs of the JSON file."""
    found: list[dict[str, Any]] = json.loads((folder / "numbers.json").read_text())["runs"]
    return found


def test_the_page_loads_itself_and_nothing_else_and_complains_of_nothing(
    browser: Browser, folder: Path
) -> None:
    assert browser.requested == [(folder / "page.html").as_uri()]
    assert browser.complaints == []
    assert (folder / "page.html").stat().st_size < MAX_PAGE_BYTES


def test_every_plot_is_drawn_with_lines_text_and_a_name(browser: Browser) -> None:
    plots = browser.evaluate(
        "Array.from(document.querySelectorAll('.plot'), (plot) => ({"
        "  id: plot.id, name: plot.getAttribute('aria-label'),"
        "  width: plot.getBoundingClientRect().width, height: plot.getBoundingClientRect().height,"
        "  drawn: Array.from(plot.querySelectorAll('.trace path, .bars path'))"
        "    .filter((path) => path.getBBox().width > 100).length,"
        "  texts: plot.querySelectorAll('text').length,"
        "}))"
    )

    names = {plot["id"] for plot in plots}
    assert {"hits-0", "origins", "first-token-0", "writes-0", "occupancy-0"} <= names
    assert len(names) == len(plots)
    for plot in plots:
        assert plot["width"] > 300
        assert plot["height"] > 150
        assert plot["drawn"] > 0, plot
        assert plot["texts"] > 5
        assert plot["name"]


def test_values_show_under_the_pointer(browser: Browser, runs: list[dict[str, Any]]) -> None:
    browser.evaluate("Plotly.Fx.hover('hits-0', [{curveNumber: 1, pointNumber: 2}])")
    shown = browser.evaluate(
        "Array.from(document.querySelectorAll('#hits-0 .hoverlayer text'), (text) => text.textContent).join(' ')"
    )

    result = next(run["result"] for run in runs if (run["policy"], run["size"]) == ("lru", "16MiB"))
    saved = sum(result["total"]["hit_tokens"].values()) / result["total"]["num_prompt_tokens"]
    assert f"lru {100 * saved:.4g} at 16MiB" in shown.replace(" : ", " ")


def test_the_numbers_of_the_page_are_those_of_the_json(browser: Browser, runs: list[dict[str, Any]]) -> None:
    rows = browser.evaluate(
        "Array.from(document.querySelectorAll('#results tbody tr'), (row) =>"
        "  Array.from(row.cells, (cell) => [cell.textContent, cell.dataset.value ?? null]))"
    )
    headings = browser.evaluate(
        "Array.from(document.querySelectorAll('#results th'), (cell) => cell.textContent)"
    )

    assert len(rows) == len(runs) == 9
    for row, run in zip(rows, runs, strict=True):
        cells = dict(zip(headings, row, strict=True))
        total, num_tokens = run["result"]["total"], run["result"]["total"]["num_prompt_tokens"]
        assert cells["policy"][0] == run["policy"]
        assert cells["host size"][0] == (run["size"] or "-")
        for place in ("device", "host", "fs"):
            ratio = total["hit_tokens"].get(place, 0) / num_tokens
            assert float(cells[place][1]) == ratio
            assert cells[place][0] == f"{ratio:.1%}"
        assert float(cells["at most"][1]) == run["result"]["num_bound_tokens"] / num_tokens
        assert float(cells["p50 s"][1]) == total["first_token"]["p50_s"]
        assert cells["p90 s"][0] == f"{total['first_token']['p90_s']:.2f}"
        assert cells["served"][0] == str(total["num_requests"])


def test_what_the_user_named_is_text_and_not_markup(browser: Browser) -> None:
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert TRACE_NAME in browser.evaluate("document.querySelector('h1').textContent")
    command = browser.evaluate("document.querySelector('.facts dd').textContent")
    assert "--sweep host=4MiB,8MiB,16MiB,64MiB" in command


def test_no_part_of_the_page_is_wider_than_a_telephone(browser: Browser) -> None:
    browser.command(
        "Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True
    )

    assert browser.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(("scheme", "is_ground_bright"), [("light", True), ("dark", False)])
def test_the_page_is_legible_on_a_light_and_on_a_dark_ground(
    browser: Browser, scheme: str, is_ground_bright: bool
) -> None:
    browser.set_colour_scheme(scheme)

    picture = browser.take_picture()
    weakest = browser.evaluate(WEAKEST_CONTRAST)

    corner = picture[2, 2].mean()
    assert (corner > 0.9) if is_ground_bright else (corner < 0.2)
    different = np.abs(picture - picture[2, 2]).max(axis=2) > 0.3
    assert 0.01 < different.mean() < 0.5
    assert weakest["ratio"] >= 3.0, weakest


WEAKEST_CONTRAST = """(() => {
  const brightness = (colour) => {
    const parts = colour.match(/[0-9.]+/g).slice(0, 3).map((part) => {
      const share = Number(part) / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = brightness(getComputedStyle(document.body).backgroundColor);
  const ratio = (colour) => {
    const other = brightness(colour);
    return (Math.max(ground, other) + 0.05) / (Math.min(ground, other) + 0.05);
  };
  const colours = [];
  for (const each of document.querySelectorAll("h1, h2, h3, h4, td, th, dt, dd, figcaption p, .verdict")) {
    colours.push([each.tagName, getComputedStyle(each).color]);
  }
  for (const each of document.querySelectorAll(".plot text")) colours.push(["text", getComputedStyle(each).fill]);
  for (const each of document.querySelectorAll(".plot .js-line")) {
    colours.push(["line", getComputedStyle(each).stroke]);
  }
  return colours.filter(([, colour]) => colour !== "none")
    .map(([what, colour]) => ({ what, colour, ratio: ratio(colour) }))
    .reduce((worst, each) => (each.ratio < worst.ratio ? each : worst));
})()"""
"""The contrast with the ground, by the formula of WCAG 2, of what has the least."""
