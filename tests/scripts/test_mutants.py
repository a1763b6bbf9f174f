"""The bugs that the storm must find can still be planted."""

from pathlib import Path

import pytest

from scripts.mutant_table import MUTANTS, Mutant
from scripts.mutants import BEGIN, END, PAGE, Verdict, count_places, plant, render_row, write_page

MIN_MUTANTS = 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutants_text_stands_in_the_code_exactly_once(mutant: Mutant) -> None:
    assert count_places(mutant) == 1
    assert mutant.old != mutant.new


def test_there_are_enough_of_them_and_none_twice() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= MIN_MUTANTS


def test_a_text_that_is_gone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("nothing of the kind\n", encoding="utf-8")
    with pytest.raises(ValueError, match="plant the bug anew"):
        plant(Mutant("gone", "file.py", "something", "else"), tmp_path)


def test_each_place_of_a_bug_is_changed_and_the_worst_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("one two\n", encoding="utf-8")
    mutant = Mutant("both", "file.py", "one", "1", also=(("two", "2"),))
    plant(mutant, tmp_path)
    assert (tmp_path / "file.py").read_text(encoding="utf-8") == "1 2\n"
    with pytest.raises(ValueError, match="plant the bug anew"):
        plant(mutant, tmp_path)


def test_a_page_keeps_what_stands_around_the_table() -> None:
    row = render_row(MUTANTS[0], Verdict("", ""))
    assert row.startswith(f"| {MUTANTS[0].name} | SURVIVES |")
    assert write_page(f"before\n{BEGIN}old\n{END}behind\n", [row]) == f"before\n{BEGIN}{row}\n\n{END}behind\n"


def test_the_page_has_mutants_of_the_table_alone_and_no_survivor() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")}
    names = {name for name in names if not name.isdigit()}
    assert names - {"mutant", "mutants"} <= {mutant.name for mutant in MUTANTS}
    assert "SURVIVES" not in page
