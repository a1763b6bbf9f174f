"""The tables of a page of results say what a run has kept: medians, ratios, bars, and nothing typed by hand."""

import json
from datetime import date
from pathlib import Path

import pytest

from benchmarks.harness.measurement import FLOOR, OURS, Bar, Better, Measurement
from benchmarks.harness.run import as_document
from scripts import results_table

PAGE = f"# A machine\n\nProse that stays.\n\n{results_table.BEGIN}\nold\n{results_table.END}\n\nMore prose.\n"
PUT = Measurement(
    {"operation": "put", "block": "1 MiB", "jobs": 8},
    "MiB/s",
    Better.HIGHER,
    {OURS: (1_500.0, 1_600.0, 1_700.0), FLOOR: (2_000.0, 2_000.0, 2_000.0)},
    Bar(FLOOR, 0.75),
)
STEP = Measurement(
    {"a step in which they": "wait"}, "ms", Better.LOWER, {OURS: (1.24, 1.25, 1.26)}, Bar(None, 1.0)
)


def first_token(origin: str, ours_ms: float) -> Measurement:
    """Return a line of the suite ``engine``."""
    values = {OURS: (ours_ms,), "device": (33.4,), "computed": (1_926.0,)}
    return Measurement({"prompt from": origin, "tokens": 4096}, "ms", Better.LOWER, values)


def write_run(folder: Path, **suites: list[Measurement]) -> Path:
    """Keep suites as `kvtier bench --out` does."""
    folder.mkdir()
    for name, measurements in suites.items():
        document = {
            "suite": name,
            "is_quick": False,
            "machine": {"processor": "Intel Xeon", "cores": 2, "commit": "abc1234"},
            "notes": ["a note"],
            "measurements": [as_document(measurement) for measurement in measurements],
        }
        (folder / f"{name}.json").write_text(json.dumps(document))
        (folder / f"{name}.svg").write_text("<svg/>")
    return folder


def test_a_line_has_what_was_measured_the_median_the_peer_and_whether_the_bar_is_met() -> None:
    assert results_table.cells_of(as_document(PUT)) == (
        "put, 1 MiB, 8 jobs",
        "1,600 MiB/s",
        "floor 2,000 MiB/s: 0.80 (bar 0.75)",
        "yes",
    )


def test_a_bar_on_the_value_itself_says_which_side_is_good() -> None:
    assert results_table.cells_of(as_document(STEP)) == ("wait", "1.250 ms", "at most 1 ms", "**no**")


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", fs=[PUT], engine=[STEP])
    page = tmp_path / "page.md"
    page.write_text(PAGE)

    assert results_table.main([str(run), str(page), "--date", "2026-11-22"]) == 0

    text = page.read_text()
    assert text.startswith("# A machine\n\nProse that stays.\n")
    assert text.endswith(f"{results_table.END}\n\nMore prose.\n")
    assert "old" not in text
    assert "| date | 2026-11-22 |\n| processor | Intel Xeon |\n" in text
    assert "Bars met: 1 of 2." in text
    assert text.index("## engine") < text.index("## fs")
    assert "| put, 1 MiB, 8 jobs | 1,600 MiB/s | floor 2,000 MiB/s: 0.80 (bar 0.75) | yes |" in text
    assert "```text\na note\n```" in text


def test_the_times_to_first_token_are_kept_for_the_picture(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", engine=[first_token("host", 36.8), first_token("fs", 59.0), STEP])
    page, kept = tmp_path / "page.md", tmp_path / "first-token.json"
    page.write_text(PAGE)

    assert results_table.main([str(run), str(page), "--date", "2026-11-22", "--first-token", str(kept)]) == 0

    assert json.loads(kept.read_text()) == {
        "tokens": 4096,
        "date": "2026-11-22",
        "commit": "abc1234",
        "processor": "Intel Xeon",
        "ms": {"computed": 1926.0, "device": 33.4, "host": 36.8, "fs": 59.0},
    }


@pytest.mark.parametrize("broken", ["no marks", "no run", "other json", "no first token"])
def test_what_cannot_be_right_is_refused_and_the_page_stays(tmp_path: Path, broken: str) -> None:
    run = write_run(tmp_path / "run", fs=[PUT]) if broken != "no run" else tmp_path / "lost"
    page = tmp_path / "page.md"
    page.write_text("# No marks\n" if broken == "no marks" else PAGE)
    if broken == "other json":
        (run / "fs.json").write_text("{}")
    before = page.read_text()
    more = ["--first-token", str(tmp_path / "kept.json")] if broken == "no first token" else []

    assert results_table.main([str(run), str(page), *more]) == 1

    assert page.read_text() == before
    assert not (tmp_path / "kept.json").exists()


def test_dates_default_to_the_newest_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", fs=[PUT])
    page = tmp_path / "page.md"
    page.write_text(PAGE)

    assert results_table.main([str(run), str(page)]) == 0

    made = date.fromtimestamp((run / "fs.json").stat().st_mtime)
    assert f"| date | {made.isoformat()} |" in page.read_text()


def test_the_machine_is_said_without_a_kernel_s_own_suffix() -> None:
    machine = {"system": "Linux-6.18.44-own-v657-x86_64-with-glibc2.36", "load": 0.8115234375}

    table = results_table.machine_table(machine, date(2026, 1, 2))

    assert "| system | Linux-6.18-x86_64-with-glibc2.36 |" in table
    assert "| load | 0.8 |" in table
