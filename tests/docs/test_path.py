"""The page about the path of a block has the numbers of today's code, and names what there is."""

import ast
import re
from pathlib import Path

import pytest

from scripts.trace_path import main

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvtier"
PAGE = ROOT / "docs" / "concepts" / "path.md"

MOST = [134, 39]
"""Functions and files of a store, and of a load."""

MAX_CALLS_OF_A_KEY = 19
"""A reader holds the way of one store or one load in the head; each frame of a lookup is paid for each block, but for
the nine of the poll that a step begins with."""


def summary_of(output: str) -> list[str]:
    """Return the lines with the numbers of the path."""
    return re.findall(r"^(?:MISS|STORE|LOAD): .+$", output, re.MULTILINE)


@pytest.fixture
def traced(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that the script prints now."""
    assert main(["--summary"]) == 0
    return summary_of(capsys.readouterr().out)


def test_the_numbers_of_the_page_are_those_of_the_script(traced: list[str]) -> None:
    assert summary_of(PAGE.read_text(encoding="utf-8")) == traced


def test_the_path_stays_short_enough_to_be_held_in_the_head(traced: list[str]) -> None:
    numbers = {line.partition(":")[0]: list(map(int, re.findall(r"\d+", line))) for line in traced}
    assert numbers["MISS"] == [MAX_CALLS_OF_A_KEY]
    for path in ("STORE", "LOAD"):
        assert all(number <= limit for number, limit in zip(numbers[path], MOST, strict=True)), path


@pytest.mark.slow
def test_each_member_that_the_page_names_is_there() -> None:
    sources: dict[str, str] = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                sources[node.name] = sources.get(node.name, "") + (ast.get_source_segment(text, node) or "")
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", PAGE.read_text(encoding="utf-8"))
    lost = [
        f"{owner}.{member}"
        for owner, member in named
        if not re.search(rf"(def |self\.){member}\b", sources.get(owner, ""))
    ]
    assert named
    assert lost == []
