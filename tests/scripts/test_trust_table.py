"""The table of faults says what was counted, and does not hide what failed."""

import pytest

from scripts import trust_table
from scripts.trust_table import BEGIN, END, PAGE, ROOT, ROWS, Row, Tally, read_page, render_row, write_page

ROW = Row("a fault", "pytest tests", recovers=True)


def test_a_row_has_what_was_tried_and_three_zeros() -> None:
    line = render_row(ROW, Tally({"cases": 1200, "jobs": 3}))
    assert line == "| a fault | 1,200 cases, 3 jobs | 0 | 0 | 0 | yes | `python -m pytest tests` |"


@pytest.mark.parametrize(
    ("tally", "told"),
    [
        (Tally({"cases": 3}, wrong=2), "| 2 | 0 | 0 | **no** |"),
        (Tally({"cases": 3}, lost=1), "| 0 | 1 | 0 | **no** |"),
        (Tally({"cases": 3}, stuck=1), "| 0 | 0 | 1 | **no** |"),
        (Tally({"cases": 3}, failed=3), "| **3 failed** | 0 | 0 | **no** |"),
        (Tally(), "| not run here |"),
        (None, "| not run here |"),
    ],
)
def test_a_finding_is_shown(tally: Tally | None, told: str) -> None:
    assert told in render_row(ROW, tally)


def test_a_page_keeps_the_numbers_of_rows_that_are_not_run_again() -> None:
    tallies = {ROWS[0].fault: Tally({"cases": 7}, skipped=1), ROWS[1].fault: Tally({"cases": 2})}
    page = write_page(f"before\n{BEGIN}old\n{END}behind\n", tallies)
    assert read_page(page) == tallies
    assert "7 cases (1 skipped)" in page
    assert page.startswith("before\n")
    assert page.endswith("behind\n")


def test_every_suite_of_a_row_is_there() -> None:
    for row in ROWS:
        for word in row.command.split()[1:]:
            assert not word.startswith("tests/") or (ROOT / word).exists(), word
    assert len({row.fault for row in ROWS}) == len(ROWS)


def test_the_page_has_rows_of_the_table_alone_and_no_finding() -> None:
    kept = read_page(PAGE.read_text(encoding="utf-8"))
    assert kept
    assert set(kept) <= {row.fault for row in ROWS}
    assert not [fault for fault, tally in kept.items() if trust_table.has_finding(tally) or not tally.tries]


KILLS = (
    "20 kills, 1,206 blocks acknowledged, 2,410 loaded and right; acknowledged and not found: 1; wrong bytes: 2; "
    "found and never stored: 3; damaged blocks seen: 0; starts or calls that failed: 4"
)
CUTS = (
    "| `fs` | `none` | page cache | 8 | 432 | 0 | 0 | 0 |\n"
    "| `slab` | `fdatasync` | direct | 8 | 432 | 430 | 1 | 3 |\n"
)  # fmt: skip


def test_what_commands_print_becomes_numbers() -> None:
    assert trust_table.read_crash(KILLS) == Tally({"kills": 20, "reported": 1206, "blocks": 2410}, 5, 1, 4)
    assert trust_table.read_power_loss(CUTS) == Tally({"cuts": 16, "reported": 864}, 1, 2, 3)
    assert trust_table.read_storm("storm: 5200 operations, seeds 5 to 17, no law broken\n") == Tally(
        {"operations": 5200}
    )
    found = "Of 61 rows 2 find blocks of the other engine. Of those that both have in common 0 are missed."
    assert trust_table.read_identity(found) == Tally({"engines": 61}, wrong=2)
    audited = "{'equal': 40, 'close': 8, 'wrong': 0, 'lost': 5} largest deviation 0.3 tolerances\n"
    ended = "{'equal': 90, 'close': 8, 'wrong': 2, 'lost': 5} largest deviation 7 tolerances\n"
    assert trust_table.read_audit(audited + ended) == Tally({"blocks": 100}, failed=2)
    assert trust_table.read_counts({"passed": 5, "failed": 1, "jobs": 9, "wrong": 2}) == Tally(
        {"cases": 6, "jobs": 9, "blocks": 0}, wrong=2, failed=1
    )


@pytest.mark.parametrize("name", ["read_crash", "read_storm", "read_identity", "read_audit"])
def test_a_command_that_says_nothing_has_failed(name: str) -> None:
    assert getattr(trust_table, name)("storm: BROKEN after 3 operations") == Tally(failed=1)
