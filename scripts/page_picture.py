"""Extracts one plot from a page of `kvtier simulate --html` as a picture file, for the docs.

The plot takes its colours from the page's style sheet; the file includes that part of the sheet, so that it is legible
on a dark background too.

    python -m scripts.page_picture PAGE.html hits docs/pictures/simulator-hits.svg
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
GROUND = "svg { background: var(--ground); color: var(--text); }\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture; return 1 when the page has no such plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, help="made by kvtier simulate --html")
    parser.add_argument("name", help="of the plot: hits, origins-0, first-token-0, writes-0, occupancy-0")
    parser.add_argument("picture", type=Path, help="the file to write, ending in .svg")
    given = parser.parse_args(arguments)
    picture = extract(given.page.read_text(encoding="utf-8"), given.name)
    if picture is None:
        print(f"{given.page} has no plot {given.name!r}", file=sys.stderr)
        return 1
    given.picture.write_text(picture, encoding="utf-8")
    return 0


def extract(page: str, name: str) -> str | None:
    """Return the plot ``name`` of ``page`` as a file of its own, None when it is not there. Pure."""
    plot = re.search(
        rf'<svg class="chart"[^>]*aria-labelledby="{re.escape(name)}-title .*?</svg>', page, re.DOTALL
    )
    style = re.search(r"<style>\n(.*?)</style>", page, re.DOTALL)
    if plot is None or style is None:
        return None
    kept = re.findall(
        r"^:root \{.*?^\}|^@media \(prefers.*?^\}|^svg\.chart[^\n]*", style[1], re.DOTALL | re.MULTILINE
    )
    sheet = "\n".join(kept) + "\n" + GROUND
    return (
        plot[0]
        .replace("<svg ", f"<svg {NAMESPACE} ", 1)
        .replace("<title", f"<style>\n{sheet}</style><title", 1)
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
