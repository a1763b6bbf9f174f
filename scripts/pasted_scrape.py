"""Paste a scrape of a small engine into docs/guide/monitoring.md.

    python -m scripts.pasted_scrape          starts an engine, scrapes it and rewrites the block below the mark

Times and bytes are those of the run; a test checks that each line is about a declared family.
"""

import re
import sys
import tempfile
import urllib.request
from pathlib import Path

from scripts.small_engine import running_engine, serve_some

PAGE = Path("docs/guide/monitoring.md")

MARK = "<!-- pasted by python -m scripts.pasted_scrape -->\n"

SHOWN = (
    "kvtier_prompt_tokens_total",
    "kvtier_missed_tokens_total",
    "kvtier_loaded_tokens_total",
    "kvtier_host_held_blocks",
    "kvtier_host_capacity_blocks",
    "kvtier_host_evicted_blocks_total",
    "kvtier_load_bytes_total",
    "kvtier_request_wait_seconds_sum",
    "kvtier_request_wait_seconds_count",
    "kvtier_tier_stored_blocks_total",
    "kvtier_tier_read_bytes_total",
    "kvtier_tier_promotion_seconds_sum",
    "kvtier_tier_promotion_seconds_count",
    "kvtier_tier_breaker_open",
)
"""The samples that the page shows, of some two hundred."""

_BLOCK = re.compile(re.escape(MARK) + r"```text\n.*?```\n", re.DOTALL)


def main() -> int:
    """Rewrite the page."""
    with tempfile.TemporaryDirectory() as folder, running_engine(Path(folder), metrics_port=0) as engine:
        serve_some(engine)
        assert engine.metrics is not None
        with urllib.request.urlopen(engine.metrics.url, timeout=60) as answer:  # noqa: S310 - our own server
            scraped = answer.read().decode()
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_scrape(page, scraped), encoding="utf-8")
    print(f"{PAGE}: {len(shown_lines(scraped))} samples")
    return 0


def shown_lines(scraped: str) -> list[str]:
    """Return the lines of a scrape that the page shows, in the order of ``SHOWN``. Pure."""
    lines = scraped.splitlines()
    return [line for name in SHOWN for line in lines if re.match(rf"{name}[ {{]", line)]


def with_scrape(page: str, scraped: str) -> str:
    """Return the page with the block below the mark replaced. Pure."""
    block = "\n".join([f"{MARK}```text", *shown_lines(scraped), "```", ""])
    assert _BLOCK.search(page) is not None, f"{PAGE} has no block below {MARK!r}"
    return _BLOCK.sub(lambda _: block, page)


if __name__ == "__main__":
    sys.exit(main())
