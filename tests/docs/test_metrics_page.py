"""docs/reference/metrics.md is what the declared families say; the samples in docs/guide/monitoring.md are theirs."""

import re
from pathlib import Path

import pytest

from kvtier.observe.family import Family
from kvtier.observe.metrics import FAMILIES
from scripts.metrics_page import make_page

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
MONITORING = (DOCS / "guide" / "monitoring.md").read_text(encoding="utf-8")


def test_the_page_is_made_from_the_declaration() -> None:
    assert make_page() == PAGE, "run python -m scripts.metrics_page"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_page_has_a_row_for_each_family(family: Family) -> None:
    (row,) = [line for line in PAGE.splitlines() if f"| `{family.sample_name}`" in line]
    assert family.help in row
    assert f"| {family.kind.value} |" in row
    assert all(f"`{label}`" in row for label in family.labels)
    assert not family.vllm_name or f"`{family.vllm_sample_name}`" in row


def test_each_sample_that_the_guide_shows_is_of_a_declared_family() -> None:
    names = {family.sample_name + ending for family in FAMILIES for ending in ("", "_sum", "_count")}
    shown = re.findall(r"^(kvtier_\w+)[{ ]", MONITORING, flags=re.MULTILINE)
    assert len(shown) > 10
    assert set(shown) <= names
