"""docs/reference/metrics.md is what the declared families say."""

from pathlib import Path

import pytest

from kvtier.observe.family import Family
from kvtier.observe.metrics import FAMILIES
from scripts.metrics_page import make_page

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")


def test_the_page_is_made_from_the_declaration() -> None:
    assert make_page() == PAGE, "run python -m scripts.metrics_page"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_page_has_a_row_for_each_family(family: Family) -> None:
    (row,) = [line for line in PAGE.splitlines() if f"| `{family.sample_name}`" in line]
    assert family.help in row
    assert f"| {family.kind.value} |" in row
    assert all(f"`{label}`" in row for label in family.labels)
    assert not family.vllm_name or f"`{family.vllm_sample_name}`" in row
