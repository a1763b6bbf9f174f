"""A run prints a table, keeps every number and draws what there is to draw; nothing that is missing loses numbers."""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.benchmarks.fake_suite import FAST, SLOW, install_suite, yielding

from benchmarks.harness.measurement import OURS, Bar, Better, Measurement
from benchmarks.harness.run import as_document, run_suite, run_suites
from benchmarks.harness.suite import Options

ALONE = Measurement({"tier": "fs", "measure": "p99"}, "ms", Better.LOWER, {OURS: (2.0,)}, Bar(None, 1.0))


def test_the_table_has_a_line_each_and_notes_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = install_suite(monkeypatch, yielding([FAST, SLOW], "a peer is not installed"))
    out = io.StringIO()

    assert run_suite(suite, out=out)["measurements"] == [as_document(FAST), as_document(SLOW)]

    title, head, *lines, note = out.getvalue().splitlines()
    assert title == "fake: what fake measures"
    assert head.startswith("operation")
    assert [line.split()[0] for line in lines] == ["put", "get"]
    assert note == "a peer is not installed"


def test_other_labels_and_further_contestants_begin_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = install_suite(monkeypatch, yielding([SLOW, FAST, SLOW, ALONE]))
    out = io.StringIO()

    run_suite(suite, out=out)

    first_words = [line.split()[0] for line in out.getvalue().splitlines()[1:]]
    assert first_words == ["operation", "get", "operation", "put", "get", "tier", "fs"]


def test_the_document_has_every_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suite = install_suite(monkeypatch, yielding([FAST, ALONE], "a note"))

    run_suite(suite, is_quick=True, json_path=tmp_path / "fake.json", out=io.StringIO())

    document = json.loads((tmp_path / "fake.json").read_text())
    machine = document.pop("machine")
    assert {"system", "python", "cores", "load", "numpy"} <= set(machine)
    assert document == {
        "suite": "fake",
        "is_quick": True,
        "notes": ["a note"],
        "measurements": [
            {
                "labels": {"operation": "put", "blocks": 16},
                "unit": "MiB/s",
                "better": "higher",
                "values": {"ours": [10.0, 20.0, 30.0], "floor": [20.0] * 3, "peer": [5.0] * 3},
                "medians": {"ours": 20.0, "floor": 20.0, "peer": 5.0},
                "ratios": {
                    "floor": {"median": 1.0, "low": 0.75, "high": 1.25},
                    "peer": {"median": 4.0, "low": 3.0, "high": 5.0},
                },
                "bar": {"against": "floor", "value": 0.9, "is_met": True},
            },
            {
                "labels": {"tier": "fs", "measure": "p99"},
                "unit": "ms",
                "better": "lower",
                "values": {"ours": [2.0]},
                "medians": {"ours": 2.0},
                "ratios": {},
                "bar": {"against": None, "value": 1.0, "is_met": False},
            },
        ],
    }


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_suite_is_told_how_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_quick: bool) -> None:
    told: list[Options] = []

    def measure(options: Options) -> Iterator[Measurement]:
        told.append(options)
        yield FAST

    run_suite(install_suite(monkeypatch, measure), is_quick=is_quick, folder=tmp_path, out=io.StringIO())

    ((told_quick, told_folder),) = [(options.is_quick, options.folder) for options in told]
    assert (told_quick, told_folder) == (is_quick, tmp_path)


@pytest.mark.parametrize(
    ("measurements", "x_label"),
    [
        pytest.param([FAST, SLOW, ALONE], None, id="ratios"),
        pytest.param([FAST, replace(FAST, labels=SLOW.labels), SLOW], "blocks", id="lines"),
        pytest.param([ALONE, ALONE], None, id="values, for want of anybody else"),
    ],
)
def test_a_picture_is_drawn_where_matplotlib_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measurements: list[Measurement], x_label: str | None
) -> None:
    pytest.importorskip("matplotlib")
    suite = install_suite(monkeypatch, yielding(measurements), x_label=x_label)

    run_suite(suite, picture_path=tmp_path / "fake.svg", out=io.StringIO())

    picture = (tmp_path / "fake.svg").read_text()
    assert "<svg" in picture
    assert "nan" not in picture


def test_a_picture_names_what_was_measured_though_nobody_was_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    lines = [replace(ALONE, labels={"tier": tier, "measure": "p99"}) for tier in ("fs", "obj")]

    run_suite(
        install_suite(monkeypatch, yielding(lines)), picture_path=tmp_path / "fake.svg", out=io.StringIO()
    )

    picture = (tmp_path / "fake.svg").read_text()
    assert all(f">{name} p99</text>" in picture for name in ("fs", "obj"))
    assert ">ms, lower is better; red: the bar</text>" in picture


def test_without_matplotlib_a_line_says_so_and_the_numbers_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    suite = install_suite(monkeypatch, yielding([FAST]))
    out = io.StringIO()

    run_suite(suite, json_path=tmp_path / "fake.json", picture_path=tmp_path / "fake.svg", out=out)

    assert ".[plot]" in out.getvalue().splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["fake.json"]


def test_a_suite_in_which_nothing_could_be_measured_keeps_its_notes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    suite = install_suite(monkeypatch, yielding([], "no server is installed"))
    out = io.StringIO()

    run_suite(suite, json_path=tmp_path / "fake.json", picture_path=tmp_path / "fake.svg", out=out)

    assert out.getvalue().splitlines() == ["fake: what fake measures", "no server is installed"]
    assert json.loads((tmp_path / "fake.json").read_text())["notes"] == ["no server is installed"]
    assert not (tmp_path / "fake.svg").exists()


def test_several_suites_keep_their_numbers_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = [install_suite(monkeypatch, yielding([FAST]), name) for name in ("one", "two")]

    run_suites(suites, is_quick=True, out_folder=tmp_path / "new" / "folder")

    assert {path.name for path in (tmp_path / "new" / "folder").glob("*.json")} == {"one.json", "two.json"}
    shown = capsys.readouterr().out
    assert shown.index("one: what one measures") < shown.index("two: what two measures")


def test_without_a_folder_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    run_suites([install_suite(monkeypatch, yielding([FAST]))], is_quick=True)

    assert list(tmp_path.iterdir()) == []
