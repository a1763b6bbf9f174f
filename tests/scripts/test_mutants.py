"""The bugs that the storm must find can still be planted."""

import json
import re
from pathlib import Path

import pytest

from scripts.mutant_table import MUTANTS, Mutant
from scripts.mutants import RECORD, ROOT, Verdict, count_places, make_record, plant, render_row

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


def test_a_mutant_that_nothing_has_found_survives_in_its_row_and_in_the_record() -> None:
    storm, survivor = MUTANTS[:2]
    assert render_row(survivor, Verdict("", "")).startswith(f"| {survivor.name} | SURVIVES |")
    record = make_record([(storm, Verdict("storm", "7 operations")), (survivor, Verdict("", ""))], 3, 100)
    assert (record["num_planted"], record["num_killed_by_storm"], record["num_survivors"]) == (2, 1, 1)
    assert record["mutants"] == [
        {"name": storm.name, "killed_by": "storm", "after": "7 operations"},
        {"name": survivor.name, "killed_by": "", "after": ""},
    ]


def test_the_record_has_mutants_of_the_table_alone_and_no_survivor() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert {row["name"] for row in record["mutants"]} <= {mutant.name for mutant in MUTANTS}
    assert all(row["killed_by"] in {"storm", "suite"} for row in record["mutants"])
    assert record["num_survivors"] == 0


def test_the_page_of_faults_has_the_numbers_of_the_record() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "results" / "faults.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\|[^|]*\| `make mutants` \|(.*)\|$", page, flags=re.MULTILINE)
    assert list(map(int, re.findall(r"\b\d+\b", row))) == [
        record["num_planted"],
        record["num_killed_by_storm"],
        record["num_planted"] - record["num_killed_by_storm"] - record["num_survivors"],
        record["num_survivors"],
    ]
