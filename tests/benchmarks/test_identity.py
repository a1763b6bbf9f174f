"""The matrix of identities: a row that separates, one that shares, and the page that both make."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.identity.changes import list_changes
from benchmarks.identity.matrix import run_matrix
from benchmarks.identity.row import UNCHANGED, Row, render_table, summarize
from scripts.identity_matrix import BEGIN, END, merge_rows, read_page, write_page

CHANGES = {change.name: change for change in list_changes()}
ROW = Row("weights", "one bit", 0, 0, 0.5, {"LMCache": False})


def test_there_are_at_least_forty_changes_and_each_has_a_name_of_its_own() -> None:
    changes = list_changes()
    assert len(changes) == len(CHANGES)
    assert sum(change.group != UNCHANGED for change in changes) >= 40


@pytest.mark.parametrize(
    "name",
    [
        "one bit of one weight in the last layer",
        "attention computed by another backend",
        "tenant, none before",
        "after a reset",
        "a token of the third block",
        "a new process with the same settings",
        "the model's name",
    ],
)
def test_an_engine_finds_what_it_has_in_common_with_the_other_one_and_nothing_else(name: str) -> None:
    (row,) = run_matrix([CHANGES[name]])
    assert (row.num_found, row.is_leak, row.is_lost) == (row.num_shared, False, False)


def test_a_row_that_finds_more_is_a_leak_and_one_that_finds_less_is_lost() -> None:
    leak = replace(ROW, num_found=16)
    lost = replace(ROW, group=UNCHANGED, num_shared=16)
    assert (leak.is_leak, lost.is_leak) == (True, False)
    assert (leak.is_lost, lost.is_lost) == (False, True)
    summary = summarize([ROW, leak, lost])
    assert summary.startswith(
        "Of 3 rows 1 find blocks of the other engine. Of those that both have in common 1 are"
    )
    assert "The key of LMCache is the same in 2 of 2 changes. The bytes differ in 2 of those." in summary


def test_the_page_gets_the_table_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    write_page(page, [ROW])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}after\n")
    assert "| weights | one bit | 0 / 0 | 0.5 |  | same key |" in text
    assert render_table([ROW]) in text
    assert "old" not in text


def test_rows_that_are_run_again_take_their_old_places_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}{END}after\n")
    assert read_page(page) == []
    other, new = replace(ROW, name="other"), replace(ROW, name="new")
    write_page(page, [ROW, other])
    assert read_page(page) == [ROW, other]
    again = replace(ROW, num_found=16)
    assert merge_rows(read_page(page), [new, again]) == [again, other, new]
