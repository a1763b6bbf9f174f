"""Write docs/reference/metrics.md from the declared metric families.

python -m scripts.metrics_page              exit status 1 when the page was not as it should be; it is then rewritten
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from kvtier.observe.family import Family, Kind
from kvtier.observe.metrics import SECTIONS

PAGE = Path("docs/reference/metrics.md")

HEAD = """# Metrics

Every metric family of kvtier. This page is made from its declaration (`kvtier.observe.metrics`, for tiers
`kvtier.observe.tier_metrics`) by `python -m scripts.metrics_page`.
[Monitoring](../guide/monitoring.md) says which of them to look at.

**Names.** The first column is the name on the page of kvtier's own exporter. vLLM's page has the same, but for the
families with a second name below: those mean exactly what a family of vLLM's own offloading means, and carry its name
there. vLLM adds its labels `model_name` and `engine`.

**Types.** A counter counts from the engine's start. A histogram has `_bucket`, `_count` and `_sum`.

**Labels.** `tier` is the type of a secondary tier, or `host` for host memory. `tier_index` is its position in
`secondary_tiers`, from 0.
"""


def main() -> int:
    """Rewrite the page; return 1 when that changed it."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    after = make_page()
    PAGE.write_text(after, encoding="utf-8")
    print(f"{PAGE}: {'as the code says' if after == before else 'rewritten'}")
    return int(after != before)


def make_page() -> str:
    """Return the page. Pure."""
    tables = [f"\n## {heading}\n\n{table_of(families)}" for heading, families in SECTIONS.items()]
    return HEAD + "".join(tables)


def table_of(families: Iterable[Family]) -> str:
    """Return the Markdown table of some families. Pure."""
    rows = ["| name | type | labels | unit | meaning |", "|---|---|---|---|---|", *map(row_of, families)]
    return "\n".join(rows) + "\n"


def row_of(family: Family) -> str:
    """Return the row of one family. Pure."""
    name = f"`{family.sample_name}`"
    if family.vllm_name:
        name += f"<br>vLLM: `{family.vllm_sample_name}`"
    labels = ", ".join(f"`{label}`" for label in family.labels) or "-"
    meaning = family.help
    if family.kind is Kind.HISTOGRAM:
        meaning += f" Buckets up to {family.bounds[0]:g} ... {family.bounds[-1]:g}."
    return f"| {name} | {family.kind.value} | {labels} | {family.unit} | {meaning} |"


if __name__ == "__main__":
    sys.exit(main())
