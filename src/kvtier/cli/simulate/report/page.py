"""Puts the page together: one HTML file with its style, its script and its plots in it.

It loads nothing, and its policy of content lets a browser refuse what would: no source but the file itself. The script
only sorts tables and hides lines; without it everything is there.
"""

import base64
import hashlib
import html
import importlib.metadata
from collections.abc import Iterator, Sequence
from importlib.resources import files

from kvtier.cli.simulate.comparison import Comparison
from kvtier.cli.simulate.report.chart import BarChart, LineChart
from kvtier.cli.simulate.report.plots import (
    plot_first_token,
    plot_hits,
    plot_occupancy,
    plot_origins,
    plot_writes,
)
from kvtier.cli.simulate.report.svg import draw
from kvtier.cli.simulate.report.tables import (
    render_facts,
    render_table,
    tabulate_results,
    tabulate_traffic,
    tabulate_watched,
)
from kvtier.cli.simulate.report.words import list_facts, list_limits, list_warnings
from kvtier.sim.sweep import Size

STYLE_FILE, SCRIPT_FILE = "page.css", "page.js"


def make_page(comparison: Comparison, command: Sequence[str]) -> str:
    """Return the page.

    Args:
        comparison: what was asked and found.
        command: the words of the command line.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    style, script = _read(STYLE_FILE), _read(SCRIPT_FILE)
    title = html.escape(f"kvtier simulate: {comparison.trace_name}")
    version = importlib.metadata.version("kvtier")
    body = "\n".join(_sections(comparison, command, version))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_content_policy(script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
{body}
</main>
<footer><p>Made by kvtier {html.escape(version)}. This page loads nothing.</p></footer>
<script>{script}</script>
</body>
</html>
"""


def _sections(comparison: Comparison, command: Sequence[str], version: str) -> Iterator[str]:
    warnings = "".join(f"<li>{html.escape(text)}</li>" for text in list_warnings(comparison))
    if warnings:
        yield f'<section class="warnings"><h2>Before you believe a number</h2><ul>{warnings}</ul></section>'
    hits = plot_hits(comparison)
    figure = _figure(hits) if hits else ""
    yield f"<section><h2>Results</h2>{render_table(tabulate_results(comparison))}{figure}</section>"
    sizes: Sequence[Size | None] = comparison.sweep.sizes if comparison.sweep else [None]
    for number, size in enumerate(sizes):
        yield _details(comparison, size, number)
    watched = tabulate_watched(comparison)
    if watched:
        yield f"<section><h2>Worth a look</h2>{render_table(watched)}</section>"
    yield f"<section><h2>What was simulated</h2>{render_facts(list_facts(comparison, command, version))}</section>"
    limits = "".join(f"<li>{html.escape(text)}</li>" for text in list_limits())
    yield f"<section><h2>What the numbers mean</h2><ul>{limits}</ul></section>"


def _details(comparison: Comparison, size: Size | None, number: int) -> str:
    """Return the plots and the traffic of one size; those after the first are folded."""
    name = str(number)
    charts: list[LineChart | BarChart] = [
        plot_origins(comparison, size, name),
        plot_first_token(comparison, size, name),
        plot_writes(comparison, size, name),
        plot_occupancy(comparison, size, name),
    ]
    content = "".join(_figure(chart) for chart in charts)
    traffic = render_table(tabulate_traffic(comparison, size, name))
    if size is None or comparison.sweep is None:
        return f"<section><h2>In detail</h2>{content}{traffic}</section>"
    heading = html.escape(f"{comparison.sweep.place} of {size.label} in detail")
    is_open = " open" if number == 0 else ""
    return f"<details{is_open}><summary><h2>{heading}</h2></summary>{content}{traffic}</details>"


def _figure(chart: LineChart | BarChart) -> str:
    caption = f"<strong>{html.escape(chart.title)}.</strong> {html.escape(chart.description)}"
    return f"<figure>{draw(chart)}<figcaption>{caption}</figcaption></figure>"


def _content_policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _read(name: str) -> str:
    return (files("kvtier.cli.simulate.report") / name).read_text(encoding="utf-8")
