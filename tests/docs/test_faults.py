"""Each test that the page of faults names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results" / "faults.md").read_text(encoding="utf-8")


def test_every_suite_of_a_row_is_there() -> None:
    named = re.findall(r"\btests/[\w/.]+", PAGE)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
