"""One HTML file with style, script and plots in it, which loads nothing and forbids the browser to.

Plotly's script and the figures are inline; the figures are data in JSON. The content policy names both scripts by their
digests. Without scripts the page still has its sentences and tables.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from kvtier import __version__
from kvtier.cli.page.charts import BarChart, LineChart
from kvtier.cli.page.figures import CONFIG, draw, read_library

STYLE_FILE = "page.css"

STARTER = (
    'for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").textContent)))'
    " Plotly.newPlot(id, figure);"
)
"""Draws each figure in the element of its name."""


@dataclass(slots=True)
class Document:
    """A page in the making: sections in order, and the figures that they refer to.

    Attributes:
        title: its title.
        sections: HTML, escaped already.
        figures: the figures by the id of their element.
    """

    title: str
    sections: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)  # Any: JSON

    def add(self, heading: str, *parts: str, kind: str = "") -> None:
        """Add a section; ``parts`` are HTML. Without a part nothing is added."""
        content = "".join(parts)
        if content:
            attribute = f' class="{kind}"' if kind else ""
            top = f"<h2>{html.escape(heading)}</h2>" if heading else ""
            self.sections.append(f"<section{attribute}>{top}{content}</section>")

    def figure(self, chart: LineChart | BarChart | None) -> str:
        """Return the element of a chart, title above, and keep its figures; "" when nothing in it changes.

        Raises:
            MissingExtraError: plotly is not installed.
        """
        drawn = [] if chart is None else list(draw(chart))
        if chart is None or not drawn:
            return ""
        boxes = ""
        for name, title, figure in drawn:
            self.figures[name] = {**json.loads(figure.to_json(engine="json")), "config": CONFIG}
            top = f"<h4>{html.escape(title)}</h4>" if title else ""
            label = html.escape(f"{chart.title} {title}".strip())
            height = figure.layout.height
            boxes += (
                f'<div class="panel">{top}<div class="plot" id="{name}" role="img" aria-label="{label}"'
                f' style="min-height: {height}px"></div></div>'
            )
        return (
            f"<figure><figcaption><h3>{html.escape(chart.title)}</h3><p>{html.escape(chart.description)}</p>"
            f'</figcaption><div class="panels">{boxes}</div></figure>'
        )

    def render(self) -> str:
        """Return the whole file.

        Raises:
            MissingExtraError: plotly is not installed.
        """
        library = read_library()
        title = html.escape(self.title)
        version = html.escape(__version__)
        style = (files("kvtier.cli.page") / STYLE_FILE).read_text(encoding="utf-8")
        # Inside a script element only "</" could end it.
        figures = json.dumps(self.figures, allow_nan=False).replace("<", "\\u003c")
        body = "\n".join(self.sections)
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_content_policy(library, STARTER)}">
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
<footer><p>Made by kvtier {version}. This page loads no other file.</p>
<noscript><p>The plots need scripts; the tables have the numbers.</p></noscript></footer>
<script type="application/json" id="figures">{figures}</script>
<script>{library}</script>
<script>{STARTER}</script>
</body>
</html>
"""


def render_list(sentences: Iterable[str]) -> str:
    """Return sentences as a list; "" without any. Pure."""
    items = "".join(f"<li>{html.escape(text)}</li>" for text in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _content_policy(*scripts: str) -> str:
    digests = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    # Plotly makes pictures of plots from data of its own.
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {digests}"
