"""CONTRIBUTING names the layers and the limits that the scripts enforce."""

import re
from pathlib import Path

from scripts import check_docs, import_direction, style_limits

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def table_after(heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading, head and rule left out."""
    rows = re.findall(r"^\|(.*)\|$", TEXT.partition(heading)[2].partition("\n\n|")[2], flags=re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    num_rows = next((at for at, row in enumerate(cells) if len(row) != len(cells[0])), len(cells))
    return cells[1:num_rows]


def test_the_layers_are_those_of_the_script() -> None:
    layers = [
        frozenset(re.findall(r"`([\w.]+)`", row[1])) for row in table_after("## Where an import may point")
    ]

    assert layers[::-1] == list(import_direction.LAYERS)


def test_the_limits_are_those_of_the_script() -> None:
    rows = {row[0]: row[1:] for row in table_after("enforces the countable part")}

    assert rows["lines in a file"] == [str(style_limits.MAX_FILE_LINES), str(style_limits.MEDIAN_FILE_LINES)]
    assert rows["lines in a function, docstring left out"] == [
        str(style_limits.MAX_FUNCTION_LINES),
        str(style_limits.MEDIAN_FUNCTION_LINES),
    ]
    assert rows["branches in a function"][0] == str(style_limits.MAX_BRANCHES)
    assert rows["methods that a class defines"][0] == str(style_limits.MAX_METHODS)
    short = f"importers of a file under {style_limits.MIN_FILE_LINES} lines, unless it implements a contract"
    assert rows[short][0] == f"at least {style_limits.MIN_IMPORTERS}"


def test_the_limits_on_prose_are_those_of_the_script() -> None:
    assert f"paragraphs over {check_docs.MAX_PARAGRAPH_WORDS} words" in TEXT
    assert check_docs.MAX_SENTENCE_NUMBERS == 2
    assert f"at most {check_docs.MAX_DECISION_WORDS} words" in TEXT
